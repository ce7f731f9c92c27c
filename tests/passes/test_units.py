"""Which parameters are gathered at once, and in which order ranks gather and sum."""

import itertools
import warnings
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn

import dcpc
from dcpc.codegen.joint.schedule import Scheduler
from dcpc.errors import CodegenError
from dcpc.ir import GatherUnits, Partition
from dcpc.plan.runnable import Runnable
from dcpc.symbolic_profile.profile import Ledger
from models.gpt import GPT, GPTConfig

TEXT = dict.fromkeys(("input_ids", "labels"), "int64[batch, seq]")
SIZES = {"seq": 16, "batch": 1}
gather = torch.ops.dcpc.gather_rows.default
add_up = torch.ops.dcpc.sum_rows.default


def planned(model: nn.Module, parameters: str = "rounds", world: int = 4) -> Runnable:
    buckets = dcpc.Buckets(TEXT, sizes=[{"seq": 16}])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = dcpc.api.plan(model, buckets, world=world, backend="eager", parameters=parameters,
                              device="cpu", sp=1)  # fmt: skip
    (runnable,) = found.traces
    return runnable


def gpt(layers: int, tied: bool = False) -> GPT:
    return GPT(GPTConfig(vocab_size=51, dim=16, n_layers=layers, n_heads=2, hidden=24,
                         tie_embeddings=tied))  # fmt: skip


@cache
def gpt_of(layers: int, tied: bool = False) -> Runnable:
    """Returns a planned GPT, which several tests read."""
    return planned(gpt(layers, tied))


def names(runnable: Runnable) -> tuple[GatherUnits, list[list[str]]]:
    units, program = runnable.traced.units, runnable.traced.program
    assert units is not None
    return units, [[program.parameters[n] for n in unit] for unit in units.units]


@pytest.mark.parametrize("layers", [3, 7])  # as blocks of the names, and as a repeated run
def test_units_are_blocks_and_what_is_between_them(layers):
    units, found = names(gpt_of(layers))
    assert found[0] == ["embedding.weight"]
    for k in range(layers):
        assert {n.rpartition(f"blocks.{k}.")[0] for n in found[1 + k]} == {""}
        assert len(found[1 + k]) == 9
    assert found[-1] == ["norm.weight", "head.weight"]
    # An embedding has nothing to be gathered for in backward, and the last unit is there.
    assert units.again == set(range(1, layers + 1))


def test_a_parameter_of_two_names_is_in_one_unit_and_stays():
    units, found = names(gpt_of(3, tied=True))
    # torch.export has one placeholder for both names.
    assert found[0] in (["embedding.weight"], ["head.weight"])
    assert sum(map(len, found)) == len(dict(gpt(3, tied=True).named_parameters()))
    assert 0 not in units.again


