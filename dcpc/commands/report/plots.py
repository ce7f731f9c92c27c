"""The report's plots: peak against length, time by op class, live memory of one bucket."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dcpc.buckets import BATCH, Bucket
from dcpc.commands.report.grid import by_length, draw_settings, short
from dcpc.commands.shared.drawing import blank, drawing
from dcpc.plan.choose import elements
from dcpc.plan.planning import LOSS_GRADIENT_BYTES, Planned
from dcpc.symbolic_profile import bytes_text, evaluator, recompute_text, seconds_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, GREY, RED = "#4477aa", "#ee7733", "#228833", "#bbbbbb", "#cc3311"
CLASSES = (BLUE, "#66ccee", GREEN, "#ccbb44", "#ee6677", "#aa3377", ORANGE, "#999933", "#882255")
LINES = (("nothing recomputed", RED), ("half the steps", ORANGE), ("all steps", GREEN))
BETWEEN = 24  # lengths of a curve, where one dim is all that tells buckets apart


@dataclass(frozen=True, slots=True)
class Plots:
    """PNG files of the report's plots.

    Attributes:
        peak: memory needed against length, with nothing, half and all recomputed.
        classes: share of time of each class of ops, a bar a bucket.
        timeline: bytes alive at each point of one bucket's forward and backward.
        timeline_note: caption of `timeline`: the bucket, and the meaning of the points.
    """

    peak: bytes
    classes: bytes
    timeline: bytes
    timeline_note: str


@dataclass(frozen=True, slots=True)
class Curve:
    """Memory needed at some lengths.

    Attributes:
        label: fraction of recompute, as a text.
        lengths: elements of a sample.
        needed_bytes: memory of the fullest rank, resident tensors included.
    """

    label: str
    lengths: tuple[int, ...]
    needed_bytes: tuple[int, ...]


def draw_plots(planned: Planned) -> Plots:
    """Returns the plots of a plan."""
    degrees = _degrees(planned)
    figure = blank(4.3 * max(len(degrees), 2), 3.6)
    for axes, sp in zip(figure.subplots(1, len(degrees), squeeze=False)[0], degrees, strict=True):
        _draw_peak(axes, planned, sp)
    bars = blank(8.6, 1.4 + 0.26 * len(planned.plans))
    _draw_classes(bars.subplots(), planned)
    time = blank(8.6, 3.6)
    bucket = fullest(planned)
    _draw_timeline(time.subplots(), planned, bucket)
    return Plots(_png(figure), _png(bars), _png(time), timeline_note(planned, bucket))


def overview_png(planned: Planned) -> bytes:
    """Returns the page's plots and settings in one PNG, for where a page cannot be shown."""
    degrees = _degrees(planned)
    figure = blank(14, 7.2 + 0.21 * len(planned.plans))
    heights = (3.4, 3.2, 0.21 * len(planned.plans) + 1)
    grid = figure.add_gridspec(3, 2, height_ratios=heights)
    for i, sp in enumerate(degrees):
        where = grid[0, i] if len(degrees) > 1 else grid[0, :]
        _draw_peak(figure.add_subplot(where), planned, sp)
    _draw_timeline(figure.add_subplot(grid[1, :]), planned, fullest(planned))
    draw_settings(figure.add_subplot(grid[2, 0]), planned)
    _draw_classes(figure.add_subplot(grid[2, 1]), planned)
    return _png(figure, 80)


