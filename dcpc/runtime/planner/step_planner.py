"""From a global batch to a `StepPlan`, in each mode.

    intra   the bucket's own setting; the loader gives batches of one bucket
    inter   each bucket's own setting, buckets mixed, dealt longest first
    auto    any row for any micro-batch: the best of several kinds of plan
    evolve  the same; where samples are packed, the search goes on while there is time

For "auto" the candidates are each bucket's cheapest rows dealt longest first, the same with faster
rows where a bucket would take too long, the best of these and the rows of fewest rank-seconds
fitted to end together (`fit.py`), and those with the degree of one bucket changed at a time. They
are compared by when the last rank ends, run without barriers; a later candidate, which has more
variants, has to gain; the search ends where the lower bound leaves nothing to gain.

Pure: equal arguments give equal plans.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain
from math import inf

from dcpc.buckets import Bucket
from dcpc.errors import PlanError
from dcpc.ir import PlanRow
from dcpc.ir.thresholds import OTHER_KIND_GAIN
from dcpc.runtime.planner.bound import StepBound, step_bound
from dcpc.runtime.planner.deal import Price, assign, cuts, deal
from dcpc.runtime.planner.fit import fitted
from dcpc.runtime.planner.own_lengths import BatchLengths
from dcpc.runtime.planner.packed.bins import PackedPrices, plan_packed
from dcpc.runtime.planner.packed.bins import Rows as PackedRows
from dcpc.runtime.planner.plans import (
    FREE_MODES,
    Mode,
    PlannedMicroBatch,
    StepPlan,
    better,
    step_plan,
)
from dcpc.runtime.planner.speeds import power, speeds_text
from dcpc.runtime.planner.splits.padding import share_padding, split_by_length
from dcpc.runtime.planner.table import PlanTable

# A sample may take this share of the least possible step before a faster row is tried for it.
_SHARES = (1.0, 0.7, 0.5, 0.35, 0.25)
# Micro-batches of a rank's share of the step, see `cuts`.
_PIECES = (2 / 3, 1, 1.5, 2, 4)
# Rounds of changing the degree of one bucket at a time, and buckets that are tried.
_CLIMBS, _CLIMBED = 2, 6

Ids = tuple[int, ...]
Rows = tuple[tuple[int, PlanRow], ...]  # of each bucket, by its number in the table


@dataclass(frozen=True, slots=True)
class Allowed:
    """Limits of a step's micro-batches.

    Attributes:
        least: minimum micro-batches of the rank with most: a batch is enlarged until it has them.
        most: maximum: a batch is cut until it has no more; 0: any number.
        pads: whether "auto" may pad samples to longer buckets than their own.
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
    lengths: BatchLengths | None = None,
) -> StepPlan:
    """Returns the plan of a global batch, every sample in exactly one micro-batch.

    Args:
        samples: id and bucket of each sample.
        table: the rows to choose from; for "intra" and "inter" the first of each bucket is taken.
        mode: mode of the planner, see the module.
        allowed: limits of the step; micro-batches are limited where some candidate keeps it.
        lengths: lengths that samples are padded to; None: their buckets'.

    Raises:
        PlanError: no samples, or a bucket that is not in the table.
    """
    allowed = allowed or Allowed()
    if not samples:
        raise PlanError("the global batch: got 0 samples, expected at least 1; fill the batch")
    if lengths is not None:
        samples = lengths.ordered(samples)
    bound = _bound(samples, table, allowed.pads, lengths)
    if mode in FREE_MODES:
        found = _auto(samples, table, allowed.pads, bound.seconds_s, lengths)
        best = _best(map(partial(_timed, table), found), allowed, bound.seconds_s)
    elif lengths is not None:
        present = sorted({table.key(bucket) for _, bucket in samples})
        found = _Tried(samples, table, False, lengths).plans(
            tuple((k, table.rows[k][0]) for k in present)
        )
        best = _best(map(partial(_timed, table), found), allowed, bound.seconds_s)
    else:
        rows = _first_rows(table)
        best = _timed(table, deal(samples, rows, table.world, allowed.most, table.speeds))
    if lengths is not None and mode in FREE_MODES and not table.block and not allowed.most:
        cut = [part for mb in best.micro_batches for part in _cut(mb, table, lengths)]
        best = min(best, step_plan(cut, table.world), key=lambda plan: plan.makespan_s)
    bound_s = min(bound.seconds_s, best.makespan_s)  # but for rounding it is
    named = replace(best, bound_s=bound_s, mode=mode, table=table.hash, speeds=table.speeds)
    return replace(named, binds=_binds(named, bound.work_s))


