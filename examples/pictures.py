"""Draws the pictures of the README and of docs/concepts.md that show numbers: plans of dcpc's own.

    python -m examples.pictures          # writes docs/images/*.svg

The plans are for H200 from its data sheet, so nothing depends on the machine that draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

import dcpc
from dcpc.buckets import BATCH, Bucket
from dcpc.commands.simulate.model_rows import of_planned
from dcpc.commands.simulate.systems import SYSTEMS
from dcpc.commands.simulate.workload import in_buckets
from dcpc.plan.planning import Planned
from dcpc.runtime.planner.plans import StepPlan, timeline
from examples.sketches import BLACK, draw_sketches, write
from models.gpt import GPT, GPTConfig

IMAGES = Path(__file__).parent.parent / "docs" / "images"
WORLD = 8
MEMORY_BYTES = 40e9
SIZES = (2048, 8192, 32768, 131072)
COLOURS = dict(zip(SIZES, ("#66ccee", "#4477aa", "#228833", "#ee7733"), strict=True))
# One global batch: one long document, some of middle length, many short ones.
LENGTHS = (
    *(110_000, 30_000, 28_000, 24_000, 21_000),
    *(8_000 - 150 * i for i in range(16)),
    *(2_040 - 12 * i for i in range(64)),
)
ONE_DEGREE, DCPC = "best homogeneous SP per batch", "dcpc"


@dataclass(frozen=True, slots=True)
class Race:
    """One global batch, planned in two ways.

    Attributes:
        one_degree: all samples at the one degree that is best for this batch.
        dcpc: a degree for each micro-batch.
    """

    one_degree: StepPlan
    dcpc: StepPlan

    @property
    def gain(self) -> float:
        """Share of the time that dcpc's plan saves."""
        return 1 - self.dcpc.makespan_s / self.one_degree.makespan_s


def planned() -> Planned:
    """Returns the plan of a GPT of 1.3e9 parameters for 8 H200, of which each may use 40 GB."""
    config = GPTConfig(vocab_size=32_000, dim=2048, n_layers=24, n_heads=16)
    with torch.device("meta"):
        model = GPT(config).to(torch.bfloat16)
    inputs = dict.fromkeys(("input_ids", "labels"), "int64[batch, seq]")
    buckets = dcpc.Buckets(inputs=inputs, sizes=[{"seq": size} for size in SIZES])
    return dcpc.api.plan(model, buckets, memory=MEMORY_BYTES, world=WORLD, device="h200")


def race(plan: Planned) -> Race:
    """Returns both plans of the batch `LENGTHS`."""
    costs = of_planned(plan, WORLD, plan.device)
    epoch = in_buckets([list(LENGTHS)], [b.bucket for b in costs.buckets])
    return Race(*(next(iter(SYSTEMS[name](costs, epoch))) for name in (ONE_DEGREE, DCPC)))


def draw_race(found: Race) -> Figure:
    """Returns both plans, rank by rank, on one scale of time."""
    figure = Figure(figsize=(9.6, 4.6), layout="constrained")
    (degree,) = {mb.sp for mb in found.one_degree.micro_batches}
    titles = (
        f"one degree for all samples ({degree} ranks a sequence, the best single degree for this "
        f"batch): {found.one_degree.makespan_s:.2f} s",
        f"dcpc, a degree for each length: {found.dcpc.makespan_s:.2f} s",
    )
    both = figure.subplots(2, 1, sharex=True)
    for axes, title, plan in zip(both, titles, (found.one_degree, found.dcpc), strict=True):
        _draw_step(axes, plan)
        axes.set_xlim(0, 1.02 * found.one_degree.makespan_s)
        axes.set_title(title, loc="left", fontsize=11)
    both[1].set_xlabel("predicted seconds of one optimizer step, forward and backward")
    handles = [Patch(color=COLOURS[s], label=f"up to {s:,}") for s in SIZES]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, title="tokens of a sample",
                  frameon=False)  # fmt: skip
    return figure


def _draw_step(axes: Axes, plan: StepPlan) -> None:
    begins, _, _ = timeline(plan.micro_batches, WORLD)
    for mb, begin_s in zip(plan.micro_batches, begins, strict=True):
        first, size = mb.ranks[0] - 0.47, mb.bucket["seq"]
        axes.add_patch(Rectangle(
            (begin_s, first), mb.seconds_s, mb.sp - 0.06, facecolor=COLOURS[size],
            edgecolor="white", linewidth=0.8,
        ))  # fmt: skip
        if mb.seconds_s > 0.12:
            text = f"{mb.sp} rank{'s' * (mb.sp > 1)}"
            axes.text(begin_s + mb.seconds_s / 2, first + mb.sp / 2, text, ha="center", va="center",
                      fontsize=8, color=BLACK if size == SIZES[0] else "white")  # fmt: skip
    axes.set(ylim=(WORLD - 0.5, -0.5), ylabel="rank", yticks=range(WORLD))
    axes.spines[["top", "right"]].set_visible(False)


def curve(plan: Planned, bucket: Bucket, sp: int) -> list[tuple[int, float]]:
    """Returns peak bytes and seconds of a micro-batch of one sample, for each recompute setting."""
    priced = plan.by_bucket[bucket].priced
    sizes = {BATCH: 1, **bucket.sizes}
    study = priced.at(priced.placement(sizes, sp))
    costs = [study.predict(step, sizes) for step in range(study.steps + 1)]
    return [(cost.peak_bytes, cost.seconds_s) for cost in costs]


def draw_recompute(curves: dict[int, Sequence[tuple[int, float]]], limit_bytes: float) -> Figure:
    """Returns time against peak memory of each degree, a point for each recompute setting."""
    figure = Figure(figsize=(7.2, 3.8), layout="constrained")
    axes = figure.subplots()
    for (sp, points), colour in zip(curves.items(), COLOURS.values(), strict=False):
        peak, seconds = zip(*points, strict=True)
        axes.plot([p / 1e9 for p in peak], [s * sp for s in seconds], "o-", markersize=3,
                  color=colour, label=f"sp {sp}")  # fmt: skip
    axes.axvline(limit_bytes / 1e9, color=BLACK, linewidth=1.2, label="what a rank has left for it")
    axes.set(xlabel="peak of a micro-batch on a rank, GB", ylabel="rank-seconds of a sample")
    axes.set_title("a sample of 32,768 tokens; the further left, the more is recomputed",
                   loc="left", fontsize=9)  # fmt: skip
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    return figure


def main() -> None:
    """Writes all pictures."""
    plan = planned()
    write(draw_race(race(plan)), IMAGES / "idea.svg")
    bucket = plan.find({"seq": SIZES[2]})
    curves = {sp: curve(plan, bucket, sp) for sp in (1, 2, 4)}
    left_bytes = plan.memory_bytes - plan.request.resident_bytes
    write(draw_recompute(curves, left_bytes), IMAGES / "recompute.svg")
    draw_sketches(IMAGES)


if __name__ == "__main__":
    main()
