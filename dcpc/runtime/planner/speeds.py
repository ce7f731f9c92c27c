"""Ranks of unequal speed: what a group of them makes of a micro-batch's seconds, and how it is learned.

A rank's speed is a share of the fastest rank's, at most 1. A group runs at its slowest rank's. No
speeds at all mean equal ones: then every plan is what it would be without this module.

What is measured are seconds of micro-batches. A micro-batch took what its setting takes on the
fastest rank, over the speed of its group: two factors, found by medians in turn. Seconds that were
predicted come in as a start alone, so a prediction that is wrong for a bucket says nothing of a rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from dcpc.errors import PlanError
from dcpc.runtime.planner.plans import StepPlan

# Steps whose seconds are looked at together, and the micro-batches that a rank must have in them.
WINDOW, LEAST = 8, 4
# A rank within this share of the fastest one is as fast; and a change below it changes nothing.
NOISE = 0.1
# The slowest that a rank is taken for: it still gets work, by which it is seen to be fast again.
SLOWEST = 0.05
_SWEEPS = 12

Speeds = tuple[float, ...]


def checked_speeds(speeds: str | Sequence[float], world: int) -> Speeds:
    """Returns each rank's speed as a share of the fastest's; nothing where they are equal.

    Args:
        speeds: "auto" and "equal" begin with equal ones; or one number a rank.
        world: number of ranks.

    Raises:
        PlanError: there are not as many numbers as ranks.
    """
    if isinstance(speeds, str):
        return ()
    if len(speeds) != world:
        raise PlanError(
            f"got speeds= of {len(speeds)} ranks; expected {world} numbers, one for each rank of "
            "the job; correct the list, or take speeds='auto'"
        )
    fastest = max(speeds)
    shares = tuple(max(SLOWEST, float(s) / fastest) for s in speeds)
    return () if all(s == 1.0 for s in shares) else shares


def check_speeds(speeds: object) -> None:
    """Refuses what is neither a word nor positive numbers.

    Raises:
        PlanError: it is.
    """
    if speeds in ("auto", "equal") and isinstance(speeds, str):
        return
    numbers = isinstance(speeds, list | tuple) and all(
        isinstance(s, int | float) and not isinstance(s, bool) and 0 < s < math.inf for s in speeds
    )
    if not numbers or not speeds:
        raise PlanError(
            f"got speeds={speeds!r}; expected 'auto', 'equal' or a positive number for each rank, "
            "such as [1.0, 0.5]; choose one"
        )


def slowness(speeds: Speeds, first: int, degree: int) -> float:
    """Returns how often a group takes the seconds of the fastest rank; 1 where ranks are equal."""
    return 1.0 / min(speeds[first : first + degree]) if speeds else 1.0


def least_slowness(speeds: Speeds, degree: int) -> float:
    """Returns the `slowness` of the fastest group of a degree."""
    if not speeds:
        return 1.0
    firsts = range(len(speeds) - degree + 1)
    return min(slowness(speeds, first, degree) for first in firsts)


def power(speeds: Speeds, world: int) -> float:
    """Returns how many ranks of the fastest one's speed do as much as all ranks together."""
    return sum(speeds) if speeds else world


@dataclass(slots=True)
class LearnedSpeeds:
    """The speeds that ranks turn out to have; alike on all ranks that are told the same.

    Attributes:
        speeds: as they are taken now; nothing: equal.
        learns: whether they follow what is measured.
        changes: how often they changed.
    """

    speeds: Speeds = ()
    learns: bool = False
    changes: int = 0
    _seen: list[tuple[tuple[object, ...], tuple[int, ...], float]] = field(default_factory=list)
    _steps: int = 0

    def observe(self, plan: StepPlan, every_s: Sequence[float]) -> bool:
        """Takes down a step; returns whether the speeds are others now.

        Args:
            plan: that ran.
            every_s: measured seconds of each of its micro-batches, the same on every rank; 0: none.
        """
        if not self.learns:
            return False
        for mb, took_s in zip(plan.micro_batches, every_s, strict=True):
            expected_s = mb.seconds_s / slowness(plan.speeds, mb.ranks[0], mb.sp)
            if took_s > 0 and expected_s > 0:
                setting = (mb.bucket, mb.sp, mb.micro_batch, mb.menu_step)
                self._seen.append((setting, mb.ranks, took_s / expected_s))
        self._steps += 1
        if self._steps < WINDOW:
            return False
        found = _fitted(self._seen, self.speeds, len(plan.busy_s))
        self._seen.clear()
        self._steps = 0
        old = self.speeds or (1.0,) * len(plan.busy_s)
        if all(abs(new - was) <= NOISE * was for new, was in zip(found, old, strict=True)):
            return False
        self.speeds = () if all(s == 1.0 for s in found) else found
        self.changes += 1
        return True


def _fitted(
    seen: Sequence[tuple[tuple[object, ...], tuple[int, ...], float]], old: Speeds, world: int
) -> Speeds:
    """Returns the speeds by which one factor a setting and one a rank explain what was seen.

    A rank that ran too few keeps its speed. One that ran nothing alone is as slow as its groups.
    """
    alone: dict[int, list[tuple[tuple[object, ...], float]]] = {r: [] for r in range(world)}
    shared: dict[int, list[tuple[tuple[object, ...], float]]] = {r: [] for r in range(world)}
    for setting, ranks, times in seen:
        for r in ranks:
            (alone if len(ranks) == 1 else shared)[r].append((setting, times))
    told = {r: alone[r] if len(alone[r]) >= LEAST else shared[r] for r in range(world)}
    told = {r: own for r, own in told.items() if len(own) >= LEAST}
    was = old or (1.0,) * world
    slow = {r: 1.0 / was[r] for r in told}
    for _ in range(_SWEEPS):
        by_setting: dict[tuple[object, ...], list[float]] = {}
        for r, own in told.items():
            for setting, times in own:
                by_setting.setdefault(setting, []).append(times / slow[r])
        usual = {setting: median(found) for setting, found in by_setting.items()}
        slow = {r: median(times / usual[setting] for setting, times in own)
                for r, own in told.items()}  # fmt: skip
    if not slow:
        return was
    # Ranks that were not seen keep their place beside those that were.
    least = min(slow.values())
    shares = [least / slow[r] if r in slow else was[r] for r in range(world)]
    fastest = max(shares)
    return tuple(
        1.0 if share >= (1 - NOISE) * fastest else max(SLOWEST, round(share / fastest, 2))
        for share in shares
    )