def plan_rows(
    sequences: Sequence[tuple[int, int]],
    table: PlanTable,
    prices: PackedPrices,
    bucket: Bucket | None = None,
    mode: Mode = "auto",
    turns: Iterable[int] = (),
) -> tuple[StepPlan, PackedRows]:
    """Returns the plan of a global batch whose rows hold several sequences, and its rows.

    The plan's sample ids are numbers of rows. All modes choose among the table's rows.

    Args:
        sequences: id and tokens of each sequence.
        table: the rows to choose from.
        prices: seconds of micro-batches.
        bucket: the only one to use; None: any.
        mode: name for the plan.
        turns: turns of a search that goes on from the plan without any: 0, 1, ...; equal turns find
            equal plans, and more of them none that ends later.

    Raises:
        PlanError: no sequences, or one that is longer than every bucket.
    """
    if not sequences:
        raise PlanError("the global batch: got 0 sequences, expected at least 1; fill the batch")
    keys = range(len(table.buckets)) if bucket is None else [table.key(bucket)]
    found = [
        (packed, assign(packed.micro_batches, table.world, table.speeds) if table.speeds
         else step_plan(packed.micro_batches, table.world, table.block))
        for packed in plan_packed(sequences, table, keys, prices, turns)
    ]  # fmt: skip
    packed, best = min(found, key=lambda plan: plan[1].makespan_s)
    bound_s = min(packed.bound_s, best.makespan_s)
    named = replace(best, bound_s=bound_s, mode=mode, table=table.hash, speeds=table.speeds)
    return replace(named, binds=_binds(named, packed.work_s)), packed.rows


def _cut(mb: PlannedMicroBatch, table: PlanTable, lengths: BatchLengths) -> list[PlannedMicroBatch]:
    """Returns a micro-batch in parts of like length, where these take less together."""
    if len(mb.sample_ids) == 1:
        return [mb]
    rows = [row for row in table.rows[table.key(mb.bucket)] if row.sp == mb.sp]
    split = split_by_length(mb.sample_ids, mb.bucket, rows, lengths, mb.sp, stages=1) or ()
    parts = [lengths.at_length(part, table.row_of(part)) for part in split]
    whole_s = lengths.at_length(mb, table.row_of(mb)).seconds_s  # on a rank of speed 1
    if not parts or sum(part.seconds_s for part in parts) >= whole_s:
        return [mb]
    slower = mb.seconds_s / whole_s
    return [replace(p, ranks=mb.ranks, seconds_s=p.seconds_s * slower) for p in parts]


def _bound(
    samples: Sequence[tuple[int, Bucket]],
    table: PlanTable,
    pads: bool,
    lengths: BatchLengths | None,
) -> StepBound:
    keys = [table.key(bucket) for _, bucket in samples]
    if lengths is None:
        return step_bound(keys, table, pads)
    alone = [lengths.padded(bucket, [i]) for i, bucket in samples]
    return step_bound(keys, table, pads, alone, lengths.own)


def _best(candidates: Iterator[StepPlan], allowed: Allowed, bound_s: float) -> StepPlan:
    """Returns the plan that ends first, an earlier candidate if it is nearly as good."""
    best = next(candidates)
    for plan in candidates:
        if better(plan, best, allowed.most, OTHER_KIND_GAIN):
            best = plan
        if allowed.holds(best) and best.makespan_s * (1 - OTHER_KIND_GAIN) <= bound_s:
            break  # no plan gains enough
    return best


def _timed(table: PlanTable, plan: StepPlan) -> StepPlan:
    """Returns a plan with its seconds as ranks run: free of each other, or in rounds."""
    if not table.block:
        return plan
    return step_plan(plan.micro_batches, table.world, table.block)


def _first_rows(table: PlanTable) -> dict[Bucket, PlanRow]:
    return {bucket: own[0] for bucket, own in zip(table.buckets, table.rows, strict=True)}


