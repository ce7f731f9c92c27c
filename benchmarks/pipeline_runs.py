"""Schedules run on four gloo ranks by stages that sleep as long as they would compute."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dcpc.runtime.groups.groups import Groups
from dcpc.runtime.groups.local_ranks import run_ranks
from dcpc.runtime.pipeline.executor import PipelineBatch, run_schedule
from dcpc.runtime.pipeline.grid import PipelineGrid
from dcpc.runtime.pipeline.schedule import (
    Hop,
    PipelineSchedule,
    PipelineWork,
    StageCost,
    adaptive,
    one_f_one_b,
    replay,
)
from tests.fuzz.pipelines import drawn_schedule

STAGES, TIMEOUT_S = 4, 240.0
UNDISTURBED = 0.05  # share by which a schedule may take longer than its sleeps
VALUES = ((16,), torch.float32)


@dataclass(frozen=True, slots=True)
class SleepingStage:
    """A stage that takes the seconds of a cost; the seed is the number of the micro-batch."""

    work: PipelineWork
    index: int
    setting: int
    count: int = STAGES
    parameters: tuple[str, ...] = ()

    def at(self, sizes: Mapping[str, int]) -> SleepingStage:
        return self

    def forward(
        self, inputs: Mapping[str, Tensor], received: tuple[Tensor, ...], seed: int = 0
    ) -> tuple[tuple[Tensor, ...], Any]:
        time.sleep(self._cost(seed).forward_s)
        if self.index == self.count - 1:
            return (torch.tensor(float(seed)),), seed
        return (torch.full(*_filled(seed)),), seed

    def backward(self, saved: Any, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        time.sleep(self._cost(saved).backward_s)
        return self._back(saved, grads)

    def backward_input(
        self, saved: Any, grads: tuple[Tensor | None, ...]
    ) -> tuple[tuple[Tensor | None, ...], Any]:
        time.sleep(self._cost(saved).input_s)
        return self._back(saved, grads), saved

    def backward_weight(self, rest: Any) -> None:
        time.sleep(self._cost(rest).weight_s)

    def _cost(self, number: int) -> StageCost:
        return self.work.costs[self.index][number][self.setting]

    def _back(self, saved: Any, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        if self.index < self.count - 1 and float(grads[0][0]) != saved:  # type: ignore[index]
            raise AssertionError(f"micro-batch {saved} got the gradient of {grads}")
        return (torch.full(*_filled(saved)),) if self.index else ()

    def received(self, sizes: Mapping[str, int]) -> tuple[Any, ...]:
        return (VALUES,) if self.index else ()

    def sent(self, sizes: Mapping[str, int]) -> tuple[Any, ...]:
        return (VALUES,) if self.index < self.count - 1 else (((), torch.float32),)


def _filled(number: int) -> tuple[tuple[int, ...], float]:
    return VALUES[0], float(number)


def run_all(jobs: Sequence[tuple[PipelineWork, PipelineSchedule]], repeats: int) -> list[float]:
    """Returns the least measured seconds of each schedule on four ranks.

    Stages sleep as long as predicted, so one that took hardly longer was not disturbed, and is not
    run again.

    Args:
        jobs: work, and a schedule of it.
        repeats: at most.
    """
    enough_s = [seconds_s * (1 + UNDISTURBED) for seconds_s in predicted_s(jobs)]
    each = run_ranks(_timed, STAGES, list(jobs), repeats, enough_s, timeout_s=TIMEOUT_S, fork=True)
    return [min(map(max, zip(*rows, strict=True))) for rows in zip(*each, strict=True)]


def run_fuzz(count: int, seed: int = 0) -> int:
    """Runs random schedules that pass the check; returns how many ended (all, or ranks raise)."""
    rng = random.Random(seed)
    sizes = [rng.randrange(1, 7) for _ in range(count)]
    jobs = [(_brief(n), drawn_schedule(seed + k, STAGES, n)) for k, n in enumerate(sizes)]
    never_s = [0.0] * count
    return len(run_ranks(_timed, STAGES, jobs, 1, never_s, timeout_s=TIMEOUT_S, fork=True)[0])


def _brief(count: int) -> PipelineWork:
    """Returns work of no seconds."""
    cost = StageCost(0.0, 0.0)
    return PipelineWork(
        (((cost,),) * count,) * STAGES, ((Hop(),) * count,) * (STAGES - 1), (1e12,) * STAGES
    )


def _timed(
    rank: int,
    jobs: Sequence[tuple[PipelineWork, PipelineSchedule]],
    repeats: int,
    enough_s: Sequence[float],
) -> list[list[float]]:
    """Returns the seconds of each schedule on this rank, by repeat, from a common begin.

    Args:
        rank: this one.
        jobs: work, and a schedule of it.
        repeats: at most.
        enough_s: of each job the seconds of the slowest rank at which it is not repeated.
    """
    groups = Groups.default(timeout_s=60.0)
    grid = PipelineGrid.make(groups, STAGES, ())
    found = []
    for (work, schedule), most_s in zip(jobs, enough_s, strict=True):
        settings = [SleepingStage(work, rank, k) for k in range(len(work.costs[0][0]))]
        batches = [PipelineBatch({}, {}, 1.0, n) for n in range(work.micro_batches)]
        taken = []
        for _ in range(repeats):
            dist.barrier()
            begin_s = time.perf_counter()
            run_schedule(settings, batches, schedule, grid)
            taken.append(time.perf_counter() - begin_s)
            slowest = torch.tensor(taken[-1])
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            if float(slowest) <= most_s:
                break
        found.append(taken)
    return found


def scaled(work: PipelineWork, factor: float) -> PipelineWork:
    """Returns work whose seconds are a multiple."""

    def all_of(c: StageCost) -> StageCost:
        names = ("forward_s", "backward_s", "weight_s")
        return replace(c, **{name: getattr(c, name) * factor for name in names})

    costs = tuple(tuple(tuple(map(all_of, each)) for each in row) for row in work.costs)
    return replace(work, costs=costs, hops=tuple(tuple(Hop() for _ in row) for row in work.hops))


def candidates(work: PipelineWork, own: PipelineSchedule) -> dict[str, PipelineSchedule]:
    """Returns schedules of the same work that differ: dcpc's, by rule, and random ones."""
    count = work.micro_batches
    up = sorted(range(count), key=lambda i: work.costs[0][i][0].forward_s)
    found = {
        "dcpc": own, "1F1B": one_f_one_b(range(count), own.settings),
        "1F1B, longest in the middle": one_f_one_b(up[::2] + up[1::2][::-1], own.settings),
        "1F1B, longest outside": one_f_one_b(up[::-1][::2] + up[::-1][1::2][::-1], own.settings),
    }  # fmt: skip
    order = adaptive(work, range(count), own.settings)
    found |= {} if order is None else {"adaptive": order}
    for seed in range(4):
        drawn = drawn_schedule(seed, STAGES, count)
        found[f"random {seed}"] = replace(drawn, settings=own.settings)
    serial = [one_f_one_b([i], ((0,),) * STAGES).orders for i in range(count)]
    joined = tuple(tuple(a for one in serial for a in one[s]) for s in range(STAGES))
    return found | {"one at a time": replace(own, orders=joined)}


def wrong_pairs(predicted_s: Sequence[float], measured_s: Sequence[float]) -> tuple[int, int]:
    """Returns (pairs that differ by more than 10% and come in the other order, such pairs)."""
    wrong, counted = 0, 0
    for (p, m), (q, n) in combinations(zip(predicted_s, measured_s, strict=True), 2):
        if max(p, q) > 1.1 * min(p, q):
            counted += 1
            wrong += (p < q) != (m < n)
    return wrong, counted


def predicted_s(jobs: Sequence[tuple[PipelineWork, PipelineSchedule]]) -> list[float]:
    """Returns the simulated seconds of each schedule."""
    return [replay(work, schedule).makespan_s for work, schedule in jobs]
