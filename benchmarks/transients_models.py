"""Peaks and plans of models whose transients are probed, for `benchmarks.transients`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from time import process_time

import torch
from diffusers import UNet2DModel
from torch import Tensor, nn

import dcpc
from benchmarks.harness import Cell
from benchmarks.memory_models import SUBJECTS, Subject
from benchmarks.plans import MEMORY, MODELS, found
from benchmarks.transients_probe import Probes, by_probes
from dcpc import api
from dcpc.buckets import Sizes
from dcpc.commands.check import SplitModel
from dcpc.symbolic_profile import evaluator
from examples.allocator import measured_peak_bytes

# How transients are known: the tables, probes but for attention, probes of all.
WAYS: Mapping[str, Callable[[], AbstractContextManager[Probes | None]]] = {
    "tables": nullcontext,
    "probes": partial(by_probes, listed=True),
    "all probes": partial(by_probes, listed=True, attention=True),
}


class UNet(nn.Module):
    """A U-Net of diffusers, with its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.unet = UNet2DModel(
            in_channels=4,
            out_channels=4,
            layers_per_block=1,
            block_out_channels=(32, 64),
            norm_num_groups=8,
            attention_head_dim=8,
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        )

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return (self.unet(x, t).sample - x).square().mean()


def _picture(sizes: Sizes) -> dict[str, Tensor]:
    x = torch.randn(sizes["batch"], 4, 2 * sizes["height"], 2 * sizes["width"])
    return {"x": x, "t": torch.ones(sizes["batch"], dtype=torch.int64)}


def _sizes(batch: int, height: int, width: int) -> Sizes:
    return {"batch": batch, "height": height, "width": width}


CHOSEN: Mapping[str, Subject] = {
    "GPT": SUBJECTS["GPT"],
    "U-Net": Subject(
        lambda _: UNet(),
        {"x": "float32[batch, 4, height*2, width*2]", "t": "int64[batch]"},
        _picture,
        (_sizes(1, 8, 10), _sizes(2, 14, 9), _sizes(4, 24, 32), _sizes(1, 48, 48)),
        _sizes(1, 8, 10),
    ),
}


def peaks(name: str) -> list[tuple[Cell, ...]]:
    """Returns, of each size, the measured peak in MB and how far each way is off, in percent."""
    torch.manual_seed(0)
    subject = CHOSEN[name]
    model, sizes = subject.make(1), subject.sizes
    buckets = dcpc.Buckets(subject.inputs, list(sizes))
    told: dict[str, list[int]] = {}
    for way, using in WAYS.items():
        with using():
            split = SplitModel(model, buckets, subject.placed_for, sp=1)
            at = evaluator(split.study.profile(0))
        told[way] = [at.peak_bytes(split.study.local_sizes(point)) for point in sizes]
    rows: list[tuple[Cell, ...]] = []
    for i, point in enumerate(sizes):
        real = _measured_bytes(split, subject, point)
        label = f"{name}, {' x '.join(map(str, point.values()))}"
        rows.append((label, real / 1e6, *(100 * (told[way][i] / real - 1) for way in WAYS)))
    return rows


def _measured_bytes(split: SplitModel, subject: Subject, point: Sizes) -> int:
    variant, integers = split.runnable.variant(split.placement, 0, point, 0)
    inputs = subject.example(point)
    named = {**split.held(), **{p: inputs[n] for p, n in split.program.inputs.items()}}
    tensors = [named[p] for p in variant.placeholders]
    split.model.zero_grad()
    return measured_peak_bytes(lambda: variant(tensors, integers).backward())


@dataclass(frozen=True, slots=True)
class PlanCost:
    """What planning one model for two ranks of this CPU takes.

    Attributes:
        name: the model's.
        calls: distinct calls that were probed, kernels run for them, and calls left to tables.
        probe_s: processor seconds of the probes.
        table_s: of the tables.
        plan_s: of planning by tables.
        same: whether both plans are the same.
    """

    name: str
    calls: tuple[int, int, int]
    probe_s: float
    table_s: float
    plan_s: float
    same: bool

    def row(self) -> tuple[Cell, ...]:
        """A line of the table."""
        same = "same" if self.same else "another"
        return self.name, *self.calls, self.probe_s, self.table_s, self.plan_s, same


def plan_cost(name: str) -> PlanCost:
    """Plans a model of `benchmarks.plans` by tables, and by probes but for attention."""
    warnings.simplefilter("ignore")
    with torch.device("meta"):
        model, buckets = MODELS[name]()
    plans = []
    for using in (nullcontext, partial(by_probes, listed=True)):
        start_s = process_time()
        with using() as probes:
            planned = api.plan(
                model, buckets, world=2, device="cpu", backend="eager",
                memory=int(MEMORY[name, "cpu"]),
            )  # fmt: skip
        plans.append((dict(found(planned)), process_time() - start_s))
    assert probes is not None
    calls = (probes.calls, probes.runs, sum(probes.refused.values()))
    (tables, plan_s), (probed, _) = plans
    return PlanCost(name, calls, probes.seconds, probes.table_s, plan_s, tables == probed)
