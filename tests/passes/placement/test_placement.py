"""What placement finds on real models; tests/benchmarks/test_placement.py: it is the minimum."""

import pytest

from dcpc.ir import NodePlacement, Placement, Program, tensor_operands
from dcpc.passes.placement import placement
from dcpc.passes.placement.elimination import CostNetwork
from dcpc.passes.placement.placement import PlacementModel, place
from dcpc.passes.sharding.sharding import analyse
from dcpc.plan.folding import fold
from tests.cases.analysed import CPU, GPU, LONG, deep_gpt, gpt, llama


def changes(program: Program, placement: Placement) -> list[tuple[str, str, str, str]]:
    """(value, label, wanted label, consumer) of every collective in forward."""
    found = {}
    for node in program.gm.graph.nodes:
        if node.name in placement.nodes:
            wants = placement.nodes[node.name].operands
            for source, want in zip(tensor_operands(node, program.info), wants, strict=False):
                have = placement.nodes[source.name].output
                if have != want and (have.sharded or have.partial):
                    found[source.name, want] = (source.name, str(have), str(want), node.name)
    return list(found.values())


def attention(placement: Placement) -> list[NodePlacement]:
    found = [p for name, p in placement.nodes.items() if name.startswith("attention_default")]
    assert found, "no attention was placed"
    return found


def test_ulysses_is_found_when_a_long_sequence_has_as_many_kv_heads():
    program, sharding = gpt()
    found = place(program, sharding, LONG, 4, CPU)
    assert [chosen.name for chosen in attention(found)] == ["h", "h"]
    second = [c for c in changes(program, found) if c[3] == "attention_default_1"]
    assert [(have, want) for _, have, want, _ in second] == [("shard(2)", "shard(1)")] * 3
    linears = [p for k, p in found.nodes.items() if k.startswith("linear_")]
    assert sum(p.output.dim == 1 for p in linears) >= len(linears) - 4  # the first layer may differ


def test_only_loss_rows_are_gathered_when_the_batch_is_large():
    program, sharding = gpt()
    for sp in (2, 4, 8):
        found = place(program, sharding, {"batch": 8, "seq": 1024}, sp, CPU)
        assert len(changes(program, found)) == 1
        (name, _, want, _) = changes(program, found)[0]
        assert len(program.info[name].shape) == 1
        assert want == "replicated"


@pytest.mark.parametrize("model", [llama, lambda: gpt(2)], ids=["llama", "gpt"])
def test_keys_and_values_are_gathered_when_there_are_fewer_kv_heads_than_ranks(model):
    program, sharding = model()
    found = place(program, sharding, LONG, 4, CPU)
    batch, seq = program.symbols["batch"], program.symbols["seq"]
    gathered = [name for name, _, want, _ in changes(program, found) if want == "replicated"]
    kv = [name for name in gathered if program.info[name].numel == 2 * 8 * batch * seq]
    assert len(kv) == 4  # a key and a value in each of two layers
    assert {chosen.name for chosen in attention(found)} <= {"q", "g"}


def test_place_leaves_the_program_unchanged_and_gives_the_same_twice():
    program, sharding = gpt()
    before = str(program.gm.graph), {n.name: dict(n.meta) for n in program.gm.graph.nodes}
    model = PlacementModel(program, sharding)
    first = place(program, sharding, LONG, 4, CPU, model)
    place(program, sharding, {"batch": 3, "seq": 37}, 2, GPU, model)
    assert place(program, sharding, LONG, 4, CPU, model) == first
    assert place(program, analyse(program), LONG, 4, CPU).key() == first.key()
    after = str(program.gm.graph), {n.name: dict(n.meta) for n in program.gm.graph.nodes}
    assert after == before


@pytest.mark.parametrize("folded", [False, True])
def test_tables_are_one_array_when_layers_are_equal(monkeypatch, folded):
    """The elimination works out once what follows from one array: layers cost next to nothing."""

    def arrays(layers: int) -> int:
        tables: list[object] = []
        real = CostNetwork.add_edge

        def kept(self, u, v, table):
            tables.append(table)
            real(self, u, v, table)

        program, sharding = deep_gpt(layers)
        if folded:
            small = fold(program, 3)
            assert small is not None, "equal layers are not found"
            copies, program = small.copies({}), small.program
            sharding = analyse(program)
        with monkeypatch.context() as patch:
            patch.setattr(CostNetwork, "add_edge", kept)
            place(program, sharding, LONG, 4, GPU, fold=copies if folded else None)
        assert len(tables) > 100, "there are edges"
        return len({id(t) for t in tables})

    assert arrays(5) == arrays(4)


def test_eight_ranks_take_less_than_a_quarter_of_the_time():
    program, sharding = gpt()
    model = PlacementModel(program, sharding)
    whole = place(program, sharding, LONG, 1, CPU, model).cost_s
    assert place(program, sharding, LONG, 8, CPU, model).cost_s < whole / 4


def test_small_tables_find_the_same_optimum(monkeypatch):
    """A variable of a table that is too large is held at each of its labels in turn."""
    program, sharding = gpt()
    model = PlacementModel(program, sharding)
    whole = place(program, sharding, LONG, 4, CPU, model)
    solved: list[int] = []

    def small(**options: object) -> CostNetwork:
        solved.append(len(solved))
        return CostNetwork(**options, largest_table_entries=5000)

    monkeypatch.setattr(placement, "CostNetwork", small)
    held = place(program, sharding, LONG, 4, CPU, model)
    assert len(solved) > 2
    assert held.cost_s == pytest.approx(whole.cost_s, rel=1e-12)