class Nested(nn.Module):
    """A stage of blocks with nearly all parameters, numbered modules within blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(51, 4)
        self.stages = nn.ModuleList(
            [
                nn.ModuleList(
                    nn.Sequential(nn.Linear(4, 9), nn.GELU(), nn.Linear(9, 4)) for _ in range(4)
                )
            ]
        )
        self.unused = nn.Linear(4, 4)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for block in self.stages[0]:
            x = x + block(x)
        return (x.sum(-1) * labels).sum()


def test_a_large_numbered_module_is_divided_and_unused_parameters_are_in_no_unit():
    _, found = names(planned(Nested()))
    assert [len(unit) for unit in found] == [1, 4, 4, 4, 4]


def test_within_keeps_the_order_and_what_is_gathered_again():
    units = GatherUnits((("a", "b"), ("c",), ("d",)), frozenset({1, 2}), 4)
    assert units.within({"b", "d"}) == GatherUnits((("b",), ("d",)), frozenset({1}), 4)
    assert units.events({0, 2}, {0, 1}) == (
        ("gather", 1), ("sum", 2), ("gather", 0), ("sum", 0))  # fmt: skip


def turns(parts: Partition) -> tuple[list[tuple[str, int]], ...]:
    """Gathers and sums of forward and backward: what, and of how many parameters."""
    found = []
    for graph in (parts.forward.graph, parts.backward.graph):
        calls = [n for n in graph.nodes if n.target in (gather, add_up)]
        for before, call in itertools.pairwise(calls):
            assert call.kwargs["token"].args[0] is before  # no backend can change the order
        found.append([(str(n.target), len(n.args[0])) for n in calls])
    return tuple(found)


def test_nodes_of_both_graphs_are_called_as_in_the_schedule():
    runnable = gpt_of(3)
    placement = runnable.priced.placement(SIZES, 2)
    study = runnable.priced.at(placement)
    for step in (0, study.steps):
        parts = runnable.partition(placement, step)
        lowering = runnable.traced.lowering(placement)
        schedule = lowering.schedule(runnable.priced.made_again(placement, step))
        outputs = parts.forward.graph.output_node().args[0]
        assert tuple(n.name for n in outputs[parts.returned :]) == parts.saved
        for graph, calls in (
            (parts.forward.graph, schedule.forward),
            (parts.backward.graph, schedule.backward),
        ):
            targets = {n.name: n.target for n in graph.nodes}
            assert all(targets.get(n.name) is n.target for n in calls)
            tokens = [n for n in graph.nodes if n.name.endswith("_token")]
            assert len(tokens) == sum(n.target in (gather, add_up) for n in calls)


@pytest.mark.parametrize("tied", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_all_graphs_of_a_program_gather_and_sum_in_one_order(tied):
    runnable = gpt_of(3, tied)
    assert runnable.traced.units is not None
    seen: dict[frozenset[int], set[str]] = {}
    some = frozenset({2})
    for sp in (1, 4):
        placement = runnable.priced.placement(SIZES, sp)
        study = runnable.priced.at(placement)
        for step in sorted({0, *study.turns, study.steps}):
            again = runnable.priced.gathered_again(placement, step)
            seen.setdefault(again, set()).add(str(turns(runnable.partition(placement, step))))
            # Forced, as where another micro-batch of the round gathers again.
            for forced in (some, runnable.traced.units.again) if step in (0, study.steps) else ():
                parts = runnable.partition(placement, step, gathers_again=forced)
                seen.setdefault(forced, set()).add(str(turns(parts)))
    # None, the first, the first two, all, and the second alone.
    assert len(seen) == 5
    assert {len(orders) for orders in seen.values()} == {1}
    assert len(set().union(*seen.values())) == 5


def test_graphs_that_take_parameters_whole_are_those_of_other_modes():
    ours, other = planned(gpt(1)), planned(gpt(1), "whole")
    for sp in (1, 2):
        a, b = (r.priced.placement(SIZES, sp) for r in (ours, other))
        mine = ours.partition(a, 0, gathers=False)
        theirs = other.partition(b, 0)
        for one, another in ((mine.forward, theirs.forward), (mine.backward, theirs.backward)):
            assert str(one.graph) == str(another.graph)


@pytest.mark.parametrize("some", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_bytes_of_three_blocks_stand_for_those_of_all(some):
    layers = 6
    runnable = planned(gpt(layers))
    assert runnable.priced.lift.folds
    for sp in (2,) if some else (1, 2):
        placement = runnable.priced.placement(SIZES, sp)
        study = runnable.priced.at(placement)
        # One unit after the other, the first two of a run of blocks together.
        assert len(study.turns) == layers - 1
        for number, step in enumerate((*study.turns, study.turns[-1] + 1)):
            again = runnable.priced.gathered_again(placement, step)
            assert again == set(range(1, 2 + number)) - (set() if number else {1})
            if some and number not in (0, 2, len(study.turns)):
                continue
            parts = runnable.partition(placement, step)
            stays = runnable.traced.staying(runnable.traced.lowering(placement))
            ledger = Ledger(parts.names, sp, stays=stays)
            whole = ledger.profile(ledger.costs(parts))
            sizes = study.local_sizes(SIZES)
            at = {s: sizes[s.name] for s in whole.symbols}
            peak = max(int(term.subs(at)) for term in whole.peak_terms)
            assert abs(study.predict(step, SIZES).peak_bytes - peak) <= 2  # a token
            folded = study.profile(step)
            for name in ("wire_bytes", "saved_bytes"):
                assert int(getattr(folded, name).subs(at)) == int(getattr(whole, name).subs(at))


class Branching(nn.Module):
    """Reads its layers in another order where a sequence has one token."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(51, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(8))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for layer in self.layers if input_ids.shape[1] > 1 else reversed(self.layers):
            x = x + layer(x).sin()
        return (x.sum(-1) * labels).sum()


def test_traces_gather_the_same_units_in_one_order():
    buckets = dcpc.Buckets(TEXT, sizes=[{"seq": 1}, {"seq": 16}])
    for model in (Branching(), gpt(1)):  # with one key attention reads no queries
        found = dcpc.api.plan(model, buckets, world=2, backend="eager", parameters="rounds")
        one, other = found.traces
        assert names(one)[1] == names(other)[1]
        assert names(one)[0].again == names(other)[0].again
        orders = set()
        for runnable, bucket in ((one, {"seq": 1}), (other, {"seq": 16})):
            placement = runnable.priced.placement({**bucket, "batch": 1}, 1)
            again = names(one)[0].again
            forward, backward = turns(runnable.partition(placement, 0, gathers_again=again))
            orders.add(str((forward, backward)))
        assert len(orders) == 1


class Shared(nn.Module):
    """Layers of which two have one weight: it and the first one's bias are wanted at one call."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(51, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.layers[3].weight = self.layers[1].weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = x + layer(x).sin()
        return (x.sum(-1) * labels).sum()


def test_units_wanted_at_one_call_are_gathered_in_their_order():
    runnable = planned(Shared())
    units, found = names(runnable)
    assert ["layers.1.bias"] in found  # a unit apart from the weight, which is the third layer's
    for sp in (1, 2):
        parts = runnable.partition(runnable.priced.placement(SIZES, sp), 0)
        calls = [n for n in parts.forward.graph.nodes if n.target is gather]
        assert [tuple(p.name for p in n.args[0]) for n in calls] == list(units.units)


def test_a_graph_in_another_order_is_refused():
    runnable = gpt_of(3)
    lowering = runnable.traced.lowering(runnable.priced.placement(SIZES, 1))
    first, second, *others = lowering.joint.gathers
    swapped = (replace(first, number=1), replace(second, number=0), *others)
    scheduler = Scheduler(runnable.traced.program, replace(lowering.joint, gathers=swapped))
    with pytest.raises(CodegenError, match="the order of all ranks"):
        scheduler.schedule(frozenset())


def test_no_other_mode_has_units():
    assert planned(gpt(1), "pull").traced.units is None
    assert planned(gpt(1), world=1).traced.units is None
