"""From a global batch to a `StepPlan`, in each mode.

    intra   the bucket's own setting; the loader gives batches of one bucket
    inter   each bucket's own setting, buckets mixed, dealt longest first
    auto    any row for any micro-batch: the best of three kinds of plan

For "auto" the candidates are each bucket's cheapest rows dealt longest first, the same with faster
rows for what would otherwise take too long, the micro-steps of `plan_batch`, their micro-batches
dealt longest first, and what changing the degree of one bucket at a time gains. They are compared
by when the last rank ends, run without barriers; a later candidate, which has more variants, has to
gain; the search ends where the lower bound leaves nothing to gain.

Pure: equal arguments give equal plans.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from math import inf

from dcpc.buckets import Bucket
from dcpc.errors import PlanError
from dcpc.ir import BucketPlan
from dcpc.runtime.deal import Price, assign, cuts, deal
from dcpc.runtime.padding import share_padding
from dcpc.runtime.planner import BatchPlan, Effort, lower_bound, plan_batch, tabulate
from dcpc.runtime.plans import Mode, PlannedMicroBatch, StepPlan, better, step_plan
from dcpc.runtime.table import PlanTable, TableRow

# A plan of another kind must end this much earlier to be taken: it brings more variants.
_GAIN = 0.01
# A sample may take this share of the least possible step before a faster row is tried for it.
_SHARES = (1.0, 0.7, 0.5, 0.35, 0.25)
# Micro-batches of a rank's share of the step, see `cuts`.
_PIECES = (2 / 3, 1, 1.5, 2, 4)
# Rounds of changing the degree of one bucket at a time, and buckets that are tried.
_CLIMBS, _CLIMBED = 2, 6
# Of the micro-steps' search: more finds nothing in batches of a few kinds of sample.
_EFFORT = Effort(packings=10_000, patterns=8)


Rows = tuple[tuple[int, TableRow], ...]  # of each bucket, by its number in the table


@dataclass(frozen=True, slots=True)
class Allowed:
    """What a step may be like.

    Attributes:
        least: micro-batches of the rank with most: a batch is enlarged until there are so many.
        most: a batch is cut until there are no more; 0: any number.
        pads: "auto" may pad samples to longer buckets than their own.
    """

    least: int = 1
    most: int = 0
    pads: bool = False

    def holds(self, plan: StepPlan) -> bool:
        """Whether a plan has no more than `most`."""
        return not 0 < self.most < plan.accumulation


def plan_step(
    samples: Sequence[tuple[int, Bucket]],
    table: PlanTable,
    mode: Mode = "auto",
    allowed: Allowed | None = None,
) -> StepPlan:
    """Returns the plan of a global batch, every sample in exactly one micro-batch.

    Args:
        samples: sample id and bucket of each.
        table: the rows to choose from; for "intra" and "inter" the first of each bucket is taken.
        mode: see the module.
        allowed: what else holds; the number of micro-batches where some candidate keeps it.

    Raises:
        PlanError: no samples, or a bucket that is not in the table.
    """
    allowed = allowed or Allowed()
    if not samples:
        raise PlanError("the global batch: got 0 samples, expected at least 1; fill the batch")
    keys = [table.key(bucket) for _, bucket in samples]
    work = tabulate(keys, table.padded_cost if allowed.pads else table.cost)
    bound_s = lower_bound(work)
    if mode == "auto":
        best = _best(_auto(samples, keys, table, allowed.pads), allowed, bound_s)
    else:
        best = deal(samples, _first_rows(table), table.world, allowed.most)
    bound_s = min(bound_s, best.makespan_s)
    named = replace(best, bound_s=bound_s, mode=mode, table=table.hash)
    return replace(named, binds=_binds(named, float(work.area @ work.counts) / table.world))


def _best(candidates: Iterator[StepPlan], allowed: Allowed, bound_s: float) -> StepPlan:
    """The plan that ends first, an earlier candidate if it is nearly as good."""
    best = next(candidates)
    for plan in candidates:
        if better(plan, best, allowed.most, _GAIN):
            best = plan
        if allowed.holds(best) and best.makespan_s * (1 - _GAIN) <= bound_s:
            break  # no plan gains enough
    return best


def _first_rows(table: PlanTable) -> dict[Bucket, BucketPlan]:
    pairs = zip(table.buckets, table.rows, strict=True)
    return {bucket: _setting(bucket, rows[0]) for bucket, rows in pairs}


def _setting(bucket: Bucket, row: TableRow) -> BucketPlan:
    return BucketPlan(bucket, row.sp, row.micro_batch, row.recompute, 0, row.seconds_s, 0, "")


def _auto(
    samples: Sequence[tuple[int, Bucket]], keys: Sequence[int], table: PlanTable, pads: bool
) -> Iterator[StepPlan]:
    present = sorted(set(keys))
    cheapest = {k: min(_area_s(row) for row in table.rows[k]) for k in present}
    floor_s = sum(cheapest[k] for k in keys) / table.world
    tried: dict[Rows, float] = {}
    price = partial(_priced, cache(table.run))

    def with_rows(rows: Rows) -> Iterator[StepPlan]:
        if rows in tried:
            return
        tried[rows] = inf
        settings = {table.buckets[k]: _setting(table.buckets[k], row) for k, row in rows}
        for plan in cuts(samples, settings, table.world, price, _PIECES):
            tried[rows] = min(tried[rows], plan.makespan_s)
            yield plan
        if pads:
            yield from _padded(samples, settings, table, price)

    for share in (inf, *_SHARES):
        limit_s = share * floor_s
        yield from with_rows(tuple((k, _row_within(table.rows[k], limit_s)) for k in present))
    if not table.aligned:
        steps = _unrolled(samples, plan_batch(keys, table.cost, _EFFORT), table)
        yield steps
        yield assign(steps.micro_batches, table.world)  # no barrier keeps its groups together
    for _ in range(_CLIMBS):
        best = min(tried, key=lambda rows: tried[rows])
        for rows in _neighbours(best, table):
            yield from with_rows(rows)
        if tried[best] == min(tried.values()):
            return


def _priced(
    run: Callable[[Bucket, int, int], tuple[TableRow, float]], mb: PlannedMicroBatch
) -> PlannedMicroBatch:
    """The micro-batch on the smallest row of its degree that holds it."""
    row, seconds_s = run(mb.bucket, mb.sp, len(mb.sample_ids))
    ids = mb.sample_ids
    return PlannedMicroBatch(
        mb.bucket, mb.sp, mb.ranks, ids, seconds_s, row.micro_batch, row.recompute
    )


def _neighbours(rows: Rows, table: PlanTable) -> Iterator[Rows]:
    """The same rows but for one bucket, the buckets with the longest samples first."""
    longest = sorted(rows, key=lambda pair: -pair[1].seconds_s / pair[1].micro_batch)
    for key, own in longest[:_CLIMBED]:
        for sp in sorted({row.sp for row in table.rows[key]} - {own.sp}):
            of_degree = [row for row in table.rows[key] if row.sp == sp]
            other = min(of_degree, key=lambda row: (_area_s(row), row.micro_batch))
            yield tuple((k, other if k == key else row) for k, row in rows)


def _padded(
    samples: Sequence[tuple[int, Bucket]],
    settings: Mapping[Bucket, BucketPlan],
    table: PlanTable,
    price: Price,
) -> Iterator[StepPlan]:
    """The same with the samples that run on one rank padded together."""
    single = [sample for sample in samples if settings[sample[1]].sp == 1]
    together = share_padding(single, table) if single else None
    if together is not None:
        wide = [sample for sample in samples if settings[sample[1]].sp > 1]
        for plan in cuts(wide, settings, table.world, price, _PIECES):
            yield assign([*plan.micro_batches, *together], table.world)


def _area_s(row: TableRow) -> float:
    """Rank-seconds of one sample."""
    return row.seconds_s * row.sp / row.micro_batch


def _row_within(rows: Sequence[TableRow], limit_s: float) -> TableRow:
    """The row of least rank-seconds that ends in time, with room to spare; else the fastest.

    Of rows within 5% the smallest micro-batch on the fewest ranks, which leaves most to balance.
    """
    quick = [row for row in rows if row.seconds_s / row.micro_batch <= limit_s]
    if not quick:
        return min(rows, key=lambda row: row.seconds_s / row.micro_batch)
    least_s = min(map(_area_s, quick))
    worthy = [row for row in quick if _area_s(row) <= 1.05 * least_s]
    return min(worthy, key=lambda row: (row.sp, row.micro_batch, row.recompute))


def _unrolled(
    samples: Sequence[tuple[int, Bucket]], plan: BatchPlan, table: PlanTable
) -> StepPlan:
    """The micro-steps as one global order: every group's runs, step after step."""
    placed = []
    recompute = {
        (key, row.sp, row.micro_batch): row.recompute
        for key, rows in enumerate(table.rows)
        for row in rows
    }
    for group in (g for step in plan.steps for g in step.groups):
        by_key: dict[int, list[int]] = {}
        for position in group.sequences:
            sample_id, bucket = samples[position]
            by_key.setdefault(table.key(bucket), []).append(sample_id)
        for key, ids in by_key.items():
            begin = 0
            for row, count, seconds_s in table.cost.cheapest(key, group.degree, len(ids)):
                placed.append(
                    PlannedMicroBatch(
                        table.buckets[key],
                        group.degree,
                        tuple(group.ranks),
                        tuple(ids[begin : begin + count]),
                        seconds_s,
                        row.micro_batch,
                        recompute[key, group.degree, row.micro_batch],
                    )
                )
                begin += count
    return step_plan(placed, table.world)


def _binds(plan: StepPlan, floor_s: float) -> str:
    """A sentence: the least work there is, the longest sample, and how busy the ranks are."""
    longest = max(plan.micro_batches, key=lambda mb: mb.seconds_s)
    work = f"work at its cheapest takes {floor_s:.3g} s of every rank"
    if plan.bound_s > 1.02 * floor_s:
        work += f", the longest samples force {plan.bound_s:.3g} s"
    return (
        f"{work}; ranks idle {plan.imbalance:.1%} of {plan.makespan_s:.3g} s; the longest "
        f"micro-batch, {len(longest.sample_ids)} of {longest.bucket} at sp={longest.sp}, takes "
        f"{longest.seconds_s:.3g} s"
    )
