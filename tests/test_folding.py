"""A deep model planned as three copies of its block costs what all of them cost, to the byte."""

import dataclasses
from collections.abc import Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dcpc
from dcpc.acceptance import Split
from dcpc.api import plan
from dcpc.folding import fold
from dcpc.ir import Placement
from dcpc.symbolic_profile import Costs, Ledger, Meter, evaluator
from dcpc.variants import Variants
from models.gpt import GPT, GPTConfig
from models.stdit import RectifiedFlow, STDiT, STDiTConfig

TOKENS = dict.fromkeys(("input_ids", "labels"), "int64[batch, seq]")
SIZES = {"seq": 1024, "batch": 2}
CLIPS = {
    "latents": "float32[batch, 4, frames, tokens*2, 2]",
    "noise": "float32[batch, 4, frames, tokens*2, 2]",
    "timestep": "float32[batch]",
    "text": "float32[batch, 12, 32]",
    "text_mask": "bool[batch, 12]",
    "fps": "float32[batch]",
    "pixel_height": "float32[batch]",
    "pixel_width": "float32[batch]",
}


BUCKETS = dcpc.Buckets(inputs=TOKENS, sizes=[{"seq": 64}, {"seq": 1024}])


def variants_of(model: nn.Module, backend: str = "eager") -> Variants:
    return plan(model, BUCKETS, device="h200", memory=1e12, sp=1, backend=backend).variants


def gpt(layers: int) -> nn.Module:
    with torch.device("meta"):
        return GPT(GPTConfig(vocab_size=64, dim=32, n_layers=layers, n_heads=4))


def whole(variants: Variants) -> Variants:
    """The same variants, planned block by block."""
    given = (variants.device, variants.backend, variants.tensors, variants.reference)
    return Variants(variants.program, variants.sharding, *given, fewest=1 << 20)


def numbers(prediction) -> tuple:
    found = dataclasses.asdict(prediction)
    return float(f"{found.pop('seconds_s'):.12g}"), *found.values()


@pytest.fixture(scope="module")
def deep() -> Variants:
    return variants_of(gpt(8))


@pytest.mark.parametrize("sp", [1, 2, 3])
def test_it_costs_what_all_blocks_cost(deep, sp):
    assert deep.planner is not deep
    ours, theirs = deep.placement(SIZES, sp), whole(deep).placement(SIZES, sp)
    assert ours.nodes == theirs.nodes
    check(deep, ours)


class Blocks:
    """The graph of all blocks of a folded model, at some sizes."""

    def __init__(self, mine: Variants, placement: Placement, at: Mapping[str, int]) -> None:
        self.mine, self.placement = mine, placement
        self.lowering = mine.lowering(placement)
        names, fuses = self.lowering.joint.names, mine.backend == "inductor"
        self.ledger = Ledger(names, placement.sp, fuses=fuses, gpu=mine.device.gpu)
        self.meter = Meter(self.ledger, [*self.lowering.joint.gm.graph.nodes])
        dims = {mine.program.symbols[n]: s for n, s in at.items()}
        integers = self.lowering.lowered.integers
        self.local = {i.name: i.value(dims, placement.sp, 0) for i in integers}

    def costs(self, k: int) -> Costs:
        again = self.mine.made_again(self.placement, k)
        return self.ledger.costs(self.lowering.schedule(again))


