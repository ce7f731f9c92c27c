"""Wide values, some rows at a time: which regions, their numbers and bytes, when they are taken."""

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dcpc
from dcpc.api import plan
from dcpc.ops.tiled import tiling_of
from dcpc.passes.unpad.wide_rows import tile_regions
from dcpc.plan.tiling import LOGITS, MLP, in_tiles
from dcpc.symbolic_profile import find
from examples.allocator import measured_peak_bytes
from models.gpt import GPT, GPTConfig

CLASSES, WIDTH = 640, 32
INPUTS = {"ids": "int64[batch, seq]", "labels": "int64[batch, seq]"}


class Head(nn.Module):
    """A layer and a loss over many classes, as users write them.

    Args:
        kind: what is special about the loss.
    """

    def __init__(self, kind: str = "", dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.embed, self.norm = nn.Embedding(CLASSES, WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias=kind != "tied")
        if kind == "tied":
            self.head.weight = self.embed.weight
        if kind == "frozen":
            self.head.weight.requires_grad_(False)
        self.to(dtype)

    def forward(self, ids, labels):
        x = self.embed(ids)
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        logits = self.head(x)
        if self.kind == "z-loss":
            z = torch.logsumexp(logits, -1)
            own = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
            return own.mean() + 1e-3 * (z * z).mean()
        if self.kind == "sum":
            return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        smoothing = 0.1 if self.kind == "smooth" else 0.0
        weight = torch.linspace(0.5, 1.5, CLASSES).to(x) if self.kind == "weight" else None
        if self.kind == "softcap":
            logits = 30 * torch.tanh(logits / 30)
        return F.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), weight=weight, label_smoothing=smoothing
        )


def batch(samples, length, seed=0):
    draw = torch.Generator().manual_seed(seed)
    ids, labels = torch.randint(0, CLASSES, (2, samples, length), generator=draw)
    labels[:, -3:] = -100
    return {"ids": ids, "labels": labels}


def buckets(*lengths):
    return dcpc.Buckets(INPUTS, [{"seq": n} for n in lengths])


def traced(model, length=64):
    found = plan(model, buckets(length), memory=1e9, device="cpu", backend="eager", tile="none")
    return found.runnable.traced


def ops_of(program):
    return [n.target for n in program.gm.graph.nodes if tiling_of(n.target) is not None]


SLOW = ("frozen", "sum", "smooth", "weight", "softcap")  # much like the others
KINDS = ("", "tied", "z-loss", *(pytest.param(kind, marks=pytest.mark.slow) for kind in SLOW))


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_the_plain_models(kind):
    model, plain = Head(kind), Head(kind)
    compiled = dcpc.compile(model, buckets(24, 64), memory=1e9, backend="eager", tile=7)
    program = next(iter(compiled.planned.by_bucket.values())).traced.program
    assert ops_of(program)
    for samples, length in ((1, 64), (3, 24), (1, 9), (2, 50)):
        given = batch(samples, length, seed=length)
        losses = [compiled(**given), plain(**given)]
        for loss, of in zip(losses, (model, plain), strict=True):
            of.zero_grad()
            loss.backward()
        assert torch.allclose(*losses, rtol=1e-12)
        for (name, mine), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            if other.grad is not None:
                scale = other.grad.abs().max()
                assert (mine.grad - other.grad).abs().max() <= 1e-12 * scale, name


def test_layers_run_in_tiles_too():
    for_layers = in_tiles(traced(Head()), 16, MLP)
    assert len(ops_of(in_tiles(traced(Head()), 16, LOGITS).program)) == 1
    assert len(ops_of(for_layers.program)) == 2


def test_returned_logits_are_in_no_region():
    class Returned(Head):
        def forward(self, ids, labels):
            logits = self.head(self.embed(ids))
            peaks = logits.amax(1)  # over positions: of several rows
            return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + peaks.mean()

    found = traced(Returned())
    assert tile_regions(found.program, found.sharding, LOGITS) == ()
    assert in_tiles(found, 16) is None


