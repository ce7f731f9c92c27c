"""Draws buckets and degrees as a picture: the cost of each degree as a colour."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dcpc.buckets import Bucket
from dcpc.commands.report.degrees import cells
from dcpc.commands.shared.drawing import drawing
from dcpc.plan.choose import elements
from dcpc.plan.planning import Planned
from dcpc.symbolic_profile import seconds_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WORST = 2.0  # times the chosen rank-time from which on the colour stays


def by_length(planned: Planned) -> list[Bucket]:
    """Returns the buckets, the longest first, as they stand in the pictures from below."""
    return sorted(planned.plans, key=lambda b: (elements(b), b.shape_key), reverse=True)


def short(bucket: Bucket) -> str:
    """Returns a bucket's lengths alone."""
    return " x ".join(str(size) for _, size in bucket.shape_key) or "the batch"


def draw_settings(axes: Axes, planned: Planned) -> None:
    """Draws a square for each bucket and degree: its rank-time, and a frame if it is chosen."""
    buckets = by_length(planned)
    degrees = sorted({row.sp for rows in planned.tables.values() for row in rows})
    cost = np.full((len(buckets), len(degrees)), np.nan)
    for y, bucket in enumerate(buckets):
        for sp, cell in cells(planned, bucket).items():
            x, row = degrees.index(sp), cell.row
            text = "does not fit"
            if row.fits:
                cost[y, x] = cell.cost
                text = f"{seconds_text(cell.sample_s)} b{row.micro_batch} {row.recompute}"
            axes.text(x, y, text, ha="center", va="center", fontsize=6)
            if cell.chosen:
                frame = drawing("patches").Rectangle(
                    (x - 0.48, y - 0.46), 0.96, 0.92, fill=False, linewidth=1.6
                )
                axes.add_patch(frame)
    axes.set_facecolor("#eeeeee")
    axes.imshow(cost, aspect="auto", origin="lower", cmap="YlOrRd", vmin=1.0, vmax=WORST, alpha=0.6)
    axes.set_xticks(range(len(degrees)), [f"sp {sp}" for sp in degrees], fontsize=8)
    axes.set_yticks(range(len(buckets)), [short(bucket) for bucket in buckets], fontsize=7)
    axes.set_title(
        "time of a sample, micro-batch, recompute; framed: chosen;\nred: more ranks' time a sample",
        loc="left", fontsize=9,
    )  # fmt: skip
