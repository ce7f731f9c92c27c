"""A deep model planned as three copies of its block costs what all of them cost, to the byte."""

import dataclasses
from collections.abc import Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dcpc
from dcpc.api import plan
from dcpc.commands.check import SplitModel
from dcpc.ir import Placement
from dcpc.plan.folding import Lift, fold
from dcpc.plan.prices.priced import Priced
from dcpc.symbolic_profile import Costs, Ledger, Meter, evaluator
from models.gpt import GPT, GPTConfig
from models.stdit import RectifiedFlow, STDiT, STDiTConfig
from tests.cases.clips import CLIPS

TOKENS = dict.fromkeys(("input_ids", "labels"), "int64[batch, seq]")
SIZES = {"seq": 1024, "batch": 2}
BUCKETS = dcpc.Buckets(inputs=TOKENS, sizes=[{"seq": 64}, {"seq": 1024}])


def priced_of(model: nn.Module, backend: str = "eager") -> Priced:
    return plan(model, BUCKETS, device="h200", memory=1e12, sp=1, backend=backend).runnable.priced


def gpt(layers: int) -> nn.Module:
    with torch.device("meta"):
        return GPT(GPTConfig(vocab_size=64, dim=32, n_layers=layers, n_heads=4))


def whole(priced: Priced) -> Priced:
    """The same program, planned block by block."""
    return Priced(Lift(priced.traced))


def numbers(prediction) -> tuple:
    found = dataclasses.asdict(prediction).values()  # sums are added up in another order
    return tuple(float(f"{x:.12g}") if isinstance(x, float) else x for x in found)


@pytest.fixture(scope="module")
def deep() -> Priced:
    return priced_of(gpt(8))


@pytest.mark.parametrize("sp", [1, 2, 3])
def test_it_costs_what_all_blocks_cost(deep, sp):
    assert deep.lift.folds
    ours, theirs = deep.placement(SIZES, sp), whole(deep).placement(SIZES, sp)
    assert ours.nodes == theirs.nodes
    check(deep, ours)


class Blocks:
    """The graph of all blocks of a folded model, at some sizes."""

    def __init__(self, mine: Priced, placement: Placement, at: Mapping[str, int]) -> None:
        self.mine, self.placement = mine, placement
        self.lowering = mine.traced.lowering(placement)
        names, fuses = self.lowering.joint.names, mine.traced.backend == "inductor"
        self.ledger = Ledger(names, placement.sp, fuses=fuses, gpu=mine.traced.device.kernels_of)
        self.meter = Meter(self.ledger, [*self.lowering.joint.gm.graph.nodes])
        dims = mine.traced.program.dims(at)
        integers = self.lowering.lowered.integers
        self.local = {i.name: i.value(dims, placement.sp, 0) for i in integers}

    def costs(self, k: int) -> Costs:
        again = self.mine.made_again(self.placement, k)
        return self.ledger.costs(self.lowering.schedule(again))


