"""Chooses one setting for each bucket among those that fit, and tells where the choice changes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from dcpc.buckets import Bucket
from dcpc.errors import PlanError
from dcpc.ir import LEAVES, BucketPlan, PlanRow
from dcpc.ir.thresholds import MICRO_BATCH_GAIN
from dcpc.symbolic_profile import recompute_text

# Plans by rising length, neighbours that chose alike.
Stretch = tuple[BucketPlan, ...]


@dataclass(frozen=True, slots=True)
class TriedRow(PlanRow):
    """A priced row, whether it fits or not.

    Attributes:
        most: function that returns the number of recompute steps; slow, so called only when needed.
        peak_bytes: peak of activations and new gradients on the fullest rank.
        needed_bytes: `peak_bytes` plus resident bytes: parameters, gradients, optimizer state,
            inputs.
        segments: whether the row was priced again to fit the segments of a GPU's allocator.
    """

    most: Callable[[], int] = field(compare=False, repr=False)
    peak_bytes: int
    needed_bytes: int
    segments: bool = False

    @property
    def steps(self) -> int:
        """Number of recompute steps."""
        return self.most()


def choose(
    bucket: Bucket,
    rows: Sequence[TriedRow],
    memory_bytes: int,
    world: int,
    recompute_mode: str = "auto",
) -> BucketPlan:
    """Returns the row of least rank-seconds a sample among those that fit.

    Raises:
        PlanError: no row fits; the text says how many bytes the best one lacks.
    """
    fitting = [row for row in rows if row.fits]
    if not fitting:
        closest = least_needed(rows)
        over = closest.needed_bytes - memory_bytes
        widest = max(row.sp for row in rows)
        wider = f"run on more ranks than {world}" if widest == world else "allow a larger sp"
        raise PlanError(
            f"bucket {bucket} needs {_size(closest.needed_bytes)} on a rank at sp={closest.sp}, "
            f"micro-batch {closest.micro_batch}, recompute {recompute_text(closest)}; "
            f"a rank has {_size(memory_bytes)}, {_size(over)} too little; "
            f"{wider}, lower the bucket, or raise memory="
        )
    best = min(row.rank_seconds for row in fitting)
    worthy = [row for row in fitting if row.rank_seconds <= best * (1 + MICRO_BATCH_GAIN)]
    chosen = min(worthy, key=lambda row: (row.sp, row.micro_batch, row.menu_step))
    return BucketPlan(
        bucket=bucket,
        sp=chosen.sp,
        micro_batch=chosen.micro_batch,
        menu_step=chosen.menu_step,
        steps=chosen.steps,
        seconds_s=chosen.seconds_s,
        peak_bytes=chosen.peak_bytes,
        reason=_reason(chosen, rows, memory_bytes, recompute_mode),
        again_bytes=chosen.again_bytes,
        activation_bytes=chosen.activation_bytes,
        away_bytes=chosen.away_bytes,
    )


def least_needed(rows: Sequence[TriedRow]) -> TriedRow:
    """Returns the row that needs the fewest bytes among the smallest micro-batches of each degree.

    On a GPU only chosen rows are priced by segments, so that a larger micro-batch may seem to need
    less.
    """
    least = {row.sp: row.micro_batch for row in sorted(rows, key=lambda row: -row.micro_batch)}
    smallest = [row for row in rows if row.micro_batch == least[row.sp]]
    return min(smallest, key=lambda row: row.needed_bytes)


def _reason(chosen: TriedRow, rows: Sequence[TriedRow], memory_bytes: int, mode: str) -> str:
    """Returns the constraints behind a choice, in words."""
    reasons = []
    narrower = [r for r in rows if r.sp < chosen.sp]
    if narrower and not any(r.fits for r in narrower):
        reasons.append(f"sp {max(r.sp for r in narrower)} does not fit {_size(memory_bytes)}")
    elif narrower:
        reasons.append("fewer rank-seconds than a smaller sp")
    if mode != "auto":
        reasons.append(f"recompute {mode} as asked")
    elif chosen.menu_step % LEAVES:
        counted = " with the GPU's segments" * chosen.segments
        reasons.append(f"recompute just enough for {_size(memory_bytes)}{counted}")
    if chosen.away_bytes:
        reasons.append(f"{_size(chosen.away_bytes)} leave the device for {_size(memory_bytes)}")
    larger = [r for r in rows if r.sp == chosen.sp and r.micro_batch > chosen.micro_batch]
    if any(not r.fits for r in larger):
        reasons.append("a larger micro-batch does not fit, or does not pay")
    elif larger:
        reasons.append("a larger micro-batch is less than 5% faster")
    return "; ".join(reasons) or _beside(chosen, rows)


def _beside(chosen: TriedRow, rows: Sequence[TriedRow]) -> str:
    """Returns in words why other settings lost, where no constraint decided."""
    others = [r for r in rows if r.fits and r is not chosen]
    smaller = any(r.sp == chosen.sp and r.micro_batch < chosen.micro_batch for r in others)
    reasons = ["the largest micro-batch tried"] * smaller
    if any(r.sp > chosen.sp for r in others):
        reasons.append("a larger sp saves less than 5%")
    only = "the only setting tried" if len(rows) == 1 else "the only setting that fits"
    return "; ".join(reasons) or only


def _size(size_bytes: int) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size_bytes >= scale:
            return f"{size_bytes / scale:.3g} {unit}"
    return f"{size_bytes} B"


def least_recompute(
    row: Callable[[int], TriedRow], most: Callable[[], int], known: Collection[int]
) -> TriedRow:
    """Returns the row with the fewest recompute steps that fits, else the row that needs the least.

    The peak is not monotone in the number of recompute steps (the last one gains nothing), so a
    bisection finds a candidate, and the result is always a row that was priced itself.

    Args:
        row: function that prices a number of recompute steps.
        most: function that returns the largest number of steps; called only if step 0 does not fit.
        known: numbers of steps that are already priced for other lengths, and so cost nothing.
    """
    tried = {0: row(0)}
    if tried[0].fits:
        return tried[0]
    count = most()
    # Recomputing everything can peak higher than recomputing most of it.
    for high in (count, max(0, count - 1), count * 3 // 4, count // 2):
        tried[high] = row(high)
        if tried[high].fits:
            break
    else:
        return min(tried.values(), key=lambda r: r.needed_bytes)
    low = 0
    while high - low > 1:
        middle = (low + high) / 2
        between = [k for k in known if low < k < high] or [int(middle)]
        at = min(between, key=lambda k: abs(k - middle))
        tried[at] = row(at)
        low, high = (low, at) if tried[at].fits else (at, high)
    return tried[high]


def elements(bucket: Bucket) -> int:
    """Returns the product of a bucket's lengths, by which buckets are ordered."""
    return bucket.tokens