def _auto(
    samples: Sequence[tuple[int, Bucket]],
    table: PlanTable,
    pads: bool,
    bound_s: float,
    lengths: BatchLengths | None,
) -> Iterator[StepPlan]:
    keys = [table.key(bucket) for _, bucket in samples]
    present = sorted(set(keys))
    least = {k: min(table.rows[k], key=lambda row: row.rank_seconds) for k in present}
    tried = _Tried(samples, table, pads, lengths)
    samples_s = [sum(tried.samples_s(table.buckets[k], row)) for k, row in least.items()]
    floor_s = sum(samples_s) / power(table.speeds, table.world)
    for share in (inf, *_SHARES):
        limit_s = share * floor_s
        rows = tuple((k, _row_within(table.rows[k], limit_s)) for k in present)
        yield from tried.plans(rows)
    settings, speeds = tried.settings(tuple(least.items())), table.speeds
    cut = cuts(samples, settings, table.world, tried.price, speeds=speeds, each=tried.each)
    coarse = next(cut)
    for start in (coarse, tried.best):
        yield fitted(start, table, tried.price, bound_s)
    for _ in range(_CLIMBS):
        best = min(tried.ends_s, key=lambda rows: tried.ends_s[rows])
        for rows in _neighbours(best, table):
            yield from tried.plans(rows)
        if tried.ends_s[best] == min(tried.ends_s.values()):
            return


class _Tried:
    """Plans of the rows that were tried for each bucket.

    Attributes:
        ends_s: function from some rows to the end of their best plan.
        best: the plan that ends first.
    """

    best: StepPlan

    def __init__(
        self,
        samples: Sequence[tuple[int, Bucket]],
        table: PlanTable,
        pads: bool,
        lengths: BatchLengths | None,
    ) -> None:
        self._samples, self._table, self._pads = samples, table, pads
        self._lengths = lengths
        self._run = cache(table.run)
        self._known: dict[tuple[Bucket, int, Ids, Ids], PlannedMicroBatch] = {}
        self._of_bucket: dict[Bucket, list[int]] = {}
        for sample_id, bucket in samples:
            self._of_bucket.setdefault(bucket, []).append(sample_id)
        self.samples_s = cache(self._samples_s)
        self.each = None if lengths is None else self.samples_s
        self.ends_s: dict[Rows, float] = {}
        self._splits: dict[tuple[Bucket, int], tuple[PlannedMicroBatch, ...] | None] = {}

    def price(self, mb: PlannedMicroBatch) -> PlannedMicroBatch:
        """Returns a micro-batch on its degree's smallest row that holds it, with its seconds."""
        key = mb.bucket, mb.sp, mb.ranks, mb.sample_ids
        found = self._known.get(key)
        if found is None:
            row, seconds_s = self._run(mb.bucket, mb.sp, len(mb.sample_ids))
            found = PlannedMicroBatch(
                *(mb.bucket, mb.sp, mb.ranks, mb.sample_ids), seconds_s, row.micro_batch,
                row.menu_step,
            )  # fmt: skip
            if self._lengths is not None:
                found = self._lengths.at_length(found, row)
            self._known[key] = found
        return found

    def _samples_s(self, bucket: Bucket, row: PlanRow) -> list[float]:
        """Rank-seconds of each sample of a bucket in a full micro-batch of its own length."""
        ids = self._of_bucket[bucket]
        if self._lengths is None:
            return [row.rank_seconds] * len(ids)
        padded = [self._lengths.padded(bucket, [i]) for i in ids]
        full_s = {
            dims: self._lengths.own.seconds_s(bucket, row, dims, row.micro_batch)
            for dims in dict.fromkeys(padded)
        }
        return [full_s[dims] * row.sp / row.micro_batch for dims in padded]

    def settings(self, rows: Rows) -> dict[Bucket, PlanRow]:
        """Returns the setting of each bucket."""
        return {self._table.buckets[k]: row for k, row in rows}

    def plans(self, rows: Rows) -> Iterator[StepPlan]:
        """Yields plans with these rows, nothing if they were tried before."""
        if rows in self.ends_s:
            return
        self.ends_s[rows] = inf
        settings = self.settings(rows)
        world, speeds = self._table.world, self._table.speeds
        cut = cuts(self._samples, settings, world, self.price, _PIECES, speeds, self.each)
        split = self._split(settings)
        for plan in chain([] if split is None else [assign(split, world, speeds)], cut):
            if plan.makespan_s < min(self.ends_s.values()):
                self.best = plan
            self.ends_s[rows] = min(self.ends_s[rows], plan.makespan_s)
            yield plan
        if self._pads:
            yield from _padded(self._samples, settings, self._table, self.price, self._lengths)

    def _split(self, settings: Mapping[Bucket, PlanRow]) -> list[PlannedMicroBatch] | None:
        """Returns micro-batches of samples of like length; None: all are padded to buckets."""
        if self._lengths is None:
            return None
        found: list[PlannedMicroBatch] = []
        for bucket, ids in self._of_bucket.items():
            sp = settings[bucket].sp
            if (bucket, sp) not in self._splits:
                own = [r for r in self._table.rows[self._table.key(bucket)] if r.sp == sp]
                self._splits[bucket, sp] = split_by_length(
                    ids, bucket, own, self._lengths, self._table.world
                )
            split = self._splits[bucket, sp]
            if split is None:
                return None
            found += split
        return [self.price(mb) for mb in found]


