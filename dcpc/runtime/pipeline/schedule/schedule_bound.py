"""Lower bounds: no schedule of these micro-batches ends earlier, whatever its order and recompute.

Each stage alone is a machine that runs forwards, backwards and weight gradients one at a time. A
forward cannot begin before the stages before it have run (its head), and after it other stages have
yet to run (its tail); likewise a backward. The earliest end of such a machine, if it may interrupt
its jobs at no cost, is Jackson's rule: always the ready job with the longest tail.

Memory: stage s holds its bytes of micro-batch i at least while later stages run i. Bytes times
seconds of all micro-batches fit into its memory times the seconds in which it holds anything.
Recompute makes the first smaller and the seconds more, so for any share x in [0, 1]

    end >= sum over i of min over settings of x * byte-seconds / bytes + (1 - x) * seconds, + ends

as both inequalities hold for the settings that a schedule takes.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from math import inf

from dcpc.runtime.pipeline.schedule.actions import PipelineWork

_SHARES = tuple(n / 8 for n in range(9))


@dataclass(frozen=True, slots=True)
class PipelineBound:
    """The best of the bounds.

    Attributes:
        seconds_s: lower bound of the seconds of any schedule.
        binds: reason for the bound, as text.
    """

    seconds_s: float
    binds: str


@dataclass(frozen=True, slots=True)
class _Least:
    """Least seconds of one stage, by micro-batch, settings free.

    Attributes:
        forward: seconds of the forward.
        inputs: seconds of the input gradients, which others wait for.
        weights: seconds of the rest of the backward.
        head: seconds before the forward can begin.
        between: seconds from the end of the forward to the start of the backward.
        tail: seconds from the end of the input gradients to the end of the step.
    """

    forward: list[float]
    inputs: list[float]
    weights: list[float]
    head: list[float]
    between: list[float]
    tail: list[float]


def lower_bound(work: PipelineWork) -> PipelineBound:
    """Returns seconds that every schedule takes at least, and why."""
    least = _least(work)
    found = []
    for s, stage in enumerate(least):
        found.append((_jackson_s(stage), f"what stage {s} computes"))
        found.append((_memory_s(work, stage, s), f"what stage {s} holds"))
    chain = least[0]
    longest_s = max(
        f + d + b for f, d, b in zip(chain.forward, chain.between, chain.inputs, strict=True)
    )
    found.append((longest_s, "the longest micro-batch through all stages"))
    return PipelineBound(*max(found))


def _least(work: PipelineWork) -> list[_Least]:
    stages, count = work.stages, work.micro_batches
    least = [
        (
            [min(c.forward_s for c in options) for options in row],
            [min(c.input_s for c in options) for options in row],
            [min(c.weight_s for c in options) for options in row],
        )
        for row in work.costs
    ]
    heads, tails = [[0.0] * count], [[0.0] * count]
    for s in range(1, stages):
        hops = work.hops[s - 1]
        heads.append([heads[-1][i] + least[s - 1][0][i] + hops[i].forward_s for i in range(count)])
        tails.append([tails[-1][i] + least[s - 1][1][i] + hops[i].backward_s for i in range(count)])
    between = [[0.0] * count]
    for s in range(stages - 1, 0, -1):
        hops = work.hops[s - 1]
        between.append(
            [
                between[-1][i] + least[s][0][i] + least[s][1][i]
                + hops[i].forward_s + hops[i].backward_s
                for i in range(count)
            ]
        )  # fmt: skip
    between.reverse()
    return [_Least(*least[s], heads[s], between[s], tails[s]) for s in range(stages)]


def _jackson_s(stage: _Least) -> float:
    """Returns the earliest end of one machine with heads and tails, jobs interrupted at will."""
    jobs = []
    for f, b, w, head, between, tail in zip(
        stage.forward,
        stage.inputs,
        stage.weights,
        stage.head,
        stage.between,
        stage.tail,
        strict=True,
    ):
        back_s = head + f + between
        jobs += [(head, f, between + b + max(tail, w)), (back_s, b, max(tail, w))]
        jobs += [(back_s + b, w, 0.0)] if w > 0 else []
    jobs.sort()
    ready: list[tuple[float, float]] = []  # (-tail, seconds left)
    now_s, end_s, at = 0.0, 0.0, 0
    while at < len(jobs) or ready:
        if not ready:
            now_s = max(now_s, jobs[at][0])
        while at < len(jobs) and jobs[at][0] <= now_s:
            heapq.heappush(ready, (-jobs[at][2], jobs[at][1]))
            at += 1
        tail, left_s = heapq.heappop(ready)
        room_s = jobs[at][0] - now_s if at < len(jobs) else inf
        now_s += min(left_s, room_s)
        if left_s > room_s:
            heapq.heappush(ready, (tail, left_s - room_s))
        else:
            end_s = max(end_s, now_s - tail)
    return end_s


def _memory_s(work: PipelineWork, stage: _Least, s: int) -> float:
    """Returns the seconds that memory forces, with the recompute that needs less of it."""
    size = work.memory_bytes[s]
    if not 0 < size < inf:
        return 0.0
    first_s = min(h + f for h, f in zip(stage.head, stage.forward, strict=True))
    # what a stage computes last may be a weight gradient, after which nothing is left to do
    last_s = 0.0 if any(w > 0 for w in stage.weights) else min(stage.tail)
    ends_s = first_s + min(stage.tail), min(stage.head) + last_s
    best_s = 0.0
    for share in _SHARES:
        total_s = share * ends_s[0] + (1 - share) * ends_s[1]
        for options, between in zip(work.costs[s], stage.between, strict=True):
            total_s += min(
                share * c.held_bytes * between / size + (1 - share) * (c.forward_s + c.backward_s)
                for c in options
            )
        best_s = max(best_s, total_s)
    return best_s