def stretches(plans: Sequence[BucketPlan]) -> list[Stretch]:
    """Returns the plans by rising length, grouped where neighbours have the same setting."""
    found: list[list[BucketPlan]] = []
    for plan in sorted(plans, key=lambda p: (elements(p.bucket), p.bucket.shape_key)):
        if found and _choice(found[-1][0]) == _choice(plan):
            found[-1].append(plan)
        else:
            found.append([plan])
    return [tuple(stretch) for stretch in found]


def crossover_text(plans: Sequence[BucketPlan]) -> str:
    """Returns a line that says between which neighbours by length the degree changes."""
    changes = [
        f"sp {a.sp} -> {b.sp} between {a.bucket} and {b.bucket}" for a, b in degree_changes(plans)
    ]
    text = "; ".join(changes) or f"none, sp {plans[0].sp} throughout"
    return f"crossover lengths of the degree: {text}"


def degree_changes(plans: Sequence[BucketPlan]) -> list[tuple[BucketPlan, BucketPlan]]:
    """Returns the pairs of plans, neighbours by length, between which the degree changes."""
    ordered = [plan for stretch in stretches(plans) for plan in stretch]
    pairs = itertools.pairwise(ordered)
    return [(a, b) for a, b in pairs if a.sp != b.sp]


def lengths_text(stretch: Stretch) -> str:
    """Returns the buckets of a stretch as text: one bucket, or the first and the last."""
    first, last = stretch[0].bucket, stretch[-1].bucket
    return str(first) if len(stretch) == 1 else f"{first} to {last} ({len(stretch)} buckets)"


def choice_text(plan: BucketPlan) -> str:
    """Returns a plan's setting in words."""
    return f"sp {plan.sp}, micro-batch {plan.micro_batch}, recompute {plan.recompute}"


def _choice(plan: BucketPlan) -> tuple[int, int, str]:
    """Returns the key by which settings are equal."""
    return plan.sp, plan.micro_batch, plan.recompute
