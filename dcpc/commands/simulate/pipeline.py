"""Draws a pipeline's step as a picture and as a trace: stages, bubbles, memory, its bound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dcpc.commands.shared.drawing import blank, drawing
from dcpc.commands.simulate.png import COLOURS, OTHER, legend
from dcpc.commands.simulate.timeline import Span, StepTimeline, chrome_trace
from dcpc.runtime.pipeline.schedule import FoundSchedule, PipelineReplay, PipelineWork
from dcpc.runtime.pipeline.schedule.actions import KINDS

NAMES = dict(zip(KINDS, ("forward", "backward", "gradients of inputs", "of weights"), strict=True))
_SHORT_S = 1e-12  # a shorter wait is rounding


@dataclass(frozen=True, slots=True)
class Bubble:
    """A time in which a stage computes nothing.

    Attributes:
        stage: number of the stage.
        begin_s: start, in seconds from the start of the step.
        end_s: end, in seconds from the start of the step.
        why: message that the stage waits for.
    """

    stage: int
    begin_s: float
    end_s: float
    why: str


def bubbles(found: PipelineReplay) -> tuple[Bubble, ...]:
    """Returns every wait, by stage: for a message before an action, for the others at the end."""
    waits = []
    for stage, ran in enumerate(found.ran):
        before_s = 0.0
        for r in ran:
            if r.begin_s > before_s + _SHORT_S:
                peer = stage - 1 if r.action.kind == "F" else stage + 1
                waits.append(Bubble(stage, before_s, r.begin_s, f"{r.action} of stage {peer}"))
            before_s = r.end_s
        if found.makespan_s > before_s + _SHORT_S:
            waits.append(Bubble(stage, before_s, found.makespan_s, "the end of the step"))
    return tuple(waits)


def pipeline_timeline(work: PipelineWork, found: FoundSchedule) -> StepTimeline:
    """Returns the step with a stage as a rank: its actions, and how each is recomputed."""
    spans = []
    for stage, ran in enumerate(found.replay.ran):
        for r in ran:
            i = r.action.micro_batch
            setting, most = found.schedule.settings[stage][i], len(work.costs[stage][i]) - 1
            name = f"{r.action} {NAMES[r.action.kind]}, recompute setting {setting} of {most}"
            spans.append(Span(stage, 1, r.begin_s, r.end_s, name, samples=1))
    spans += [
        Span(b.stage, 1, b.begin_s, b.end_s, f"waits for {b.why}") for b in bubbles(found.replay)
    ]
    return StepTimeline(work.stages, tuple(spans), found.replay.makespan_s)


def pipeline_trace(work: PipelineWork, found: FoundSchedule, name: str) -> dict[str, Any]:
    """Returns the step as Chrome trace JSON for Perfetto: spans, bubbles, bytes held."""
    trace = chrome_trace({f"{name}: {said(found)}": [pipeline_timeline(work, found)]})
    for stage, curve in enumerate(found.replay.held):
        trace["traceEvents"] += [
            {"ph": "C", "pid": 0, "name": f"bytes of stage {stage}", "ts": at_s * 1e6,
             "args": {"bytes": round(held)}}
            for at_s, held in curve
        ]  # fmt: skip
    return trace


def said(found: FoundSchedule) -> str:
    """Returns seconds, bubbles and the binding bound, as one line."""
    step = found.replay
    return (
        f"{step.makespan_s:.4g} s, idle {step.bubble_share:.1%}; no schedule of these "
        f"micro-batches is below {found.bound.seconds_s:.4g} s ({found.bound.binds})"
    )


def draw_pipeline(work: PipelineWork, found: FoundSchedule, file: Path) -> None:
    """Writes a PNG: each stage's actions, and below them its memory in use beside the limit."""
    stages = work.stages
    figure = blank(12, 1.2 + 1.1 * stages)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(stages, max(stages / 2, 1)))
    boxes, colours = _boxes(found)
    upper.add_collection(
        drawing("collections").PolyCollection(
            boxes, facecolors=colours, edgecolors="white", linewidths=0.2
        )
    )
    upper.set_xlim(0, found.replay.makespan_s or 1)
    upper.set_ylim(stages, 0)
    upper.set_yticks([s + 0.5 for s in range(stages)], [f"stage {s}" for s in range(stages)])
    upper.set_title(said(found), loc="left", fontsize=9)
    for stage, curve in enumerate(found.replay.held):
        if curve:
            at_s, held = zip(*curve, strict=True)
            share = [h / work.memory_bytes[stage] for h in held] if _bounded(work) else held
            lower.step(at_s, share, where="post", linewidth=0.8, label=f"stage {stage}")
    lower.set_ylabel("share of memory" if _bounded(work) else "bytes", fontsize=8)
    lower.legend(fontsize=7, loc="upper right")
    lower.set_xlabel("seconds (predicted); pale: recomputed in backward", fontsize=7)
    named = {NAMES[k]: c for k, c in zip(KINDS, COLOURS, strict=False)}
    legend(upper, "", {**named, "waits": OTHER})
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, format="png", dpi=110)


def _bounded(work: PipelineWork) -> bool:
    return all(size < float("inf") for size in work.memory_bytes)


def _boxes(
    found: FoundSchedule,
) -> tuple[list[Sequence[tuple[float, float]]], list[tuple[str, float]]]:
    """Returns corners and (colour, opacity) of the actions and of the waits."""
    boxes: list[Sequence[tuple[float, float]]] = []
    colours: list[tuple[str, float]] = []
    colour = dict(zip(KINDS, COLOURS, strict=False))
    for stage, ran in enumerate(found.replay.ran):
        for r in ran:
            boxes.append(_box(r.begin_s, r.end_s, stage, 0.05))
            again = found.schedule.settings[stage][r.action.micro_batch] > 0
            colours.append((colour[r.action.kind], 0.6 if again else 1.0))
    for b in bubbles(found.replay):
        boxes.append(_box(b.begin_s, b.end_s, b.stage, 0.4))
        colours.append((OTHER, 1.0))
    return boxes, colours


def _box(left: float, right: float, stage: int, margin: float) -> list[tuple[float, float]]:
    low, high = stage + margin, stage + 1 - margin
    return [(left, low), (right, low), (right, high), (left, high)]
