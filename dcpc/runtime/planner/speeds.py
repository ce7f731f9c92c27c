"""Ranks of unequal speed: the seconds of a group of them, and how their speeds are learned.

A rank's speed is a share of the fastest rank's, at most 1. A group runs at its slowest rank's. No
speeds at all mean equal ones: then every plan is what it would be without this module.

Seconds of micro-batches are measured. A micro-batch takes its setting's seconds on the fastest
rank, over the speed of its group: two factors, found by medians in turn. So ranks are compared by
settings that several of them ran, and a prediction that is wrong for a bucket says nothing of a
rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from dcpc.buckets import Bucket
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
Setting = tuple[Bucket, int, int, int]  # bucket and row of a micro-batch
# Setting, ranks, and measured seconds over those expected of the fastest rank.
Seen = tuple[Setting, tuple[int, ...], float]


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


def speeds_text(speeds: Speeds) -> str:
    """Returns up to eight speeds one by one, more of them as a range."""
    if len(speeds) > 8:
        return f"{min(speeds):.2f} to {max(speeds):.2f}"
    return " ".join(f"{s:.2f}" for s in speeds)


def speeds_line(speeds: Speeds, changes: int) -> str:
    """Returns a sentence with the speeds of the ranks that plans assume."""
    measured = f", as measured ({changes} changes so far)" if changes else ""
    if not speeds:
        return f"plans take all ranks for equally fast{measured}"
    slowest = min(range(len(speeds)), key=lambda r: speeds[r])
    return (
        f"plans take ranks for as fast as {speeds_text(speeds)} of the fastest{measured}; the "
        f"slowest is rank {slowest}"
    )


@dataclass(slots=True)
class LearnedSpeeds:
    """Speeds of the ranks by measurement; alike on all ranks that observe the same.

    Attributes:
        speeds: present speeds; nothing: equal.
        learns: whether they follow the measured seconds.
        changes: number of times that they changed.
    """

    speeds: Speeds = ()
    learns: bool = False
    changes: int = 0
    _seen: list[Seen] = field(default_factory=list)
    _steps: int = 0

    def observe(self, plan: StepPlan, every_s: Sequence[float]) -> bool:
        """Takes down a step; returns whether the speeds are others now.

        Args:
            plan: plan that ran.
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


def _fitted(seen: Sequence[Seen], old: Speeds, world: int) -> Speeds:
    """Returns the speeds with which one factor a setting and one a rank explain the times seen.

    A rank with too few times keeps its speed. One with too few alone is as slow as its groups.
    """
    was = old or (1.0,) * world
    told: dict[int, list[tuple[Setting, float]]] = {}
    for r in range(world):
        own = [(setting, ranks, times) for setting, ranks, times in seen if r in ranks]
        alone = [each for each in own if len(each[1]) == 1]
        used = alone if len(alone) >= LEAST else own
        if len(used) >= LEAST:
            told[r] = [(setting, times) for setting, _, times in used]
    slow = {r: 1.0 / was[r] for r in told}
    for _ in range(_SWEEPS):
        by_setting: dict[Setting, list[float]] = {}
        for r, own_times in told.items():
            for setting, times in own_times:
                by_setting.setdefault(setting, []).append(times / slow[r])
        usual = {setting: median(found) for setting, found in by_setting.items()}
        slow = {r: median(times / usual[setting] for setting, times in own_times)
                for r, own_times in told.items()}  # fmt: skip
    shares = [*was]
    for ranks in _comparable({r: {setting for setting, _ in told[r]} for r in told}):
        # Of those that ran nothing alike with these nothing is known beside them.
        least, before = min(slow[r] for r in ranks), max(was[r] for r in ranks)
        for r in ranks:
            shares[r] = before * least / slow[r]
    fastest = max(shares)
    return tuple(
        1.0 if share >= (1 - NOISE) * fastest else max(SLOWEST, round(share / fastest, 2))
        for share in shares
    )


def _comparable(settings: dict[int, set[Setting]]) -> list[set[int]]:
    """Returns the ranks in groups within which settings that two of them ran lead to each other."""
    groups: list[tuple[set[int], set[Setting]]] = []
    for rank, own in settings.items():
        met = [group for group in groups if group[1] & own]
        groups = [group for group in groups if not group[1] & own]
        ranks = {rank}.union(*(ranks for ranks, _ in met))
        groups.append((ranks, own.union(*(theirs for _, theirs in met))))
    return [ranks for ranks, _ in groups]