def check(mine: Priced, placement: Placement, at: Mapping[str, int] = SIZES) -> None:
    """What is predicted of a folded model is what the graph of all its blocks costs."""
    blocks = Blocks(mine, placement, at)
    ledger, meter, local = blocks.ledger, blocks.meter, blocks.local
    study = mine.at(placement)
    every = study.steps
    for k in {0, 1, every // 2, every}:
        costs = blocks.costs(k)
        expected = meter.read(costs, local, mine.traced.device)
        assert numbers(study.predict(k, at)) == numbers(expected)
        a, b = study.profile(k), ledger.profile(costs)
        sizes = study.local_sizes(at)
        in_bytes = meter.read(costs, local, dataclasses.replace(mine.traced.device, gpu=False))
        assert evaluator(a).peak_bytes(sizes) == in_bytes.peak_bytes
        assert a.gradient_bytes == b.gradient_bytes
        assert a.parameter_bytes == b.parameter_bytes
        assert a.saved_bytes == b.saved_bytes
        assert a.flops == b.flops


@pytest.mark.parametrize("sp", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_it_costs_what_all_kernels_cost(sp):
    """A fused kernel may read what several blocks made: it is not the copies' own."""
    deep = priced_of(gpt(8), "inductor")
    assert deep.lift.folds
    check_kernels(deep, deep.placement(SIZES, sp))


def check_kernels(
    mine: Priced, placement: Placement, at: Mapping[str, int] = SIZES, rel: float = 5e-4
) -> None:
    """The same of a model that Inductor runs, to what a copy's borders add or hide."""
    blocks, study = Blocks(mine, placement, at), mine.at(placement)
    every = study.steps
    for k in (0, every // 2, every):
        expected = blocks.meter.read(blocks.costs(k), blocks.local, mine.traced.device)
        found = study.predict(k, at)
        assert found.peak_bytes == pytest.approx(expected.peak_bytes, rel=rel)
        assert found.saved_bytes == expected.saved_bytes
        assert found.seconds_s == pytest.approx(expected.seconds_s, rel=1e-9)


class Shares(nn.Module):
    """Blocks that read values from outside whose gradients they add up, and end in a view."""

    def __init__(self, layers: int, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.embedding, self.table = nn.Embedding(64, 32), nn.Embedding(1024, 1024)
        self.up = nn.ModuleList(nn.Linear(32, 128) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(128, 32) for _ in range(layers))
        self.head = nn.Linear(32, 64)

    def forward(self, input_ids, labels):
        x = every = self.embedding(input_ids)
        positions = torch.arange(x.shape[1], device=x.device)
        table = self.table(positions)[:, : x.shape[1]]
        for up, down in zip(self.up, self.down, strict=True):
            x = (x @ x.transpose(1, 2) + table).softmax(-1) @ x * every
            x = down(F.dropout(F.gelu(up(x)), self.dropout))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize(("backend", "dropout"), [("eager", 0.1), ("inductor", 0.0)])
def test_values_that_all_copies_read(backend, dropout):
    """Their gradients are summed copy by copy, or by a kernel at the end. Draws are alike."""
    with torch.device("meta"):
        model = Shares(6, dropout)
    priced = priced_of(model, backend)
    assert priced.lift.folds
    placement = priced.placement(SIZES, 1)
    if backend == "eager":
        check(priced, placement)
    else:
        check_kernels(priced, placement, rel=1e-3)


@pytest.mark.parametrize("attention", ["heads", pytest.param("ring", marks=pytest.mark.slow)])
def test_it_costs_what_runs_where_ties_split_the_first_block_otherwise(attention):
    """Then no two blocks of a rank's graph need be the same calls: the copies are the blocks."""
    split = SplitModel(gpt(7), BUCKETS, SIZES, sp=2, attention=attention)
    assert split.priced.lift.folds
    check(split.priced, split.placement)


def test_three_copies_stand_for_any_number(deep):
    """The costs of a shallow trace say those of a deep model."""
    shallow = priced_of(gpt(3))
    folded = fold(shallow.traced.program, fewest=3)
    folded = dataclasses.replace(folded, others=(5,))
    stands = Priced(Lift(shallow.traced, folded=folded))
    a, b = (priced.at(priced.placement(SIZES, 2)) for priced in (stands, deep))
    for k in (0, b.steps):
        assert numbers(a.predict(k, SIZES)) == numbers(b.predict(k, SIZES))


def test_what_is_not_repeated_enough_is_not_folded():
    assert fold(priced_of(gpt(3)).traced.program) is None


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_video_blocks(backend):
    config = STDiTConfig(depth=7, dim=64, heads=4, text_dim=32, text_len=12)
    with torch.device("meta"):
        model = RectifiedFlow(STDiT(config))
    sizes = [{"frames": f, "tokens": t} for f in (2, 16) for t in (16, 256)]
    given = {"device": "h200", "memory": 1e12, "sp": 1, "backend": backend}
    priced = plan(model, dcpc.Buckets(CLIPS, sizes), **given).runnable.priced
    assert priced.lift.folds
    at = {"frames": 16, "tokens": 256, "batch": 1}
    for sp in (1, 4):
        placement = priced.placement(at, sp)
        (check if backend == "eager" else check_kernels)(priced, placement, at)
    # A first pair that was wired otherwise than the copies once was made again together with one.
    every, placement = whole(priced), priced.placement(at, 1)
    studies = [p.at(placement) for p in (priced, every)]
    peaks = [s.predict(s.steps, at).peak_bytes for s in studies]
    assert peaks[0] <= 1.05 * peaks[1]


@pytest.mark.parametrize("sp", [1, 2])
def test_down_is_back_from_up(deep, sp):
    lift = deep.lift
    small = deep.placements.at(SIZES, sp)
    assert lift.small.id_of(lift.down(lift.up(small))) == lift.small.id_of(small)
    assert lift.up(small).nodes.keys() > small.nodes.keys()


@pytest.mark.parametrize("sp", [1, 2])
def test_what_the_first_plan_makes_again_is_known_without_the_others(deep, sp):
    placement = deep.placement(SIZES, sp)
    keys, menu = deep.made_again(placement, 0), deep.at(placement).menu
    lowering = deep.lift.small.lowering(deep.lift.down(placement))
    names = {lowering.keys[key] for key in keys if key in lowering.keys}
    assert names == menu.made_again(0) != set()
