"""Searches the fastest schedule of a step that fits: order, micro-batches in flight, recompute.

First come 1F1B, DynaPipe's adaptive order and wait-free orders of several sequences, each with as
much recompute as it needs. From the best of them small random changes follow: two micro-batches
swapped, one moved, a stage holding one more or one less, a micro-batch recomputed more or less on a
stage. A change stays if the step ends no later. The same numbers give the same schedule anywhere:
the limit counts simulated actions, not seconds.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf

from dcpc.errors import PlanError
from dcpc.runtime.pipeline.schedule.actions import PipelineSchedule, PipelineWork
from dcpc.runtime.pipeline.schedule.check import check
from dcpc.runtime.pipeline.schedule.orders import adaptive, one_f_one_b
from dcpc.runtime.pipeline.schedule.recompute import fitted
from dcpc.runtime.pipeline.schedule.replay import PipelineReplay, replay
from dcpc.runtime.pipeline.schedule.schedule_bound import PipelineBound, lower_bound
from dcpc.runtime.pipeline.schedule.wait_free import WaitFree

LIMIT = 16_000  # simulated actions
_CLOSE = 1e-4  # a schedule this near to the bound is not improved
_TRIES = 3  # a plan whose messages do not fit is made again with so much less memory


@dataclass(frozen=True, slots=True)
class FoundSchedule:
    """The best schedule.

    Attributes:
        schedule: schedule that passes `check`.
        replay: times of all actions.
        bound: lower bound of any schedule of these micro-batches.
        made_by: name of the candidate that it came from.
        simulated: number of actions that the search simulated.
    """

    schedule: PipelineSchedule
    replay: PipelineReplay
    bound: PipelineBound
    made_by: str
    simulated: int

    @property
    def gap(self) -> float:
        """Distance from the bound as a share of it."""
        at_s = self.bound.seconds_s
        return self.replay.makespan_s / at_s - 1.0 if at_s > 0 else 0.0


def search(
    work: PipelineWork, *, split: bool = False, limit: int = LIMIT, seed: int = 0
) -> FoundSchedule:
    """Returns the fastest schedule found that fits every stage's memory.

    Args:
        work: costs of the step.
        split: whether weight gradients may run apart from the rest of a backward.
        limit: simulated actions after which the search ends; 0: a few candidates alone.
        seed: seed of the random changes.

    Raises:
        PlanError: a micro-batch does not fit alone on a stage with all recompute.
    """
    _refuse_too_large(work)
    tries = _Tries(work if split else _whole(work), split, limit)
    tries.begin()
    tries.improve(random.Random(seed))
    assert tries.schedule is not None, "one at a time fits, or was refused"
    assert tries.found is not None, "a schedule was replayed"
    check(tries.schedule, work.micro_batches)
    return FoundSchedule(tries.schedule, tries.found, tries.bound, tries.made_by, tries.simulated)


def serial_caps(stages: int) -> tuple[int, ...]:
    """Returns one micro-batch at a time on every stage."""
    return (1,) * stages


def _whole(work: PipelineWork) -> PipelineWork:
    """Returns the same work with backwards that nobody splits."""
    costs = tuple(
        tuple(tuple(replace(c, weight_s=0.0) for c in options) for options in row)
        for row in work.costs
    )
    return replace(work, costs=costs)


def sequences(work: PipelineWork) -> dict[str, list[int]]:
    """Returns orders of the micro-batches worth trying, by name."""
    total = [
        sum(row[i][0].forward_s + row[i][0].backward_s for row in work.costs)
        for i in range(work.micro_batches)
    ]
    up = sorted(range(work.micro_batches), key=lambda i: (total[i], i))
    found = {
        "short at both ends": up[::2] + up[1::2][::-1],
        "shortest first": up,
        "as given": list(range(work.micro_batches)),
        "longest first": up[::-1],
    }
    different = {tuple(sequence): name for name, sequence in reversed(found.items())}
    return {name: list(sequence) for sequence, name in reversed(different.items())}


@dataclass(frozen=True, slots=True)
class _OrderInput:
    """The input from which a wait-free order is made."""

    sequence: tuple[int, ...]
    settings: tuple[tuple[int, ...], ...]
    caps: tuple[int, ...]
    more: bool = False

    @property
    def recompute(self) -> int:
        """Number of steps of recompute beyond the fastest settings."""
        return sum(map(sum, self.settings))


class _Tries:
    """The best schedule so far, and the cost of the search."""

    def __init__(self, work: PipelineWork, split: bool, limit: int) -> None:
        self.work, self.limit = work, limit
        self.flow = WaitFree(work, split)
        self.bound = lower_bound(work)
        self.replayed = 0
        self.made_by = ""
        self.schedule: PipelineSchedule | None = None
        self.found: PipelineReplay | None = None
        self.point: _OrderInput | None = None
        self.point_s = inf
        self.spare = tuple(
            max((max(h.forward_bytes for h in hops) for hops in work.hops), default=0.0)
            for _ in range(work.stages)
        )
        self.actions = 2 * work.stages * work.micro_batches

    @property
    def best_s(self) -> float:
        return inf if self.found is None else self.found.makespan_s

    @property
    def simulated(self) -> int:
        return self.replayed + self.flow.simulated

    @property
    def done(self) -> bool:
        return self.best_s <= self.bound.seconds_s * (1 + _CLOSE) or self.simulated >= self.limit

    @property
    def room(self) -> tuple[float, ...]:
        """Returns each stage's memory, less the reserve for messages."""
        return tuple(a - b for a, b in zip(self.work.memory_bytes, self.spare, strict=True))

    def begin(self) -> None:
        """Tries the candidates by rule."""
        work = self.work
        for name, sequence in list(sequences(work).items())[: None if self.limit else 2]:
            for shape, caps in self._shapes():
                settings = fitted(work, sequence, caps)
                if shape == "1F1B":
                    self._take(one_f_one_b(sequence, settings), f"1F1B, {name}")
                    order = adaptive(work, sequence, settings)
                    if order is not None:
                        self._take(order, f"adaptive, {name}")
                room = replace(work, memory_bytes=self.room)
                for least, more in ((fitted(room, sequence, caps), False), (work.fastest, True)):
                    point = _OrderInput(tuple(sequence), least, caps, more)
                    self.try_point(point, f"wait-free, {name}, holds {shape}")
        if self.point is None:
            every = tuple(tuple(len(options) - 1 for options in row) for row in work.costs)
            point = _OrderInput(tuple(range(work.micro_batches)), every, serial_caps(work.stages))
            self.try_point(point, "one at a time")
        if self.found is None:
            self._serial()

    def improve(self, rng: random.Random) -> None:
        """Changes the best wait-free order until the limit or the bound."""
        while self.point is not None and not self.done:
            self.try_point(_changed(self.work, self.point, rng), "search")

    def try_point(self, point: _OrderInput, name: str) -> None:
        """Keeps a wait-free order that ends earlier, or as early with no more recompute.

        One that ends no earlier than the best schedule is where the search goes on, and is not
        replayed: whether its messages fit is seen when one beside it ends earlier.
        """
        more = self.point is not None and point.recompute > self.point.recompute
        spare = self.spare
        for _ in range(_TRIES):
            made = self.flow.order(
                point.sequence, point.settings, point.caps, spare, point.more, self.point_s
            )
            if made is None or made[1] > self.point_s or (made[1] == self.point_s and more):
                return
            over = self._take(made[0], name) if made[1] < self.best_s else ()
            if not any(over):
                self.spare, self.point, self.point_s = spare, point, made[1]
                return
            spare = tuple(a + b for a, b in zip(spare, over, strict=True))

    def _shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        stages, count = self.work.stages, self.work.micro_batches
        plain = tuple(range(stages, 0, -1))
        yield "1F1B", plain
        yield "half more", tuple(c + (c + 1) // 2 for c in plain)
        yield "twice", tuple(2 * c for c in plain)
        if all(size == inf for size in self.work.memory_bytes):
            yield "any number", (count,) * stages

    def _take(self, schedule: PipelineSchedule, name: str) -> tuple[float, ...]:
        """Keeps a schedule that fits, if it ends no later; returns the bytes that it is over."""
        found = replay(self.work, schedule)
        self.replayed += self.actions
        pairs = zip(found.peak_bytes, self.work.memory_bytes, strict=True)
        over = tuple(max(0.0, peak - size) for peak, size in pairs)
        if not any(over):
            if found.makespan_s < self.best_s:
                self.made_by = name
            if found.makespan_s <= self.best_s:
                self.schedule, self.found = schedule, found
        return over

    def _serial(self) -> None:
        """Runs one micro-batch through all stages after the other, all recomputed."""
        every = tuple(tuple(len(options) - 1 for options in row) for row in self.work.costs)
        count = range(self.work.micro_batches)
        orders = [one_f_one_b([i], [[0]] * self.work.stages).orders for i in count]
        joined = tuple(tuple(a for one in orders for a in one[s]) for s in range(self.work.stages))
        over = self._take(PipelineSchedule(joined, every), "one at a time")
        if any(over):
            s = max(range(self.work.stages), key=lambda n: over[n])
            raise PlanError(
                f"pipeline stage {s}: got {self.work.memory_bytes[s] / 1e9:.3g} GB, which is "
                f"{over[s] / 1e9:.3g} GB too little for one micro-batch at a time with everything "
                "recomputed and its messages; expected room for it; take smaller micro-batches, "
                "more stages, or raise memory="
            )


def _changed(work: PipelineWork, point: _OrderInput, rng: random.Random) -> _OrderInput:
    """Returns a point beside another."""
    count, stages = work.micro_batches, work.stages
    what = rng.random()
    if what < 0.5 and count > 1:
        sequence = list(point.sequence)
        a, b = rng.randrange(count), rng.randrange(count)
        if what < 0.25:
            sequence[a], sequence[b] = sequence[b], sequence[a]
        else:
            sequence.insert(b, sequence.pop(a))
        return replace(point, sequence=tuple(sequence))
    s = rng.randrange(stages)
    if what < 0.65:
        caps = list(point.caps)
        caps[s] = max(1, caps[s] + rng.choice((-1, 1, 1)))
        return replace(point, caps=tuple(caps))
    i = rng.randrange(count)
    rows = [list(row) for row in point.settings]
    step = -1 if rng.random() < 0.7 else 1
    for row in rows if what > 0.9 else rows[s : s + 1]:
        row[i] = row[i] + step
    return replace(
        point,
        settings=tuple(
            tuple(min(max(k, 0), len(work.costs[n][j]) - 1) for j, k in enumerate(row))
            for n, row in enumerate(rows)
        ),
    )


def _refuse_too_large(work: PipelineWork) -> None:
    for s, row in enumerate(work.costs):
        for i, options in enumerate(row):
            least = min(max(c.forward_bytes, c.backward_bytes) for c in options)
            if least > work.memory_bytes[s]:
                raise PlanError(
                    f"micro-batch {i} on pipeline stage {s}: got {work.memory_bytes[s] / 1e9:.3g} "
                    f"GB, expected at least {least / 1e9:.3g} GB with everything recomputed; take "
                    "smaller micro-batches, more stages, or raise memory="
                )