def _neighbours(rows: Rows, table: PlanTable) -> Iterator[Rows]:
    """Yields the same rows but for one bucket, buckets with the longest samples first."""
    longest = sorted(rows, key=lambda pair: -pair[1].seconds_s / pair[1].micro_batch)
    for key, own in longest[:_CLIMBED]:
        for sp in sorted({row.sp for row in table.rows[key]} - {own.sp}):
            of_degree = [row for row in table.rows[key] if row.sp == sp]
            other = min(of_degree, key=lambda row: (row.rank_seconds, row.micro_batch))
            yield tuple((k, other if k == key else row) for k, row in rows)


def _padded(
    samples: Sequence[tuple[int, Bucket]],
    settings: Mapping[Bucket, PlanRow],
    table: PlanTable,
    price: Price,
    lengths: BatchLengths | None,
) -> Iterator[StepPlan]:
    """Yields the same plans with the samples that run on one rank padded together."""
    single = [sample for sample in samples if settings[sample[1]].sp == 1]
    together = share_padding(single, table) if single else None
    if together is not None:
        if lengths is not None:
            together = tuple(lengths.at_length(mb, table.row_of(mb)) for mb in together)
        wide = [sample for sample in samples if settings[sample[1]].sp > 1]
        for plan in cuts(wide, settings, table.world, price, _PIECES, table.speeds):
            anew = [price(mb) for mb in plan.micro_batches]  # seconds of the fastest rank
            yield assign([*anew, *together], table.world, table.speeds)


def _row_within(rows: Sequence[PlanRow], limit_s: float) -> PlanRow:
    """Returns the row of least rank-seconds that ends in time with room to spare, else the fastest.

    Of rows within 5% the smallest micro-batch on the fewest ranks, which leaves most to balance.
    """
    quick = [row for row in rows if row.seconds_s / row.micro_batch <= limit_s]
    if not quick:
        return min(rows, key=lambda row: row.seconds_s / row.micro_batch)
    least_s = min(row.rank_seconds for row in quick)
    worthy = [row for row in quick if row.rank_seconds <= 1.05 * least_s]
    return min(worthy, key=lambda row: (row.sp, row.micro_batch, row.menu_step))


def _binds(plan: StepPlan, floor_s: float) -> str:
    """Returns a sentence: the least work, the longest sample, and how busy the ranks are."""
    longest = max(plan.micro_batches, key=lambda mb: mb.seconds_s)
    whose = (
        f"every rank, by its speed of {speeds_text(plan.speeds)}" if plan.speeds else "every rank"
    )
    work = f"work at its cheapest takes {floor_s:.3g} s of {whose}"
    if plan.bound_s > 1.02 * floor_s:
        work += f", the longest samples force {plan.bound_s:.3g} s"
    price = f", {plan.makespan_s / plan.free_s - 1:.1%} of it for rounds" if plan.block else ""
    return (
        f"{work}; ranks idle {plan.imbalance:.1%} of {plan.makespan_s:.3g} s{price}; the longest "
        f"micro-batch, {len(longest.sample_ids)} of {longest.bucket} at sp={longest.sp}, takes "
        f"{longest.seconds_s:.3g} s"
    )
