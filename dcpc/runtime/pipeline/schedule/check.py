"""Whether a schedule can end: checked before every step, without costs, in time of its actions.

A stage waits for what it receives and never for what it sends. Between two neighbours each
direction is a queue of its own. So a schedule ends, and each receive takes its own message, if

1. every stage has F and B, or F, I and W, of every micro-batch once, in this order;
2. on every two neighbours the forwards come in one order, and so do the backwards: a queue gives
   messages in the order in which they were sent;
3. the graph of "runs before" (a stage's own order, and what it receives) has no circle.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator

from dcpc.errors import PlanError
from dcpc.runtime.pipeline.schedule.actions import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    KINDS,
    Action,
    PipelineSchedule,
)

_DO = "make the plan again; a schedule written by hand needs the order that check.py describes"


def check(schedule: PipelineSchedule, micro_batches: int) -> None:
    """Returns if the schedule runs to its end on any timing.

    Raises:
        PlanError: an action is missing, is there twice or comes too early; two neighbours have
            different orders; or stages wait for each other in a circle.
    """
    if len(schedule.settings) != schedule.stages or any(
        len(row) != micro_batches for row in schedule.settings
    ):
        raise PlanError(
            f"schedule: got settings of {[len(row) for row in schedule.settings]} micro-batches; "
            f"expected {micro_batches} on each of {schedule.stages} stages; {_DO}"
        )
    for stage, order in enumerate(schedule.orders):
        _check_own(stage, order, micro_batches)
    for stage in range(schedule.stages - 1):
        for what, kinds in (("forwards", FORWARD), ("backwards", BACKWARD + BACKWARD_INPUT)):
            here, there = (
                [a.micro_batch for a in schedule.orders[s] if a.kind in kinds]
                for s in (stage, stage + 1)
            )
            if here != there:
                at = next(
                    i for i, pair in enumerate(zip(here, there, strict=True)) if len({*pair}) > 1
                )
                raise PlanError(
                    f"schedule: got micro-batch {here[at]} as number {at} of the {what} of stage "
                    f"{stage}, and {there[at]} on stage {stage + 1}; expected one order: each "
                    f"receive would take another's message; {_DO}"
                )
    stuck = blocked(schedule)
    if stuck:
        text = ", ".join(f"{a} of stage {s}" for s, a in stuck)
        raise PlanError(
            f"schedule: got {text} waiting for each other; expected an order that ends; {_DO}"
        )


def waits_for(action: Action, stage: int, stages: int) -> tuple[int, str] | None:
    """Returns the stage and the side ("F" or "B") that sends to an action; None: none does."""
    if action.kind == FORWARD:
        return (stage - 1, FORWARD) if stage > 0 else None
    if action.kind in (BACKWARD, BACKWARD_INPUT):
        return (stage + 1, BACKWARD) if stage + 1 < stages else None
    return None


def runnable(schedule: PipelineSchedule) -> Iterator[tuple[int, Action, tuple[int, str] | None]]:
    """Yields (stage, action, its sender by `waits_for`), each after that sender's action (Kahn)."""
    at = [0] * schedule.stages
    done: set[tuple[int, str, int]] = set()
    todo = deque(range(schedule.stages))
    while todo:
        stage = todo.popleft()
        order, begin = schedule.orders[stage], at[stage]
        for action in order[begin:]:
            need = waits_for(action, stage, schedule.stages)
            if need is not None and (*need, action.micro_batch) not in done:
                break
            yield stage, action, need
            at[stage] += 1
            if action.kind != BACKWARD_WEIGHT:
                done.add((stage, action.side, action.micro_batch))
        if at[stage] > begin:
            todo += [s for s in (stage - 1, stage + 1) if 0 <= s < schedule.stages]


def blocked(schedule: PipelineSchedule) -> list[tuple[int, Action]]:
    """Returns (stage, action) at which each stage waits for ever; empty: the schedule ends."""
    at = Counter(stage for stage, _, _ in runnable(schedule))
    return [(s, order[at[s]]) for s, order in enumerate(schedule.orders) if at[s] < len(order)]


def _check_own(stage: int, order: tuple[Action, ...], micro_batches: int) -> None:
    """Refuses an order that lacks an action, has one twice, or a backward before its forward."""
    seen: dict[int, str] = {}
    for action in order:
        before = seen.get(action.micro_batch, "")
        allowed = {"": FORWARD, FORWARD: BACKWARD + BACKWARD_INPUT}
        allowed[FORWARD + BACKWARD_INPUT] = BACKWARD_WEIGHT
        if (
            action.kind not in KINDS
            or not 0 <= action.micro_batch < micro_batches
            or action.kind not in allowed.get(before, "")
        ):
            raise PlanError(
                f"schedule: got {action} on stage {stage} after "
                f"{' '.join(before) or 'nothing'} of this micro-batch; expected one of "
                f"{' or '.join(allowed.get(before, '')) or 'nothing more'}, for micro-batches 0 "
                f"to {micro_batches - 1}; {_DO}"
            )
        seen[action.micro_batch] = before + action.kind
    whole = (FORWARD + BACKWARD, FORWARD + BACKWARD_INPUT + BACKWARD_WEIGHT)
    short = [i for i in range(micro_batches) if seen.get(i, "") not in whole]
    if short:
        raise PlanError(
            f"schedule: got no whole backward of micro-batch {short[0]} on stage {stage}; expected "
            f"F and B, or F, I and W, of each; {_DO}"
        )
