"""What placement finds on real models, and that it is the minimum: by brute force and by MILP."""

import warnings
from functools import cache
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.placement_oracle import Oracle
from benchmarks.random_programs import BATCH, SEQ, WIDTH, ProgramBuilder, random_program
from dcpc.buckets import Buckets
from dcpc.folding import fold
from dcpc.ir import NodePlacement, Placement, Program, tensor_operands
from dcpc.passes.elimination import CostNetwork
from dcpc.passes.placement import PlacementModel, Rates, place
from dcpc.passes.sharding import Sharding, analyse
from dcpc.trace import trace
from models.gpt import GPT, GPTConfig

CPU = Rates(5e10, 1e10, 1e9, 5e-5, 5e-6)
GPU = Rates(4e14, 3e12, 2e11, 1e-5, 5e-6)
TIGHT = Rates(4e14, 3e12, 2e11, 1e-9, 5e-6, held_s_per_byte=5e-12)  # memory is what counts
LONG = {"batch": 1, "seq": 8192}
BUCKETS = {
    "inputs": {"input_ids": "int64[batch, seq]", "labels": "int64[batch, seq]"},
    "sizes": [{"seq": 16}, {"seq": 8192}],
}
aten = torch.ops.aten


@cache
def gpt(kv_heads: int = 8) -> tuple[Program, Sharding]:
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=64, dim=64, n_layers=2, n_heads=8, n_kv_heads=kv_heads))
    program = trace(model, Buckets(**BUCKETS))
    return program, analyse(program)


@cache
def deep_gpt(layers: int) -> tuple[Program, Sharding]:
    model = GPT(GPTConfig(vocab_size=64, dim=32, n_layers=layers, n_heads=2))
    program = trace(model, Buckets(**BUCKETS))
    return program, analyse(program)


@cache
def llama() -> tuple[Program, Sharding]:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=8192,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = trace(transformers.LlamaForCausalLM(config), Buckets(**BUCKETS))
        return program, analyse(program)


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


def test_all_is_replicated_when_nothing_can_be_split():
    b = ProgramBuilder()
    x = b.linear(b.input((BATCH, SEQ, WIDTH)), 1)
    program = b.program(b.call(aten.median.default, (x,), ()))
    for sizes, sp in (({"batch": 1, "seq": 1}, 4), (LONG, 1)):
        found = place(program, analyse(program), sizes, sp, CPU)
        assert not any(p.output.sharded or p.output.partial for p in found.nodes.values())


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


def tiny_program() -> Program:
    """A value with two consumers, one of which needs a dim whole that is good to split before."""
    b = ProgramBuilder()
    shape = (BATCH, SEQ, WIDTH)
    y = b.linear(b.input(shape), WIDTH)
    over_seq = b.call(aten.softmax.int, (y, 1), shape)
    return b.program(b.call(aten.mul.Tensor, (over_seq, b.linear(y, WIDTH)), shape))


@pytest.mark.parametrize("link", [1e6, 1e9, 1e12])
@pytest.mark.parametrize(("batch", "seq", "sp"), [(1, 64, 4), (1, 7, 2), (2, 5, 3)])
def test_cost_equals_brute_force_over_all_alternatives(link, batch, seq, sp):
    program = tiny_program()
    sharding = analyse(program)
    sizes, rates = {"batch": batch, "seq": seq}, Rates(1e9, 1e9, link, 1e-7, 1e-8)
    found = place(program, sharding, sizes, sp, rates)
    oracle = Oracle(program, sharding, sizes, sp, rates)
    usable = {
        n: [a for a in alternatives if oracle.usable(n, a)]
        for n, alternatives in sharding.alternatives.items()
    }
    best = min(
        oracle.cost(dict(zip(usable, some, strict=True))) for some in product(*usable.values())
    )
    assert found.cost_s == pytest.approx(best, rel=1e-12)
    assert oracle.cost(found.nodes) == pytest.approx(best, rel=1e-12)


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 10**6), st.sampled_from([1, 2, 3, 8]), st.sampled_from([2, 7, 64, 999]),
    st.integers(2, 4), st.sampled_from([1e6, 1e8, 1e10]),
)  # fmt: skip
def test_cost_equals_milp_on_random_programs(seed, batch, seq, sp, link):
    program = random_program(seed, calls=6)
    sharding = analyse(program)
    sizes, rates = {"batch": batch, "seq": seq}, Rates(1e9, 1e9, link, 1e-7, 1e-8)
    found = place(program, sharding, sizes, sp, rates)
    oracle = Oracle(program, sharding, sizes, sp, rates)
    assert found.cost_s == pytest.approx(oracle.minimum(), rel=1e-9)
    assert oracle.cost(found.nodes) == pytest.approx(found.cost_s, rel=1e-12)


@pytest.mark.parametrize("model", [gpt, llama])
@pytest.mark.parametrize("rates", [CPU, GPU, TIGHT], ids=["cpu", "gpu", "tight"])
@pytest.mark.parametrize("sizes", [LONG, {"batch": 3, "seq": 37}], ids=["long", "odd"])
def test_cost_equals_milp_on_a_model(model, rates, sizes):
    program, sharding = model()
    found = place(program, sharding, sizes, 4, rates)
    oracle = Oracle(program, sharding, sizes, 4, rates)
    assert found.cost_s == pytest.approx(oracle.minimum(), rel=1e-9)
    assert oracle.cost(found.nodes) == pytest.approx(found.cost_s, rel=1e-12)


def test_fullest_rank_is_counted_when_a_cut_piece_is_longer():
    b = ProgramBuilder()
    x = b.linear(b.input((BATCH, SEQ + 1, WIDTH)), WIDTH)
    cut = b.call(aten.slice.Tensor, (x, 1, 0, -1), (BATCH, SEQ, WIDTH))
    program = b.program(b.call(aten.relu.default, (cut,), (BATCH, SEQ, WIDTH)))
    sharding = analyse(program)
    # 9 rows over 4 ranks: 3, 2, 2, 2; the cut one: 3, 2, 2, 1, not 2, 2, 2, 2
    sizes = {"batch": 1, "seq": 8}
    found = place(program, sharding, sizes, 4, Rates(1e6, 1e9, 1e12, 1e-12, 1e-12))
    oracle = Oracle(program, sharding, sizes, 4, Rates(1e6, 1e9, 1e12, 1e-12, 1e-12))
    assert max(oracle.share(f) for f in sharding.factors[cut.name][1]) == 3 / 8
    assert oracle.cost(found.nodes) == pytest.approx(found.cost_s, rel=1e-12)
