"""Draws the pictures of docs/concepts.md that show an idea: boxes and arrows, no number."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

BLACK, SOFT = "#1c2530", "#5d6b7a"
PIECES = ("#4477aa", "#66ccee", "#228833", "#ccbb44")
PAPER, LINE = "#f3f6f9", "#9aa7b4"
SALT = {"svg.hashsalt": "dcpc", "svg.fonttype": "path"}  # the same file from the same picture


def draw_sketches(folder: Path) -> None:
    """Writes the pictures into a folder."""
    write(phases(), folder / "phases.svg")
    write(buckets(), folder / "buckets.svg")
    write(degrees(), folder / "degrees.svg")


def write(figure: Figure, file: Path) -> None:
    """Writes a figure as SVG on white, without a date."""
    out = io.StringIO()
    with matplotlib.rc_context(SALT):
        figure.savefig(out, format="svg", facecolor="white", metadata={"Date": None})
    file.write_text("\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n")


def phases() -> Figure:
    """Returns what `dcpc.compile` does, in order, and what each part hands on."""
    steps = (
        ("trace", "your forward,\nonce, with seq\nas a symbol"),
        ("split", "which dim each\ntensor is split\nalong, per degree"),
        ("price", "bytes, FLOPs and\nseconds as\nformulas of seq"),
        ("plan", "per bucket: degree,\nmicro-batch,\nrecompute"),
        ("verify", "loss and gradients\nagainst your\nmodel, float64"),
        ("run", "the variant of each\nmicro-batch's\nshape"),
    )
    figure, axes = _canvas(10.6, 2.0, (0, 0, 106, 20))
    for i, (name, text) in enumerate(steps):
        x = 1 + 17.6 * i
        _box(axes, x, 2, 15, 16, PAPER)
        axes.text(x + 7.5, 15, name, ha="center", va="center", fontsize=12, weight="bold")
        axes.text(x + 7.5, 8, text, ha="center", va="center", fontsize=8.5, color=SOFT)
        if i:
            _arrow(axes, (x - 2.6, 10), (x, 10))
    return figure


def buckets() -> Figure:
    """Returns samples of several lengths in the smallest bucket that holds each."""
    figure, axes = _canvas(8.4, 3.1, (-14, 0, 70, 31))
    sizes = (8, 24, 64)
    samples = ((6.5, 3), (7.3, 4.6), (5, 6.2), (17, 12), (22, 13.6), (58, 21))
    for size, low, high in zip(sizes, (2.2, 11.2, 20.2), (7.4, 14.8, 22.2), strict=True):
        axes.add_patch(Rectangle((0, low), size, high - low + 0.6, color=PAPER, ec=LINE, lw=0.8))
        axes.text(-1, (low + high) / 2 + 0.3, f"bucket\n{{seq: {size * 32}}}", ha="right",
                  va="center", fontsize=9)  # fmt: skip
    for (length, y), colour in zip(samples, PIECES * 2, strict=False):
        axes.add_patch(Rectangle((0.3, y - 0.3), length, 1.2, color=colour, lw=0))
    text = "padding, at the end of a sample\nand up to its bucket only"
    axes.annotate(text, (20.5, 12.3), xytext=(34, 12.9),
                  fontsize=9, color=SOFT, va="center",
                  arrowprops={"arrowstyle": "->", "color": SOFT})  # fmt: skip
    axes.text(0, 27, "a sample goes into the smallest bucket that holds it", fontsize=11)
    return figure


def degrees() -> Figure:
    """Returns one sequence on one rank, and on four that exchange what attention needs."""
    figure, axes = _canvas(9.6, 3.2, (0, 0, 96, 32))
    _box(axes, 2, 9, 28, 12, PAPER)
    axes.text(16, 27, "sp 1: one rank, nothing is sent", ha="center", fontsize=11)
    axes.text(16, 6, "rank 0", ha="center", fontsize=9, color=SOFT)
    for i in range(4):
        axes.add_patch(Rectangle((4 + 6 * i, 13), 6, 4, color=PIECES[i], lw=0))
    axes.text(66, 27, "sp 4: four ranks take one sequence together", ha="center", fontsize=11)
    for rank in range(4):
        x = 38 + 14.5 * rank
        _box(axes, x, 9, 12, 12, PAPER)
        axes.add_patch(Rectangle((x + 3, 13), 6, 4, color=PIECES[rank], lw=0))
        axes.text(x + 6, 6, f"rank {rank}", ha="center", fontsize=9, color=SOFT)
        if rank:
            _arrow(axes, (x - 2.7, 15), (x + 0.2, 15), "<->")
    axes.text(66, 1.5, "each computes its rows; attention exchanges keys and values, or heads",
              ha="center", fontsize=9, color=SOFT)  # fmt: skip
    axes.text(16, 1.5, "all rows, all activations", ha="center", fontsize=9, color=SOFT)
    return figure


def _canvas(
    width: float, height: float, view: tuple[float, float, float, float]
) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(view[0], view[2]), ylim=(view[1], view[3]))
    axes.axis("off")
    return figure, axes


def _box(axes: Axes, x: float, y: float, width: float, height: float, colour: str) -> None:
    axes.add_patch(FancyBboxPatch(
        (x, y), width, height, boxstyle="round,pad=0,rounding_size=1", facecolor=colour,
        edgecolor=LINE, linewidth=0.9,
    ))  # fmt: skip


def _arrow(axes: Axes, begin: Sequence[float], end: Sequence[float], style: str = "->") -> None:
    axes.annotate("", end, begin, arrowprops={"arrowstyle": style, "color": BLACK, "lw": 1.2})
