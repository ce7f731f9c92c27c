"""Deals a global batch out to the ranks: which samples form a micro-batch, and who runs it when.

Longest first: the widest micro-batches go first, then the longest ones, each to the aligned block
of ranks that is free earliest. The result is one global order; every rank runs its own part of it
in this order, so two blocks that share a rank never wait for each other in a circle.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dcpc.buckets import Bucket
from dcpc.errors import PlanError
from dcpc.ir import BucketPlan

# Micro-batches are cut finer than memory asks for where that ends the step this much earlier: each
# one costs a launch that `seconds_s`, linear in samples, does not see.
_GAIN = 0.03
_PIECES = (1, 2, 4)


@dataclass(frozen=True, slots=True)
class PlannedMicroBatch:
    """Some samples of one bucket on one block of ranks.

    Attributes:
        bucket: shape of the samples.
        sp: number of ranks that share them.
        ranks: these ranks.
        sample_ids: the samples, in order.
        seconds_s: predicted seconds, forward and backward.
    """

    bucket: Bucket
    sp: int
    ranks: tuple[int, ...]
    sample_ids: tuple[int, ...]
    seconds_s: float


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What every rank does in one optimizer step.

    Attributes:
        micro_batches: in the global order that all ranks follow.
        busy_s: predicted busy seconds of each rank.
        makespan_s: predicted seconds until the last rank is done, waits for peers included.
    """

    micro_batches: tuple[PlannedMicroBatch, ...]
    busy_s: tuple[float, ...]
    makespan_s: float

    @property
    def imbalance(self) -> float:
        """Mean idle share of the ranks, 0 to 1: see `imbalance`."""
        return imbalance(self.busy_s)

    @property
    def fingerprint(self) -> str:
        """A short text that is equal for equal plans."""
        return hashlib.blake2b(repr(self.micro_batches).encode(), digest_size=8).hexdigest()

    def of(self, rank: int) -> tuple[PlannedMicroBatch, ...]:
        """Returns the micro-batches of one rank, in order."""
        return tuple(mb for mb in self.micro_batches if rank in mb.ranks)


def imbalance(busy_s: Sequence[float]) -> float:
    """Returns the mean over ranks of (max t - t_r), as a share of max t; 0 where nobody works.

    Source: VideoSys' `calculate_imbalance`, which reports it in percent.
    """
    longest_s = max(busy_s, default=0.0)
    if longest_s <= 0:
        return 0.0
    return sum(longest_s - t for t in busy_s) / len(busy_s) / longest_s


def deal(
    samples: Iterable[tuple[int, Bucket]], plans: Mapping[Bucket, BucketPlan], world: int
) -> StepPlan:
    """Returns a plan in which every sample is in exactly one micro-batch.

    Micro-batches have at most `BucketPlan.micro_batch` samples; those of one bucket differ by at
    most one sample. Pure: equal arguments give equal plans on every rank.

    Args:
        samples: sample id and bucket of each sample of the global batch.
        plans: setting of each bucket; `sp` divides `world`.
        world: number of ranks.

    Raises:
        PlanError: a bucket has no plan, or its `sp` does not divide `world`.
    """
    by_bucket: dict[Bucket, list[int]] = {}
    for sample_id, bucket in samples:
        by_bucket.setdefault(bucket, []).append(sample_id)
    for bucket in by_bucket:
        _check(bucket, plans, world)
    total_s = sum(
        len(ids) * _sample_s(plans[b]) * plans[b].sp / world for b, ids in by_bucket.items()
    )
    best: StepPlan | None = None
    for limit_s in (float("inf"), *(total_s / n for n in _PIECES)):
        cut = [mb for b, ids in by_bucket.items() for mb in _cut(ids, plans[b], limit_s)]
        plan = _assign(cut, world)
        if best is None or plan.makespan_s < (1 - _GAIN) * best.makespan_s:
            best = plan
    assert best is not None, "there is a first candidate"
    return best


def _check(bucket: Bucket, plans: Mapping[Bucket, BucketPlan], world: int) -> None:
    plan = plans.get(bucket)
    if plan is None:
        raise PlanError(
            f"bucket {bucket}: got no plan; expected one of "
            f"{', '.join(map(str, plans)) or 'no buckets at all'}; compile for this bucket"
        )
    if plan.sp < 1 or world % plan.sp or plan.micro_batch < 1:
        raise PlanError(
            f"bucket {bucket}: got sp={plan.sp}, micro_batch={plan.micro_batch} for {world} ranks; "
            "expected an sp that divides the ranks and at least one sample; plan for this world "
            "size"
        )


def _sample_s(plan: BucketPlan) -> float:
    return plan.seconds_s / plan.micro_batch


def _cut(ids: Sequence[int], plan: BucketPlan, limit_s: float) -> list[PlannedMicroBatch]:
    """Returns the fewest micro-batches within memory and `limit_s` seconds each, without ranks."""
    sample_s = _sample_s(plan)
    most = plan.micro_batch
    if sample_s > 0 and limit_s < most * sample_s:
        most = max(1, int(limit_s / sample_s))
    count = -(-len(ids) // most)
    ends = [len(ids) * (i + 1) // count for i in range(count)]
    return [
        PlannedMicroBatch(plan.bucket, plan.sp, (), tuple(ids[a:b]), (b - a) * sample_s)
        for a, b in zip([0, *ends], ends, strict=False)
    ]


def _assign(cut: Sequence[PlannedMicroBatch], world: int) -> StepPlan:
    """Returns the plan that puts each micro-batch on the block that is free earliest."""
    order = sorted(cut, key=lambda mb: (-mb.sp, -mb.seconds_s, mb.bucket.dims, mb.sample_ids))
    free_s = [0.0] * world
    busy_s = [0.0] * world
    placed = []
    for mb in order:
        # Blocks begin together when the last of their ranks is free; the lowest block wins a tie.
        first = min(range(0, world, mb.sp), key=lambda i: max(free_s[i : i + mb.sp]))
        ranks = range(first, first + mb.sp)
        end_s = max(free_s[r] for r in ranks) + mb.seconds_s
        for r in ranks:
            free_s[r] = end_s
            busy_s[r] += mb.seconds_s
        placed.append(
            PlannedMicroBatch(mb.bucket, mb.sp, tuple(ranks), mb.sample_ids, mb.seconds_s)
        )
    return StepPlan(tuple(placed), tuple(busy_s), max(free_s, default=0.0))