def peak_curves(planned: Planned, sp: int) -> list[Curve]:
    """Returns the memory needed against length, of nothing, half and all recomputed.

    Of micro-batches of one sample, or as the bucket says. On one rank and where one dim tells
    buckets apart the curve goes through lengths between them too.
    """
    curves: list[list[tuple[int, int]]] = [[] for _ in LINES]
    for bucket, like in _lengths(planned, sp):
        priced = planned.by_bucket[like].priced
        sizes = {BATCH: 1, **bucket.sizes}
        study = priced.at(priced.placement({BATCH: 1, **like.sizes}, sp))
        steps = study.steps
        for curve, menu_step in zip(curves, (0, steps // 2, steps), strict=True):
            cost = study.predict(menu_step, sizes)
            live = cost.peak_bytes + cost.input_bytes + LOSS_GRADIENT_BYTES
            curve.append((elements(bucket), planned.request.resident_bytes + live))
    return [
        Curve(label, *(tuple(column) for column in zip(*sorted(points), strict=True)))
        for (label, _), points in zip(LINES, curves, strict=True)
    ]


def class_seconds(planned: Planned, bucket: Bucket) -> dict[str, float]:
    """Returns op class -> seconds of a bucket's full micro-batch, the largest first."""
    sizes = {**bucket.sizes, BATCH: planned.plans[bucket].micro_batch}
    local = planned.study(bucket).local_sizes(sizes)
    return evaluator(planned.profile(bucket)).seconds_by_class(local, planned.device)


def fullest(planned: Planned) -> Bucket:
    """Returns the bucket that needs most memory in its plan, the longer of equals."""
    plans = planned.plans
    return max(plans, key=lambda bucket: (plans[bucket].peak_bytes, elements(bucket)))


def live_points(planned: Planned, bucket: Bucket) -> list[tuple[str, int]]:
    """Returns the points of a bucket's forward and backward, and the bytes alive at each."""
    plan = planned.plans[bucket]
    sizes = {**bucket.sizes, BATCH: plan.micro_batch}
    return planned.study(bucket).live(plan.menu_step, sizes)


def timeline_note(planned: Planned, bucket: Bucket) -> str:
    """Returns the caption of a live-memory plot: its setting, and the copies it leaves out."""
    plan, lift = planned.plans[bucket], planned.by_bucket[bucket].priced.lift
    text = (
        f"{bucket}, sp {plan.sp}, micro-batch {plan.micro_batch}, recompute "
        f"{recompute_text(plan)}, one rank"
    )
    if lift.folds:
        text += (
            "; the model is planned as three copies of its repeated block: the first, one between "
            "and the last are drawn, what the others keep is a jump"
        )
    return text


def _lengths(planned: Planned, sp: int) -> list[tuple[Bucket, Bucket]]:
    """Returns lengths to price, and the bucket whose trace each is of."""
    found = {bucket: bucket for bucket in planned.plans}
    names = {n for b in planned.plans for n, _ in b.shape_key}
    if sp > 1 or len(names) != 1 or any(b.batch is not None for b in planned.plans):
        return list(found.items())
    (name,) = names
    for runnable in planned.traces:
        own = [b for b in planned.plans if planned.by_bucket[b] is runnable]
        sizes = [b[name] for b in own]
        for size in np.geomspace(min(sizes), max(sizes), BETWEEN).round().astype(int):
            found.setdefault(Bucket.of({name: int(size)}), own[0])
    return list(found.items())


def _degrees(planned: Planned) -> list[int]:
    """Returns the smallest degree that was tried, and the largest that was chosen."""
    least = min(row.sp for rows in planned.tables.values() for row in rows)
    return sorted({least, max(plan.sp for plan in planned.plans.values())})


def _draw_peak(axes: Axes, planned: Planned, sp: int) -> None:
    for (label, colour), curve in zip(LINES, peak_curves(planned, sp), strict=True):
        marker = "o" if len(curve.lengths) <= BETWEEN + 1 else None
        axes.plot(
            curve.lengths, curve.needed_bytes, color=colour, marker=marker, markersize=3,
            label=label,
        )  # fmt: skip
    limit, stays = planned.memory_bytes, planned.request.resident_bytes
    axes.axhline(limit, color="black", linewidth=1.2, label="memory of a rank")
    axes.axhline(stays, color=GREY, linewidth=1.2, linestyle="--", label="model and optimizer")
    axes.set(xscale="log", yscale="log", xlabel=_length_text(planned), ylabel="needed")
    for axis, text in ((axes.xaxis, _count_text), (axes.yaxis, _bytes_text)):
        axis.set_major_formatter(drawing("ticker").FuncFormatter(text))
        axis.set_minor_formatter(drawing("ticker").NullFormatter())
    axes.set_title(f"sp {sp}, one sample", loc="left", fontsize=10)
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8)


def _length_text(planned: Planned) -> str:
    names = dict.fromkeys(n for b in planned.plans for n, _ in b.shape_key)
    return " x ".join(names) or "no dim but the batch"


def _draw_classes(axes: Axes, planned: Planned) -> None:
    buckets = by_length(planned)
    seconds = [class_seconds(planned, bucket) for bucket in buckets]
    totals: dict[str, float] = {}
    for each in seconds:
        whole = sum(each.values())
        for name, s in each.items():
            totals[name] = totals.get(name, 0.0) + s / whole
    left = np.zeros(len(buckets))
    labels = [short(bucket) for bucket in buckets]
    for i, name in enumerate(sorted(totals, key=lambda n: -totals[n])):
        share = np.array([100 * e.get(name, 0.0) / sum(e.values()) for e in seconds])
        axes.barh(labels, share, left=left, color=CLASSES[i % len(CLASSES)], label=name, height=0.8)
        left += share
    for y, (bucket, each) in enumerate(zip(buckets, seconds, strict=True)):
        sample = sum(each.values()) / planned.plans[bucket].micro_batch
        text = f"{seconds_text(sample)}, sp {planned.plans[bucket].sp}"
        axes.text(101, y, text, va="center", fontsize=8.5)
    axes.set(
        xlim=(0, 132), ylim=(-0.5, len(buckets) - 0.5),
        xlabel="% of the predicted time; at the right the time of a sample",
    )  # fmt: skip
    axes.set_xticks(range(0, 101, 20))
    axes.tick_params(axis="y", labelsize=8.5)
    axes.set_title("time by class", loc="left", fontsize=9)
    axes.legend(
        fontsize=8, ncols=6, loc="lower right", bbox_to_anchor=(1.0, 0.99), frameon=False,
        columnspacing=0.8, handlelength=1.0,
    )  # fmt: skip


def _draw_timeline(axes: Axes, planned: Planned, bucket: Bucket) -> None:
    points = live_points(planned, bucket)
    names = [name for name, _ in points]
    live = np.array([size for _, size in points], dtype=np.float64)
    stays = planned.request.resident_bytes + _input_bytes(planned, bucket)
    turn = names.index("backward")
    axes.fill_between(range(len(live)), stays, stays + live, color=BLUE, alpha=0.35, linewidth=0)
    axes.plot(stays + live, color=BLUE, linewidth=0.9)
    axes.fill_between([0, len(live) - 1], 0, stays, color=GREY, alpha=0.6, linewidth=0)
    axes.axvline(turn, color="black", linewidth=0.8, linestyle=":")
    axes.axhline(planned.memory_bytes, color="black", linewidth=1.2)
    axes.yaxis.set_major_formatter(drawing("ticker").FuncFormatter(_bytes_text))
    at = int(live.argmax())
    axes.plot([at], [stays + live[at]], "o", color=RED, markersize=4)
    axes.annotate(
        f"peak {bytes_text(stays + live[at])} at {names[at]}", (at, stays + live[at]), fontsize=9,
        xytext=(8, -16), textcoords="offset points",
        bbox={"boxstyle": "round", "facecolor": "white", "edgecolor": "none", "alpha": 0.85},
    )  # fmt: skip
    axes.set(
        xlim=(0, len(live) - 1), ylim=(0, 1.2 * (stays + live[at])), ylabel="alive",
        xlabel="allocations in the order they are made; dotted: backward begins; black: memory\n"
        f"of a rank, {bytes_text(planned.memory_bytes)}; grey: model, optimizer and inputs",
    )  # fmt: skip
    axes.set_title(f"live memory, {_title(planned, bucket)}", loc="left", fontsize=10)


def _title(planned: Planned, bucket: Bucket) -> str:
    plan, lift = planned.plans[bucket], planned.by_bucket[bucket].priced.lift
    text = f"{bucket}, sp {plan.sp}, recompute {plan.recompute}"
    return f"{text}; of the blocks three are drawn" if lift.folds else text


def _input_bytes(planned: Planned, bucket: Bucket) -> int:
    plan = planned.plans[bucket]
    sizes = {**bucket.sizes, BATCH: plan.micro_batch}
    return planned.study(bucket).predict(plan.menu_step, sizes).input_bytes


def _bytes_text(size: float, _: int) -> str:
    return bytes_text(size)


def _count_text(count: float, _: int) -> str:
    return f"{count:,.0f}"


def _png(figure: Figure, dpi: int = 100) -> bytes:
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=dpi)
    return out.getvalue()
