"""Simulates a schedule on its costs: the start of each action, each stage's bytes over time.

A stage runs its actions in order, each as soon as the one before has ended and its message is here.
The executor posts the receive of an action when the action before it begins; a message is on the
wire from then, or from when it is sent. From the post on its bytes are the receiver's. They are the
sender's until it takes a message of the receiver that was made after this one was taken: nothing
else tells the sender of the arrival.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from dcpc.errors import PlanError
from dcpc.runtime.pipeline.schedule.actions import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    Action,
    PipelineSchedule,
    PipelineWork,
    StageCost,
)
from dcpc.runtime.pipeline.schedule.check import blocked, runnable

Changes = list[tuple[float, float]]  # (seconds, bytes more), in any order


@dataclass(frozen=True, slots=True)
class RanAction:
    """An action with its seconds from the begin of the step.

    Attributes:
        action: action that ran.
        begin_s: start of the action.
        end_s: end of the action.
        arrival_s: arrival of its message; 0: it has none.
    """

    action: Action
    begin_s: float
    end_s: float
    arrival_s: float = 0.0


@dataclass(frozen=True, slots=True)
class PipelineReplay:
    """A simulated step.

    Attributes:
        ran: for each stage: its actions, in order.
        held: for each stage: (seconds, bytes from then on), ascending.
        makespan_s: end of the last action.
    """

    ran: tuple[tuple[RanAction, ...], ...]
    held: tuple[tuple[tuple[float, float], ...], ...]
    makespan_s: float

    @property
    def peak_bytes(self) -> tuple[float, ...]:
        """Most bytes of each stage at any time."""
        return tuple(max((b for _, b in curve), default=0.0) for curve in self.held)

    @property
    def busy_s(self) -> tuple[float, ...]:
        """Seconds in which each stage computes."""
        return tuple(sum(r.end_s - r.begin_s for r in ran) for ran in self.ran)

    @property
    def bubble_share(self) -> float:
        """Mean share of the step in which a stage computes nothing, 0 to 1."""
        if self.makespan_s <= 0:
            return 0.0
        return 1.0 - sum(self.busy_s) / (self.makespan_s * len(self.ran))


def replay(work: PipelineWork, schedule: PipelineSchedule) -> PipelineReplay:
    """Returns the times of all actions, and the bytes held.

    Raises:
        PlanError: stages wait for each other.
    """
    ran = times(work, schedule)
    held = tuple(
        _curve(
            _changes(work, schedule.settings[s], ran, s)
            + _unsent(work, schedule.settings[s], ran, s)
        )
        for s in range(schedule.stages)
    )
    return PipelineReplay(ran, held, max((row[-1].end_s for row in ran if row), default=0.0))


def seconds_of(cost: StageCost, kind: str) -> float:
    """Returns the seconds of an action."""
    if kind == FORWARD:
        return cost.forward_s
    if kind == BACKWARD:
        return cost.backward_s
    return cost.input_s if kind == BACKWARD_INPUT else cost.weight_s


def times(work: PipelineWork, schedule: PipelineSchedule) -> tuple[tuple[RanAction, ...], ...]:
    """Returns when each action runs, by stage.

    Raises:
        PlanError: stages wait for each other.
    """
    ran: list[list[RanAction]] = [[] for _ in schedule.orders]
    sent: dict[tuple[int, str, int], float] = {}  # (stage, side, micro-batch) -> seconds
    for s, action, need in runnable(schedule):
        kind, i = action
        post_s, free_s = (ran[s][-1].begin_s, ran[s][-1].end_s) if ran[s] else (0.0, 0.0)
        arrival_s = 0.0
        if need is not None:
            hop = work.hops[min(s, need[0])][i]
            wire_s = hop.forward_s if kind == FORWARD else hop.backward_s
            arrival_s = max(sent[*need, i], post_s) + wire_s
        begin_s = max(free_s, arrival_s)
        end_s = begin_s + seconds_of(work.costs[s][i][schedule.settings[s][i]], kind)
        ran[s].append(RanAction(action, begin_s, end_s, arrival_s))
        if kind != BACKWARD_WEIGHT:
            sent[s, action.side, i] = end_s
    if sum(map(len, ran)) < sum(map(len, schedule.orders)):
        text = ", ".join(f"{a} of stage {s}" for s, a in blocked(schedule))
        raise PlanError(
            f"schedule: got {text} waiting for ever; expected an order that ends; check it first"
        )
    return tuple(map(tuple, ran))


def _changes(
    work: PipelineWork,
    settings: tuple[int, ...],
    ran: tuple[tuple[RanAction, ...], ...],
    stage: int,
) -> Changes:
    """Returns the bytes that a stage allocates and frees, with the times."""
    found: Changes = []
    post_s = 0.0
    for r in ran[stage]:
        kind, i = r.action
        cost = work.costs[stage][i][settings[i]]
        if kind == FORWARD:
            found += [
                (r.begin_s, cost.forward_bytes),
                (r.end_s, cost.held_bytes - cost.forward_bytes),
            ]
        else:
            held = cost.weight_bytes if kind == BACKWARD_WEIGHT else cost.held_bytes
            left = cost.weight_bytes if kind == BACKWARD_INPUT else 0.0
            most = cost.most_bytes(kind)
            found += [(r.begin_s, most - held), (r.end_s, left - most)]
        if r.arrival_s > 0:
            hop = work.hops[stage - 1 if kind == FORWARD else stage][i]
            size = hop.forward_bytes if kind == FORWARD else hop.backward_bytes
            found += [(post_s, size), (r.begin_s, -size)]
        post_s = r.begin_s
    return found


def _unsent(
    work: PipelineWork,
    settings: tuple[int, ...],
    ran: tuple[tuple[RanAction, ...], ...],
    stage: int,
) -> Changes:
    """Returns the bytes of sent messages of whose arrival a stage does not know.

    Bytes that it holds anyway meanwhile are left out. Messages each way come in the order in which
    they are taken, so one look at each is enough.
    """
    found: Changes = []
    for peer in (stage - 1, stage + 1):
        if not 0 <= peer < len(ran):
            continue
        down = peer > stage  # what is sent there is made by forwards
        places = {
            (r.action.kind == FORWARD, r.action.micro_batch): place
            for place, r in enumerate(ran[peer])
            if r.action.kind != BACKWARD_WEIGHT
        }
        messages = [r for r in ran[stage] if r.action.kind != BACKWARD_WEIGHT]
        sent = [r for r in messages if (r.action.kind == FORWARD) == down]
        heard = [r for r in messages if (r.action.kind == FORWARD) != down]
        told, end_s = 0, ran[stage][-1].end_s
        for r in sent:
            taken = places[down, r.action.micro_batch]
            while told < len(heard) and places[not down, heard[told].action.micro_batch] < taken:
                told += 1
            kind, i = r.action
            cost = work.costs[stage][i][settings[i]]
            if down:
                size = work.hops[stage][i].forward_bytes - cost.sent_held_bytes
            else:
                size = work.hops[peer][i].backward_bytes
                size -= cost.back_kept_bytes * (kind == BACKWARD_INPUT)
            until_s = heard[told].begin_s if told < len(heard) else end_s
            found += [(r.end_s, size), (until_s, -size)]
    return found


def _curve(changes: Changes) -> tuple[tuple[float, float], ...]:
    """Returns the bytes held from each time on; at one time frees come first."""
    changes.sort()
    times_s, sizes = zip(*changes, strict=True) if changes else ((), ())
    return tuple(zip(times_s, accumulate(sizes), strict=True))