def test_half_precision_is_summed_in_float32():
    """One row a tile: a sum in bfloat16 would lose most of what single rows add."""
    model = Head(dtype=torch.bfloat16)
    exact, whole = copy.deepcopy(model).double(), copy.deepcopy(model)
    compiled = dcpc.compile(model, buckets(256), memory=1e9, backend="eager", tile=1, verify="off")
    given = batch(2, 256)
    for run, of in ((compiled, model), (exact, exact), (whole, whole)):
        run(**given).backward()
        assert of.head.weight.grad is not None
    want = exact.head.weight.grad
    errors = [(m.head.weight.grad.double() - want).norm() / want.norm() for m in (model, whole)]
    assert errors[0] <= 1.5 * errors[1] + 1e-3


@pytest.mark.parametrize("most", [64, 100, 1000])
def test_peak_is_predicted(most):
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=4000, dim=64, n_layers=1, n_heads=2))
    inputs = {"input_ids": "int64[batch, seq]", "labels": "int64[batch, seq]"}
    shapes = dcpc.Buckets(inputs, [{"seq": 512, "batch": 1}])
    compiled = dcpc.compile(
        model, shapes, memory=1e9, backend="eager", tile=most, verify="off", recompute="none"
    )
    ids = torch.randint(0, 4000, (1, 512))

    def run():
        model.zero_grad()
        compiled(input_ids=ids, labels=ids).backward()

    run()
    (settled,) = compiled.planned.plans.values()
    assert measured_peak_bytes(run) == pytest.approx(settled.peak_bytes, rel=0.002)


def test_short_memory_takes_tiles_for_the_long_bucket_alone():
    model, shapes = Head(), buckets(16, 4096)
    ample = plan(model, shapes, memory=1e9, device="cpu", backend="eager")
    assert not any("rows at a time" in p.reason for p in ample.plans.values())
    peak = next(p for b, p in ample.plans.items() if b.sizes["seq"] == 4096).peak_bytes
    memory = ample.request.resident_bytes + 0.5 * peak
    short = plan(model, shapes, memory=memory, device="cpu", backend="eager")
    reasons = {b.sizes["seq"]: p.reason for b, p in short.plans.items()}
    assert "rows at a time" in reasons[4096]
    assert "rows at a time" not in reasons[16]
    assert len(short.traces) == 2
    with pytest.raises(dcpc.PlanError, match="too little"):
        plan(model, shapes, memory=memory, device="cpu", backend="eager", tile="none")


def test_same_region_is_one_op():
    """Layers, buckets and models with equal regions share it, so nothing is compiled twice."""
    first, second = (in_tiles(traced(Head()), 16) for _ in range(2))
    assert ops_of(first.program) == ops_of(second.program)
    assert ops_of(in_tiles(traced(Head()), 17).program) != ops_of(first.program)
    on_gpu = replace(traced(Head()), device=find("h100"))
    assert ops_of(in_tiles(on_gpu, 16).program) != ops_of(first.program)  # other bytes


def test_whole_program_is_what_was_captured():
    of = traced(Head())
    made = in_tiles(of, 16)
    assert made.whole is of.program
    assert replace(made, whole=None).program.graph_hash != of.program.graph_hash


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["", "smooth", "z-loss"])
def test_gradients_of_inductors_tiles_are_the_plain_models(kind):
    model, plain = Head(kind), Head(kind)
    compiled = dcpc.compile(model, buckets(64), memory=1e9, backend="inductor", tile=20)
    for samples, length in ((1, 64), (2, 50)):
        given = batch(samples, length, seed=length)
        for run, of in ((compiled, model), (plain, plain)):
            of.zero_grad()
            run(**given).backward()
        for (name, mine), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert (mine.grad - other.grad).abs().max() <= 1e-11 * other.grad.abs().max(), name
