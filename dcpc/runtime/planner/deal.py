"""Deals a global batch out to the ranks: which samples form a micro-batch, and who runs it when.

Longest first: the widest micro-batches go first, then the longest ones, each to the block of ranks
that is free earliest. Blocks of one degree begin at its multiples.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from dcpc.buckets import Bucket
from dcpc.errors import PlanError
from dcpc.ir import PlanRow
from dcpc.ir.thresholds import FINER_CUT_GAIN
from dcpc.runtime.planner.plans import PlannedMicroBatch, StepPlan, better, step_plan
from dcpc.runtime.planner.speeds import Speeds, power, slowness

_PIECES = (1, 2, 4)

Price = Callable[[PlannedMicroBatch], PlannedMicroBatch]
SampleSeconds = Callable[[Bucket, PlanRow], Sequence[float]]


def deal(
    samples: Iterable[tuple[int, Bucket]],
    plans: Mapping[Bucket, PlanRow],
    world: int,
    most: int = 0,
    speeds: Speeds = (),
) -> StepPlan:
    """Returns a plan in which every sample is in exactly one micro-batch.

    Micro-batches have at most `PlanRow.micro_batch` samples; those of one bucket differ by at
    most one sample. Pure: equal arguments give equal plans on every rank.

    Args:
        samples: sample id and bucket of each sample of the global batch.
        plans: row of each bucket; `sp` divides `world`.
        world: number of ranks.
        most: maximum of a rank's micro-batches, if that can be kept; 0: any number.
        speeds: speed of each rank; none: equal.

    Raises:
        PlanError: a bucket has no plan, or its `sp` does not divide `world`.
    """
    samples = list(samples)
    for bucket in dict.fromkeys(bucket for _, bucket in samples):
        _check(bucket, plans, world)
    best: StepPlan | None = None
    for plan in cuts(samples, plans, world, speeds=speeds):
        if best is None or better(plan, best, most, FINER_CUT_GAIN):
            best = plan
    assert best is not None, "there is a first candidate"
    return best


def cuts(
    samples: Sequence[tuple[int, Bucket]],
    plans: Mapping[Bucket, PlanRow],
    world: int,
    price: Price | None = None,
    pieces: Sequence[float] = _PIECES,
    speeds: Speeds = (),
    each: SampleSeconds | None = None,
) -> Iterator[StepPlan]:
    """Yields plans of ever finer micro-batches, the coarsest that fits memory first.

    Args:
        samples: id and bucket of each sample.
        plans: row of each bucket.
        world: number of ranks.
        price: function that returns a micro-batch on its row, with its seconds; None: the bucket's
            plan, and its seconds in proportion to the samples.
        pieces: numbers of micro-batches to cut a rank's share of the step into, in turn.
        speeds: speed of each rank; none: equal.
        each: rank-seconds by a row of every sample of a bucket, in order, the longest first; None:
            samples of a bucket cost alike.
    """
    by_bucket: dict[Bucket, list[int]] = {}
    for sample_id, bucket in samples:
        by_bucket.setdefault(bucket, []).append(sample_id)
    ranks = power(speeds, world)
    each_s = {} if each is None else {b: each(b, plans[b]) for b in by_bucket}
    total_s = sum(
        (len(ids) * _sample_s(plans[b]) * plans[b].sp if each is None else sum(each_s[b])) / ranks
        for b, ids in by_bucket.items()
    )
    for limit_s in (float("inf"), *(total_s / n for n in pieces)):
        cut = [
            mb
            for b, ids in by_bucket.items()
            for mb in (
                _cut(b, ids, plans[b], limit_s)
                if each is None
                else _cut_by_length(b, ids, plans[b], limit_s, each_s[b])
            )
        ]
        yield assign([price(mb) for mb in cut] if price else cut, world, speeds)


def _check(bucket: Bucket, plans: Mapping[Bucket, PlanRow], world: int) -> None:
    plan = plans.get(bucket)
    if plan is None:
        raise PlanError(
            f"bucket {bucket}: got no plan; expected one of "
            f"{', '.join(map(str, plans)) or 'no buckets at all'}; compile for this bucket"
        )
    check_setting(bucket, plan, world)


def check_setting(bucket: Bucket, plan: PlanRow, world: int) -> None:
    """Refuses a setting that this world cannot run in aligned blocks.

    Raises:
        PlanError: its `sp` does not divide `world`, or it has no samples.
    """
    if plan.sp < 1 or world % plan.sp or plan.micro_batch < 1:
        raise PlanError(
            f"bucket {bucket}: got sp={plan.sp}, micro_batch={plan.micro_batch} for {world} "
            "ranks; expected an sp that divides the ranks and at least one sample; plan for this "
            "world size"
        )


def _sample_s(plan: PlanRow) -> float:
    return plan.seconds_s / plan.micro_batch


def _cut(
    bucket: Bucket, ids: Sequence[int], plan: PlanRow, limit_s: float
) -> list[PlannedMicroBatch]:
    """Returns the fewest micro-batches within memory and `limit_s` seconds each, without ranks."""
    sample_s = _sample_s(plan)
    most = plan.micro_batch
    if sample_s > 0 and limit_s < most * sample_s:
        most = max(1, int(limit_s / sample_s))
    count = -(-len(ids) // most)
    ends = [len(ids) * (i + 1) // count for i in range(count)]
    return [
        PlannedMicroBatch(
            bucket,
            plan.sp,
            (),
            tuple(ids[a:b]),
            (b - a) * sample_s,
            plan.micro_batch,
            plan.menu_step,
        )
        for a, b in zip([0, *ends], ends, strict=False)
    ]


def _cut_by_length(
    bucket: Bucket, ids: Sequence[int], plan: PlanRow, limit_s: float, each_s: Sequence[float]
) -> list[PlannedMicroBatch]:
    """Returns micro-batches within memory and `limit_s`, each padded to its first sample."""
    found = []
    begin = 0
    while begin < len(ids):
        first_s = each_s[begin] / plan.sp
        within = (
            int(limit_s / first_s) if first_s * plan.micro_batch > limit_s else plan.micro_batch
        )
        own = tuple(ids[begin : begin + max(1, within)])
        found.append(
            PlannedMicroBatch(
                bucket, plan.sp, (), own, len(own) * first_s, plan.micro_batch, plan.menu_step
            )
        )
        begin += len(own)
    return found


def assign(cut: Sequence[PlannedMicroBatch], world: int, speeds: Speeds = ()) -> StepPlan:
    """Returns the plan that puts each micro-batch on the block that ends it earliest.

    Where ranks are equal that is the block that is free earliest.
    """
    order = sorted(cut, key=lambda mb: (-mb.sp, -mb.seconds_s, mb.bucket.dims, mb.sample_ids))
    if speeds:
        return _assigned_by_speed(order, world, speeds)
    free_s, busy_s = [0.0] * world, [0.0] * world
    placed = []
    for sp, of_degree in groupby(order, key=lambda mb: mb.sp):
        # Blocks begin together when the last of their ranks is free; the lowest block wins a tie.
        starts = range(0, world - sp + 1, sp)
        heap = [(max(free_s[i : i + sp]), i) for i in starts]
        heapq.heapify(heap)
        used = {}
        for mb in of_degree:
            begin_s, first = heap[0]
            used[first] = begin_s + mb.seconds_s
            heapq.heapreplace(heap, (used[first], first))
            ranks = tuple(range(first, first + sp))
            placed.append(mb.on(ranks))
            for rank in ranks:
                busy_s[rank] += mb.seconds_s
        for first, end_s in used.items():
            free_s[first : first + sp] = [end_s] * sp
    return StepPlan(tuple(placed), tuple(busy_s), max(free_s))


def _assigned_by_speed(order: Sequence[PlannedMicroBatch], world: int, speeds: Speeds) -> StepPlan:
    """Returns the plan of `assign` for micro-batches in order, on ranks of unequal speed."""
    free_s = [0.0] * world
    placed = []
    for mb in order:
        firsts = range(0, world - mb.sp + 1, mb.sp)
        ends = [
            (
                max(free_s[i : i + mb.sp]) + mb.seconds_s * slowness(speeds, i, mb.sp),
                sum(speeds[i : i + mb.sp]),  # of a tie the slower: faster ranks do more later
                i,
            )
            for i in firsts
        ]
        end_s, _, first = min(ends)
        free_s[first : first + mb.sp] = [end_s] * mb.sp
        placed.append(placed_on(mb, first, speeds))
    return step_plan(placed, world)


def placed_on(mb: PlannedMicroBatch, first: int, speeds: Speeds) -> PlannedMicroBatch:
    """Returns a micro-batch on the ranks from `first` on, with its seconds there."""
    seconds_s = mb.seconds_s * slowness(speeds, first, mb.sp)
    return replace(mb, ranks=tuple(range(first, first + mb.sp)), seconds_s=seconds_s)