def check(mine: Variants, placement: Placement, at: Mapping[str, int] = SIZES) -> None:
    """What is predicted of a folded model is what the graph of all its blocks costs."""
    blocks = Blocks(mine, placement, at)
    ledger, meter, local = blocks.ledger, blocks.meter, blocks.local
    every = mine.steps(placement)
    for k in {0, 1, every // 2, every}:
        costs = blocks.costs(k)
        expected = meter.read(costs, local, mine.device)
        assert numbers(mine.predict(placement, k, at)) == numbers(expected)
        a, b = mine.profile(placement, k), ledger.profile(costs)
        sizes = mine.local_sizes(placement, at)
        in_bytes = meter.read(costs, local, dataclasses.replace(mine.device, gpu=False))
        assert evaluator(a).peak_bytes(sizes) == in_bytes.peak_bytes
        assert a.gradient_bytes == b.gradient_bytes
        assert a.parameter_bytes == b.parameter_bytes
        assert a.saved_bytes == b.saved_bytes
        assert a.flops == b.flops


@pytest.mark.parametrize("sp", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_it_costs_what_all_kernels_cost(sp):
    """A fused kernel may read what several blocks made: it is not the copies' own."""
    deep = variants_of(gpt(8), "inductor")
    assert deep.planner is not deep
    check_kernels(deep, deep.placement(SIZES, sp))


def check_kernels(
    mine: Variants, placement: Placement, at: Mapping[str, int] = SIZES, rel: float = 5e-4
) -> None:
    """The same of a model that Inductor runs, to what a copy's borders add or hide."""
    blocks, every = Blocks(mine, placement, at), mine.steps(placement)
    for k in (0, every // 2, every):
        expected = blocks.meter.read(blocks.costs(k), blocks.local, mine.device)
        found = mine.predict(placement, k, at)
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
    variants = variants_of(model, backend)
    assert variants.planner is not variants
    placement = variants.placement(SIZES, 1)
    if backend == "eager":
        check(variants, placement)
    else:
        check_kernels(variants, placement, rel=1e-3)


@pytest.mark.parametrize("attention", ["heads", pytest.param("ring", marks=pytest.mark.slow)])
def test_it_costs_what_runs_where_ties_split_the_first_block_otherwise(attention):
    """Then no two blocks of a rank's graph need be the same calls: the copies are the blocks."""
    split = Split(gpt(7), BUCKETS, SIZES, sp=2, attention=attention)
    assert split.variants.planner is not split.variants
    check(split.variants, split.placement)


def test_three_copies_stand_for_any_number(deep):
    """The costs of a shallow trace say those of a deep model."""
    shallow = variants_of(gpt(3))
    folded = fold(shallow.program, fewest=3)
    folded = dataclasses.replace(folded, others=(5,))
    given = (shallow.device, shallow.backend, shallow.tensors, shallow.reference)
    stands = Variants(shallow.program, shallow.sharding, *given, folded)
    a, b = stands.placement(SIZES, 2), deep.placement(SIZES, 2)
    for k in (0, deep.steps(b)):
        assert numbers(stands.predict(a, k, SIZES)) == numbers(deep.predict(b, k, SIZES))


def test_what_is_not_repeated_enough_is_not_folded():
    assert fold(variants_of(gpt(3)).program) is None


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_video_blocks(backend):
    config = STDiTConfig(depth=7, dim=64, heads=4, text_dim=32, text_len=12)
    with torch.device("meta"):
        model = RectifiedFlow(STDiT(config))
    sizes = [{"frames": f, "tokens": t} for f in (2, 16) for t in (16, 256)]
    given = {"device": "h200", "memory": 1e12, "sp": 1, "backend": backend}
    variants = plan(model, dcpc.Buckets(CLIPS, sizes), **given).variants
    assert variants.planner is not variants
    at = {"frames": 16, "tokens": 256, "batch": 1}
    for sp in (1, 4):
        placement = variants.placement(at, sp)
        (check if backend == "eager" else check_kernels)(variants, placement, at)
    # A first pair that was wired otherwise than the copies once was made again together with one.
    every, placement = whole(variants), variants.placement(at, 1)
    peaks = [v.predict(placement, v.steps(placement), at).peak_bytes for v in (variants, every)]
    assert peaks[0] <= 1.05 * peaks[1]


@pytest.mark.parametrize("sp", [1, 2])
def test_what_the_first_plan_makes_again_is_known_without_the_others(deep, sp):
    planner = deep.planner
    keys = planner.made_again(planner.placement(SIZES, sp), 0)
    menu = planner.menu(planner.placement(SIZES, sp))
    lowering = planner.lowering(planner.placement(SIZES, sp))
    names = {lowering.keys[key] for key in keys if key in lowering.keys}
    assert names == menu.made_again(0) != set()
