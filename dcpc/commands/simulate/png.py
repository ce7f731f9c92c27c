"""Timelines as a picture: a panel a system on one axis of time, ranks upwards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dcpc.commands.shared.drawing import blank, drawing
from dcpc.commands.simulate.timeline import StepTimeline

COLOURS = ("#4477aa", "#66ccee", "#228833", "#ccbb44", "#ee6677", "#aa3377")
OTHER = "#bbbbbb"  # fixed costs, the sum of gradients


def legend(axes: Any, title: str, colours: Mapping[str, str]) -> None:
    """Draws a legend above the right end of axes: a filled square for each name -> colour."""
    square = drawing("patches").Patch
    axes.legend(
        handles=[square(color=colour, label=name) for name, colour in colours.items()],
        title=title, ncols=len(colours), fontsize=7, title_fontsize=7, loc="lower right",
        bbox_to_anchor=(1.0, 1.0), frameon=False,
    )  # fmt: skip


def draw(systems: Mapping[str, Sequence[StepTimeline]], file: Path) -> None:
    """Writes a PNG; the colour says how many ranks share a span."""
    figure = blank(12, 0.6 + 1.7 * len(systems))
    panels = figure.subplots(len(systems), 1, sharex=True, squeeze=False)[:, 0]
    longest_s = max((sum(line.end_s for line in steps) for steps in systems.values()), default=0)
    sizes = sorted({s.ranks for steps in systems.values() for line in steps for s in line.spans
                    if s.samples})  # fmt: skip
    colour = {size: COLOURS[i % len(COLOURS)] for i, size in enumerate(sizes)}
    for panel, (name, steps) in zip(panels, systems.items(), strict=True):
        boxes, colours, begin_s = [], [], 0.0
        for line in steps:
            for span in line.spans:
                left, right = begin_s + span.begin_s, begin_s + span.end_s
                low, high = span.first_rank, span.first_rank + span.ranks
                boxes.append([(left, low), (right, low), (right, high), (left, high)])
                colours.append(colour[span.ranks] if span.samples else OTHER)
            begin_s += line.end_s
            panel.axvline(begin_s, color="black", linewidth=0.8)
        panel.add_collection(
            drawing("collections").PolyCollection(
                boxes, facecolors=colours, edgecolors="white", linewidths=0.2
            )
        )
        panel.set_xlim(0, longest_s or 1)
        panel.set_ylim(0, steps[0].world if steps else 1)
        panel.set_title(name, loc="left", fontsize=9)
        panel.set_ylabel("rank", fontsize=8)
    panels[-1].set_xlabel("seconds (predicted); a black line ends a step", fontsize=7)
    named = {f"{size} rank{'s' * (size > 1)}": colour[size] for size in sizes[:8]}
    legend(panels[0], "groups of", {**named, "other": OTHER})
    figure.savefig(file, format="png", dpi=110)
