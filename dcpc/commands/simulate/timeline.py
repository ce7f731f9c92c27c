"""Timelines of a step: spans of groups of ranks, from a plan; busy ranks, Chrome trace."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dcpc.runtime.planner.plans import StepPlan, timeline

MOST_THREADS = 64  # of a process in a trace


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive ranks at work on one thing.

    Attributes:
        first_rank: first of the ranks `first_rank` to `first_rank + ranks - 1`.
        ranks: number of ranks.
        begin_s: start, in seconds from the start of the step.
        end_s: end, in seconds from the start of the step.
        name: label of the work.
        samples: number of samples trained.
    """

    first_rank: int
    ranks: int
    begin_s: float
    end_s: float
    name: str
    samples: int = 0


@dataclass(frozen=True, slots=True)
class StepTimeline:
    """One optimizer step of all ranks.

    Attributes:
        world: ranks there are.
        spans: disjoint on every rank.
        end_s: seconds of the step; at least the last span's end.
    """

    world: int
    spans: tuple[Span, ...]
    end_s: float

    def busy_s(self) -> npt.NDArray[np.float64]:
        """Returns each rank's busy seconds, [world]."""
        change = np.zeros(self.world + 1)
        for span in self.spans:
            change[span.first_rank] += span.end_s - span.begin_s
            change[span.first_rank + span.ranks] -= span.end_s - span.begin_s
        busy: npt.NDArray[np.float64] = np.cumsum(change)[:-1]
        return busy

    @property
    def idle_share(self) -> float:
        """Mean share of the step in which a rank does nothing, waits for peers included."""
        return 1.0 - float(self.busy_s().mean()) / self.end_s if self.end_s > 0 else 0.0


def of_step(plan: StepPlan, reduction_s: float = 0.0) -> StepTimeline:
    """Returns the timeline of a plan whose groups wait only for their own ranks.

    Args:
        plan: micro-batches in the global order.
        reduction_s: seconds of the gradients' sum that ends the step, on all ranks.
    """
    world = len(plan.busy_s)
    begins, _, _ = timeline(plan.micro_batches, world, plan.block)
    spans = [
        Span(mb.ranks[0], mb.sp, begin_s, begin_s + mb.seconds_s,
             f"{len(mb.sample_ids)} x {mb.bucket} sp={mb.sp} recompute={mb.menu_step}",
             len(mb.sample_ids))
        for mb, begin_s in zip(plan.micro_batches, begins, strict=True)
    ]  # fmt: skip
    end_s = plan.makespan_s + reduction_s
    if reduction_s:
        spans.append(Span(0, world, plan.makespan_s, end_s, "sum of gradients"))
    return StepTimeline(world, tuple(spans), end_s)


def chrome_trace(systems: Mapping[str, Sequence[StepTimeline]]) -> dict[str, Any]:
    """Returns steps one after another as Chrome trace JSON, which Perfetto opens.

    A process is a system, a thread a rank, or a block of ranks where there are more than
    `MOST_THREADS`: a span is then drawn on the block of its first rank.
    """
    events: list[dict[str, Any]] = []
    for pid, (name, steps) in enumerate(systems.items()):
        world = steps[0].world if steps else 1
        block = -(-world // MOST_THREADS)
        events.append({"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}})
        events += [
            {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name",
             "args": {"name": _thread_name(tid, block, world)}}
            for tid in range(-(-world // block))
        ]  # fmt: skip
        offset_s = 0.0
        for number, step in enumerate(steps):
            for span in step.spans:
                events += _events(span, pid, block, offset_s, number)
            offset_s += step.end_s
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _thread_name(tid: int, block: int, world: int) -> str:
    first = tid * block
    return f"rank {first}" if block == 1 else f"ranks {first}-{min(first + block, world) - 1}"


def _events(
    span: Span, pid: int, block: int, offset_s: float, step: int
) -> Iterable[dict[str, Any]]:
    """One complete event a thread; times in whole nanoseconds, so that neighbours do not overlap.

    A block of several ranks shows the spans that begin on its first rank.
    """
    begin_ns, end_ns = (round((offset_s + t) * 1e9) for t in (span.begin_s, span.end_s))
    last = span.first_rank + span.ranks
    for tid in range(-(-span.first_rank // block), -(-last // block)):
        yield {
            "ph": "X", "pid": pid, "tid": tid, "name": span.name, "ts": begin_ns / 1e3,
            "dur": (end_ns - begin_ns) / 1e3,
            "args": {"step": step, "first_rank": span.first_rank, "ranks": span.ranks,
                     "samples": span.samples},
        }  # fmt: skip
