"""The order in which no stage waits while it may run something, as a simulation that decides."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from math import inf

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

ROUNDING = 1e-9  # relative, of sums of seconds in another order


class WaitFree:
    """Makes wait-free orders of some work.

    A stage that is free runs a backward if one is there, else a forward, else weight gradients. A
    forward begins only if the stage can then run the backward of each micro-batch that it holds:
    so memory never makes stages wait for each other.

    Attributes:
        work: costs of the step.
        split: whether weight gradients run apart from the rest of a backward.
        simulated: number of actions simulated so far.
    """

    def __init__(self, work: PipelineWork, split: bool = False) -> None:
        self.work, self.split, self.simulated = work, split, 0

    def order(
        self,
        sequence: Sequence[int],
        settings: Sequence[Sequence[int]],
        caps: Sequence[int],
        spare_bytes: Sequence[float],
        more: bool = True,
        limit_s: float = inf,
    ) -> tuple[PipelineSchedule, float] | None:
        """Returns the order, and its seconds; None if a micro-batch does not fit, or it is late.

        Args:
            sequence: micro-batches in order.
            settings: least recompute, [stage][micro-batch].
            caps: maximum of micro-batches that each stage holds.
            spare_bytes: bytes of each stage's memory, reserved for messages.
            more: whether more than the least may be recomputed: as little as leaves room for as
                many micro-batches as 1F1B holds there, each with all recompute; where none does so,
                as much as there is.
            limit_s: seconds beyond which it is late.
        """
        work, count = self.work, len(sequence)
        lanes = []
        for s in range(work.stages):
            lane = _Lane(
                [work.costs[s][i] for i in sequence],
                [settings[s][i] for i in sequence],
                work.memory_bytes[s] - spare_bytes[s],
                caps[s],
                work.stages - s,
            )
            lane.split, lane.more = self.split, more
            lanes.append(lane)
        for (lane, after), hops in zip(pairwise(lanes), work.hops, strict=True):
            after.forward_wire_s = [hops[i].forward_s for i in sequence]
            lane.backward_wire_s = [hops[i].backward_s for i in sequence]
        lanes[0].forward_s, lanes[0].forward_wire_s = [0.0] * count, [0.0] * count
        end_s = _run(lanes, limit_s)
        self.simulated += sum(len(lane.order) for lane in lanes)
        if end_s == inf:
            return None
        orders = tuple(tuple(Action(kind, sequence[n]) for kind, n in lane.order) for lane in lanes)
        return PipelineSchedule(orders, tuple(lane.settings(sequence) for lane in lanes)), end_s


class _Lane:
    """A stage of the simulation; micro-batches are numbered by their place in the sequence.

    Attributes:
        order: actions that it has run.
        free_s: end of the last of them.
        left_s: least seconds that it has to run.
        forward_s: end of each forward on the stage before.
        backward_s: end of each backward on the next stage; None on the last stage.
        forward_wire_s: seconds of each message from the stage before.
        backward_wire_s: seconds of each message from the next stage.
        split: whether backwards may run in two parts.
        more: whether more than the least may be recomputed.
    """

    def __init__(
        self,
        options: Sequence[Sequence[StageCost]],
        chosen: list[int],
        room: float,
        cap: int,
        least: int,
    ) -> None:
        self._options, self._chosen, self._room, self._cap = options, chosen, room, cap
        self._least = min(cap, least)
        self._costs = [each[k] for each, k in zip(options, chosen, strict=True)]
        self.left_s = sum([cost.forward_s + cost.backward_s for cost in self._costs])
        self._beside = [_beside(cost) for cost in self._costs]
        self._forwards = self._backwards = 0
        self._weights: deque[int] = deque()
        self._held = self._post_s = self.free_s = 0.0
        self.order: list[tuple[str, int]] = []
        self.forward_s: list[float] = []
        self.backward_s: list[float] | None = [] if least > 1 else None
        self.forward_wire_s: list[float] = []
        self.backward_wire_s: list[float] = []
        self.split, self.more = False, True

    @property
    def done(self) -> bool:
        return self._backwards == len(self._options) and not self._weights

    def settings(self, sequence: Sequence[int]) -> tuple[int, ...]:
        """Returns the settings taken, by micro-batch."""
        found = [0] * len(sequence)
        for i, k in zip(sequence, self._chosen, strict=True):
            found[i] = k
        return tuple(found)

    def backward_at(self) -> float:
        """Returns when a backward may begin; inf: not before something else has."""
        n = self._backwards
        if n >= self._forwards:
            return inf
        if self.backward_s is None:
            return self.free_s
        if n >= len(self.backward_s):
            return inf
        return max(self.backward_s[n], self._post_s) + self.backward_wire_s[n]

    def forward_at(self) -> float:
        """Returns when a forward may begin, likewise."""
        n = self._forwards
        if n >= len(self.forward_s) or n - self._backwards >= self._cap or not self._fits(n):
            return inf
        return max(self.forward_s[n], self._post_s) + self.forward_wire_s[n]

    def run(self, now_s: float) -> str | float:
        """Runs something and returns its kind, or returns when to look again."""
        back_s = self.backward_at()
        if back_s <= now_s:
            return self._backward(now_s)
        ahead_s = self.forward_at()
        if ahead_s <= now_s:
            n = self._forwards
            self._forwards += 1
            self._held += self._costs[n].held_bytes
            return self._ran(FORWARD, n, now_s, self._costs[n].forward_s)
        return self._weight(now_s) if self._weights else min(back_s, ahead_s)

    def _fits(self, n: int) -> bool:
        """Takes a setting with which a micro-batch may begin now; False: there is none."""
        room = self._room - self._held
        own = max(self._beside[self._backwards : n], default=0.0)
        for cost in map(self._costs.__getitem__, self._weights):
            own = max(own, cost.most_bytes(BACKWARD_WEIGHT) - cost.weight_bytes)
        cost = self._costs[n]
        if not self.more:
            left = room - cost.held_bytes
            return cost.forward_bytes <= room and max(own, _beside(cost)) <= left
        after = self._least - (n - self._backwards) - 1
        thin = (
            sum([o[-1].held_bytes for o in self._options[n + 1 : n + 1 + after]])
            if after > 0
            else 0.0
        )
        fits = False
        for k, new in enumerate(self._options[n][self._chosen[n] :], self._chosen[n]):
            left = room - new.held_bytes
            if new.forward_bytes > room or max(own, _beside(new)) > left:
                continue
            fits = True
            self._chosen[n], self._costs[n], self._beside[n] = k, new, _beside(new)
            if thin <= left:
                break
        return fits

    def _backward(self, now_s: float) -> str:
        """Runs a backward, in two parts where memory has room for the values between them."""
        n = self._backwards
        cost = self._costs[n]
        left = self._room - self._held + cost.held_bytes
        parts = max(cost.most_bytes(BACKWARD_INPUT), cost.most_bytes(BACKWARD_WEIGHT))
        apart = self.split and cost.weight_s > 0 and parts <= left
        if self._weights and not apart and cost.held_bytes + _beside(cost) > left:
            return self._weight(now_s)
        self._backwards += 1
        self._held -= cost.held_bytes
        if not apart:
            return self._ran(BACKWARD, n, now_s, cost.backward_s)
        self._held += cost.weight_bytes
        self._weights.append(n)
        return self._ran(BACKWARD_INPUT, n, now_s, cost.input_s)

    def _weight(self, now_s: float) -> str:
        n = self._weights.popleft()
        self._held -= self._costs[n].weight_bytes
        return self._ran(BACKWARD_WEIGHT, n, now_s, self._costs[n].weight_s)

    def _ran(self, kind: str, n: int, now_s: float, seconds_s: float) -> str:
        self.order.append((kind, n))
        self._post_s, self.free_s = now_s, now_s + seconds_s
        self.left_s -= seconds_s
        return kind


def _beside(cost: StageCost) -> float:
    """Peak during backward, bytes, less those held."""
    return cost.backward_bytes - cost.held_bytes


def _run(lanes: Sequence[_Lane], limit_s: float) -> float:
    """Runs all stages with the same seconds as `replay` has; returns the end; inf: never, or late.

    It gives up once a stage has more to run than there are seconds left.
    """
    late_s = limit_s * (1 + ROUNDING)
    events = [(0.0, 0)]
    while events:
        now_s, s = heapq.heappop(events)
        lane = lanes[s]
        if now_s < lane.free_s:
            continue
        ran = lane.run(now_s)
        if not isinstance(ran, str):
            if ran < inf:
                heapq.heappush(events, (ran, s))
            continue
        if lane.free_s + lane.left_s > late_s:
            return inf
        heapq.heappush(events, (lane.free_s, s))
        peer = s + 1 if ran == FORWARD else s - 1
        if ran == BACKWARD_WEIGHT or not 0 <= peer < len(lanes):
            continue
        other = lanes[peer]
        sent = other.forward_s if ran == FORWARD else other.backward_s
        assert sent is not None, "what comes back comes from a later stage"
        sent.append(lane.free_s)
        at_s = min(other.backward_at(), other.forward_at())
        if at_s < inf:
            heapq.heappush(events, (max(at_s, other.free_s), peer))
    end_s = max(lane.free_s for lane in lanes)
    return end_s if end_s <= late_s and all(lane.done for lane in lanes) else inf
