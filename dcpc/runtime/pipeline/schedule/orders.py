"""Schedules by rule: 1F1B and DynaPipe's adaptive order.

All forwards of a step come in one order on every stage, and so do all backwards (`check.py`), so an
order is a sequence of the micro-batches and, for each stage, how its forwards and backwards
alternate.
"""

from __future__ import annotations

from collections.abc import Sequence

from dcpc.runtime.pipeline.schedule.actions import (
    BACKWARD,
    FORWARD,
    Action,
    PipelineSchedule,
    PipelineWork,
)

Settings = Sequence[Sequence[int]]


def one_f_one_b(sequence: Sequence[int], settings: Settings) -> PipelineSchedule:
    """Returns 1F1B: as many forwards first as stages follow, then one forward, one backward."""
    stages, count = len(settings), len(sequence)
    orders = []
    for s in range(stages):
        first = min(stages - 1 - s, count)
        order = [Action(FORWARD, i) for i in sequence[:first]]
        for n in range(first, count):
            order += [Action(FORWARD, sequence[n]), Action(BACKWARD, sequence[n - first])]
        order += [Action(BACKWARD, i) for i in sequence[count - first :]]
        orders.append(tuple(order))
    return PipelineSchedule(tuple(orders), _frozen(settings))


def adaptive(
    work: PipelineWork, sequence: Sequence[int], settings: Settings
) -> PipelineSchedule | None:
    """Returns DynaPipe's order: in each cycle a stage runs one backward and one forward.

    A stage runs an action whose message is there at the start of the cycle, backwards first; a
    forward waits where memory is short. Its own message is there in the next cycle.

    Source: DynaPipe (EuroSys 2024), section 5.

    Returns:
        None if memory does not allow any forward to go on.
    """
    stages, count = work.stages, len(sequence)
    orders: list[list[Action]] = [[] for _ in range(stages)]
    forwards, backwards = [0] * stages, [0] * stages
    held = [0.0] * stages
    while backwards[0] < count:
        runs = []
        for s in range(stages):
            here = count if s == 0 else forwards[s - 1]
            back = forwards[s] if s == stages - 1 else backwards[s + 1]
            if backwards[s] < back:
                runs.append((s, BACKWARD, sequence[backwards[s]]))
            if forwards[s] < here:
                runs.append((s, FORWARD, sequence[forwards[s]]))
        moved = False
        for s, kind, i in runs:
            cost = work.costs[s][i][settings[s][i]]
            if kind == FORWARD and held[s] + cost.forward_bytes > work.memory_bytes[s]:
                continue
            moved = True
            orders[s].append(Action(kind, i))
            held[s] += cost.held_bytes if kind == FORWARD else -cost.held_bytes
            forwards[s] += kind == FORWARD
            backwards[s] += kind == BACKWARD
        if not moved:
            return None
    return PipelineSchedule(tuple(map(tuple, orders)), _frozen(settings))


def _frozen(settings: Settings) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(row) for row in settings)
