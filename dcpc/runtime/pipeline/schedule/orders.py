"""Schedules by rule: 1F1B, DynaPipe's adaptive order, and the wait-free order of a priority.

All forwards of a step come in one order on every stage, and so do all backwards (`check.py`), so an
order is a sequence of the micro-batches and, for each stage, how its forwards and backwards
alternate.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from math import inf

from dcpc.runtime.pipeline.schedule.actions import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    Action,
    PipelineSchedule,
    PipelineWork,
)

Settings = Sequence[Sequence[int]]


def one_f_one_b(sequence: Sequence[int], settings: Settings) -> PipelineSchedule:
    """Returns 1F1B: as many forwards first as stages follow, then one forward, one backward.

    Args:
        sequence: micro-batches in order.
        settings: [stage][micro-batch].
    """
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

    It runs what is there at the begin of the cycle, backwards first; a forward waits where memory
    is short. What it sends is there in the next cycle.

    Source: DynaPipe (EuroSys 2024), section 5.

    Args:
        work: bytes are all that counts here.
        sequence: micro-batches in order.
        settings: [stage][micro-batch].

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


def wait_free(
    work: PipelineWork,
    sequence: Sequence[int],
    settings: Settings,
    caps: Sequence[int],
    spare_bytes: Sequence[float],
    split: bool = False,
    more: bool = True,
) -> tuple[PipelineSchedule, float] | None:
    """Returns the order in which no stage waits while it may run something, and its seconds.

    A stage that is free runs a backward if one is there, else a forward, else weight gradients. A
    forward begins only if the stage can then run the backward of each micro-batch that it holds:
    so memory never makes stages wait for each other. With `more` it recomputes as little as leaves
    room for as many micro-batches as 1F1B holds there, each with all recompute; where none does so,
    as much as there is.

    Args:
        work: costs.
        sequence: micro-batches in order.
        settings: [stage][micro-batch], the least that is recomputed.
        caps: most micro-batches that each stage holds.
        spare_bytes: of each stage's memory, left for messages.
        split: whether weight gradients run apart from the rest of a backward.
        more: whether more than the least may be recomputed.

    Returns:
        The schedule and when it ends; None if a micro-batch does not fit.
    """
    flow = _Flow(work, sequence, settings, caps, spare_bytes, split, more)
    end_s = flow.run()
    if end_s == inf:
        return None
    return PipelineSchedule(tuple(map(tuple, flow.orders)), flow.settings()), end_s


class _Flow:
    """A simulation that decides as it goes; the same seconds as `replay` has for its orders."""

    def __init__(
        self,
        work: PipelineWork,
        sequence: Sequence[int],
        settings: Settings,
        caps: Sequence[int],
        spare_bytes: Sequence[float],
        split: bool,
        more: bool,
    ) -> None:
        stages = work.stages
        self.more = more
        self.stages, self.count, self.caps, self.split = stages, len(sequence), caps, split
        self.sequence = sequence
        # by place in the sequence
        self.options = [[work.costs[s][i] for i in sequence] for s in range(stages)]
        self.chosen = [[settings[s][i] for i in sequence] for s in range(stages)]
        self.costs = [
            [options[k] for options, k in zip(*rows, strict=True)]
            for rows in zip(self.options, self.chosen, strict=True)
        ]
        self.hops = [[row[i] for i in sequence] for row in work.hops]
        pairs = zip(work.memory_bytes, spare_bytes, strict=True)
        self.room = [size - spare for size, spare in pairs]
        self.orders: list[list[Action]] = [[] for _ in range(stages)]
        self.forwards, self.backwards = [0] * stages, [0] * stages
        self.weights: list[list[int]] = [[] for _ in range(stages)]
        self.held = [0.0] * stages
        self.free_s, self.post_s = [0.0] * stages, [0.0] * stages
        # when the peer ended what it sends, in order
        self.forward_s: list[list[float]] = [[] for _ in range(stages)]
        self.backward_s: list[list[float]] = [[] for _ in range(stages)]
        self.events = [(0.0, 0)]

    def run(self) -> float:
        """Returns when all is done; inf: never."""
        events = self.events
        while events:
            now_s, s = heapq.heappop(events)
            if now_s >= self.free_s[s]:
                self._decide(s, now_s)
        done = all(n == self.count for n in self.backwards) and not any(self.weights)
        return max(self.free_s) if done else inf

    def settings(self) -> tuple[tuple[int, ...], ...]:
        """Returns the settings taken, [stage][micro-batch]."""
        found = [[0] * self.count for _ in range(self.stages)]
        for s, row in enumerate(self.costs):
            for n, i in enumerate(self.sequence):
                found[s][i] = self.options[s][n].index(row[n])
        return _frozen(found)

    def _decide(self, s: int, now_s: float) -> None:
        """Runs something on a free stage, or has it looked at again when a message arrives."""
        back_s = self._backward_at(s)
        if back_s <= now_s:
            return self._backward(s, now_s)
        ahead_s = self._forward_at(s)
        if ahead_s <= now_s:
            return self._forward(s, now_s)
        if self.weights[s]:
            return self._weight(s, now_s)
        next_s = min(back_s, ahead_s)
        if next_s < inf:
            heapq.heappush(self.events, (next_s, s))
        return None

    def _backward_at(self, s: int) -> float:
        n = self.backwards[s]
        if n >= self.forwards[s]:
            return inf
        if s == self.stages - 1:
            return self.free_s[s]
        if n >= len(self.backward_s[s]):
            return inf
        return max(self.backward_s[s][n], self.post_s[s]) + self.hops[s][n].backward_s

    def _forward_at(self, s: int) -> float:
        n = self.forwards[s]
        if n >= self.count or n - self.backwards[s] >= self.caps[s]:
            return inf
        if s > 0 and n >= len(self.forward_s[s]):
            return inf
        if not self._choose(s, n):
            return inf
        if s == 0:
            return self.free_s[s]
        return max(self.forward_s[s][n], self.post_s[s]) + self.hops[s - 1][n].forward_s

    def _choose(self, s: int, n: int) -> bool:
        """Takes a setting with which a micro-batch may begin now; False: there is none."""
        costs, options, begin = self.costs[s], self.options[s][n], self.backwards[s]
        room = self.room[s] - self.held[s]
        own = max((c.backward_bytes - c.held_bytes for c in costs[begin:n]), default=0.0)
        for weight in self.weights[s]:
            own = max(own, costs[weight].work_bytes - costs[weight].weight_bytes)
        more = min(self.caps[s], self.stages - s) - (n - begin) - 1
        thin = [row[-1].held_bytes for row in self.options[s][n + 1 : n + 1 + max(more, 0)]]
        fits = False
        least = self.chosen[s][n]
        for k in range(least, len(options) if self.more else least + 1):
            new = options[k]
            left = room - new.held_bytes
            if new.forward_bytes > room or max(own, new.backward_bytes - new.held_bytes) > left:
                continue
            fits, costs[n] = True, new
            if sum(thin) <= left:
                break
        return fits

    def _forward(self, s: int, now_s: float) -> None:
        n = self.forwards[s]
        cost = self.costs[s][n]
        self.forwards[s] += 1
        self.held[s] += cost.held_bytes
        self._ran(s, FORWARD, n, now_s, cost.forward_s)
        if s + 1 < self.stages:
            self.forward_s[s + 1].append(self.free_s[s])
            self._wake(s + 1)

    def _backward(self, s: int, now_s: float) -> None:
        """Runs a backward, in two parts where memory has room for what lives between them."""
        n = self.backwards[s]
        cost = self.costs[s][n]
        left = self.room[s] - self.held[s] + cost.held_bytes
        apart = self.split and cost.weight_s > 0
        if apart:
            most = max(cost.most_bytes(BACKWARD_INPUT), cost.most_bytes(BACKWARD_WEIGHT))
            apart = most <= left
        if self.weights[s] and not apart and cost.backward_bytes > left:
            return self._weight(s, now_s)
        self.backwards[s] += 1
        self.held[s] -= cost.held_bytes
        if apart:
            self.held[s] += cost.weight_bytes
            self.weights[s].append(n)
        kind = BACKWARD_INPUT if apart else BACKWARD
        self._ran(s, kind, n, now_s, cost.input_s if apart else cost.backward_s)
        if s > 0:
            self.backward_s[s - 1].append(self.free_s[s])
            self._wake(s - 1)
        return None

    def _weight(self, s: int, now_s: float) -> None:
        n = self.weights[s].pop(0)
        self.held[s] -= self.costs[s][n].weight_bytes
        self._ran(s, BACKWARD_WEIGHT, n, now_s, self.costs[s][n].weight_s)

    def _ran(self, s: int, kind: str, n: int, now_s: float, seconds_s: float) -> None:
        self.orders[s].append(Action(kind, self.sequence[n]))
        self.post_s[s] = now_s
        self.free_s[s] = now_s + seconds_s
        heapq.heappush(self.events, (self.free_s[s], s))

    def _wake(self, s: int) -> None:
        """Has a stage looked at when what has just been sent to it may be there."""
        at_s = min(self._backward_at(s), self._forward_at(s))
        if at_s < inf:
            heapq.heappush(self.events, (max(at_s, self.free_s[s]), s))


def _frozen(settings: Settings) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(row) for row in settings)
