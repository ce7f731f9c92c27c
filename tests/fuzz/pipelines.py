"""Random work and schedules of pipelines, and a machine that runs schedules by queues."""

from __future__ import annotations

import random
from collections import deque
from math import inf

from dcpc.runtime.pipeline.schedule import (
    Action,
    Hop,
    PipelineSchedule,
    PipelineWork,
    StageCost,
    blocked,
)


def random_work(
    rng: random.Random, stages: int, count: int, memory_bytes: float = inf, settings: int = 2
) -> PipelineWork:
    """Returns work with costs of every stage and micro-batch drawn apart."""

    def options() -> tuple[StageCost, ...]:
        f, b, held = rng.uniform(0.1, 1), rng.uniform(0.1, 2), rng.uniform(1, 4)
        return tuple(
            StageCost(
                forward_s=f,
                backward_s=b + k * f,
                weight_s=b * 0.4,
                held_bytes=held / (k + 1),
                forward_bytes=held * 1.2,
                backward_bytes=held * 1.3,
                weight_bytes=held * 0.9,
                input_bytes=held * 1.4,
                work_bytes=held,
            )
            for k in range(settings)
        )

    return PipelineWork(
        tuple(tuple(options() for _ in range(count)) for _ in range(stages)),
        tuple(
            tuple(Hop(rng.uniform(0, 0.1), rng.uniform(0, 0.1), 0.1, 0.1) for _ in range(count))
            for _ in range(stages - 1)
        ),
        (memory_bytes,) * stages,
    )


def random_order(
    rng: random.Random, forwards: list[int], backwards: list[int], split: bool
) -> tuple[Action, ...]:
    """Returns an order of one stage in which each backward comes after its forward."""
    order: list[Action] = []
    todo, back, weights = deque(forwards), deque(backwards), []
    ran: set[int] = set()
    while todo or back or weights:
        can = ["F"] * bool(todo) + ["B"] * bool(back and back[0] in ran) + ["W"] * bool(weights)
        kind = rng.choice(can)
        if kind == "F":
            ran.add(todo[0])
            order.append(Action("F", todo.popleft()))
        elif kind == "W":
            order.append(Action("W", weights.pop(rng.randrange(len(weights)))))
        elif split and rng.random() < 0.5:
            weights.append(back[0])
            order.append(Action("I", back.popleft()))
        else:
            order.append(Action("B", back.popleft()))
    return tuple(order)


def random_schedule(rng: random.Random, work: PipelineWork, split: bool = True) -> PipelineSchedule:
    """Returns a schedule whose stages agree on the order of forwards, and of backwards.

    It may still have a circle: a backward that comes before forwards which the next stage wants
    first.
    """
    forwards = rng.sample(range(work.micro_batches), work.micro_batches)
    backwards = forwards if rng.random() < 0.7 else rng.sample(forwards, len(forwards))
    return PipelineSchedule(
        tuple(random_order(rng, forwards, backwards, split) for _ in range(work.stages)),
        tuple(tuple(rng.randrange(len(o)) for o in row) for row in work.costs),
    )


def drawn_schedule(seed: int, stages: int, count: int, split: bool = True) -> PipelineSchedule:
    """Returns a random schedule that ends."""
    rng = random.Random(seed)
    work = random_work(rng, stages, count, settings=1)
    while True:
        schedule = random_schedule(rng, work, split)
        if not blocked(schedule):
            return schedule


def spoiled(rng: random.Random, schedule: PipelineSchedule) -> PipelineSchedule:
    """Returns a schedule with two actions of a stage swapped, or one missing, twice, or another's.

    By chance it may still be right.
    """
    orders = [list(order) for order in schedule.orders]
    order = rng.choice(orders)
    a, b = rng.randrange(len(order)), rng.randrange(len(order))
    what = rng.randrange(4)
    if what == 0:
        order[a], order[b] = order[b], order[a]
    elif what == 1:
        del order[a]
    elif what == 2:
        order.insert(a, order[b])
    else:
        order[a] = order[a]._replace(micro_batch=order[b].micro_batch)
    return PipelineSchedule(tuple(map(tuple, orders)), schedule.settings)


def runs(schedule: PipelineSchedule, count: int) -> bool:
    """Returns whether ranks that run the schedule end, each receive the message meant for it.

    A queue each way between neighbours; a receive takes the first message whatever it is.
    """
    stages = schedule.stages
    down = [deque[int]() for _ in range(stages + 1)]  # to stage s from s - 1
    up = [deque[int]() for _ in range(stages + 1)]  # to stage s - 1 from s
    left = [deque(order) for order in schedule.orders]
    have = [set[str]() for _ in range(stages)]
    while moved := [
        s for s in range(stages) if left[s] and _may_run(left[s][0], s, stages, down, up)
    ]:
        s = moved[0]
        kind, i = left[s].popleft()
        source, to = {"F": (down[s], down[s + 1]), "W": (None, None)}.get(kind, (up[s + 1], up[s]))
        if source and source.popleft() != i:
            return False
        need = {"F": set(), "W": {f"I{i}"}}.get(kind, {f"F{i}"})
        if not need <= have[s] or f"{kind}{i}" in have[s]:
            return False
        have[s].add(f"{kind}{i}")
        if to is not None:
            to.append(i)
    whole = ({"F", "B"}, {"F", "I", "W"})
    ended = all({k for k in "FBIW" if f"{k}{i}" in h} in whole for h in have for i in range(count))
    rest = [*left, *down[1:stages], *up[1:stages]]
    return ended and not any(rest) and sum(map(len, have)) == sum(map(len, schedule.orders))


def _may_run(action: Action, s: int, stages: int, down: list[deque], up: list[deque]) -> bool:
    """Returns whether what an action receives is there."""
    if action.kind == "F":
        return s == 0 or bool(down[s])
    return action.kind == "W" or s + 1 == stages or bool(up[s + 1])
