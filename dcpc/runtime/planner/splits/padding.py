"""Samples padded to the longest beside them: DynaPipe's split, of one bucket or of several.

Of one bucket: samples of like length share a micro-batch, which runs at the longest of them. Of
several: where launches cost more than work, a few samples of each of many buckets run faster
together. Then only rows of one rank take part; a sample is padded at most to the longest bucket of
its micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from dcpc.buckets import Bucket, tokens_of
from dcpc.ir import PlanRow
from dcpc.runtime.planner.own_lengths import BatchLengths
from dcpc.runtime.planner.plans import PlannedMicroBatch
from dcpc.runtime.planner.splits.microbatch import FloatArray, IntArray, PaddedCost, microbatch
from dcpc.runtime.planner.table import PlanTable, holds

# A split of more samples takes longer to find than it saves.
MOST_SAMPLES = 512


def share_padding(
    samples: Sequence[tuple[int, Bucket]], table: PlanTable
) -> tuple[PlannedMicroBatch, ...] | None:
    """Returns micro-batches of one rank each, without ranks, of samples of different buckets.

    None where that is not possible: a bucket has no row of one rank, or of two buckets neither
    holds the other.
    """
    present = sorted({table.key(b) for _, b in samples}, key=lambda k: table.buckets[k].shape_key)
    present.sort(key=lambda k: sum(holds(table.buckets[k], table.buckets[j]) for j in present))
    chain = [table.buckets[k] for k in present]
    if len(samples) > MOST_SAMPLES or not all(
        holds(longer, bucket) for bucket, longer in pairwise(chain)
    ):
        return None
    rows = [[row for row in table.rows[k] if row.sp == 1] for k in present]
    if not all(rows):
        return None
    place = {bucket: i for i, bucket in enumerate(chain)}
    cost = _ChainCost(rows, len(samples))
    # As if all ranks were replicas of a pipeline of two stages: the sum of all seconds over the
    # ranks, and once the longest, which is what the last rank may end too late.
    split = microbatch(
        [place[b] + 1 for _, b in samples], cost, 1.0, stages=2, replicas=table.world
    )
    found = []
    for batch, seconds_s in zip(split.batches, split.seconds_s, strict=True):
        longest = max(place[samples[i][1]] for i in batch)
        row = cost.row(longest, len(batch))
        ids = tuple(samples[i][0] for i in batch)
        found.append(
            PlannedMicroBatch(chain[longest], 1, (), ids, seconds_s, row.micro_batch, row.menu_step)
        )
    return tuple(found)


def split_by_length(
    ids: Sequence[int],
    bucket: Bucket,
    rows: Sequence[PlanRow],
    lengths: BatchLengths,
    world: int,
    stages: int = 2,
) -> tuple[PlannedMicroBatch, ...] | None:
    """Returns micro-batches of a bucket, without ranks, each at the length of its longest sample.

    None where there are too many samples. With one stage their seconds in all are least.
    """
    if len(ids) > MOST_SAMPLES:
        return None
    padded = {i: lengths.padded(bucket, [i]) for i in ids}
    ladder = sorted(set(padded.values()), key=lambda dims: (tokens_of(n for _, n in dims), dims))
    most = max(row.micro_batch for row in rows)
    points = [lengths.own.points(bucket, rows, dims, most) for dims in ladder]
    priced = [[replace(rows[0], micro_batch=n, seconds_s=s) for n, s in own] for own in points]
    cost = _ChainCost(priced, len(ids))
    place = {dims: i for i, dims in enumerate(ladder)}
    longest = [place[padded[i]] + 1 for i in ids]
    split = microbatch(longest, cost, 1.0, stages, replicas=world // rows[0].sp)
    found = []
    for batch, seconds_s in zip(split.batches, split.seconds_s, strict=True):
        own = tuple(ids[k] for k in batch)
        row = min((r for r in rows if r.micro_batch >= len(own)), key=lambda r: r.micro_batch)
        found.append(
            PlannedMicroBatch(bucket, row.sp, (), own, seconds_s, row.micro_batch, row.menu_step)
        )
    return tuple(found)


class _ChainCost(PaddedCost):
    """Seconds of n samples of the i-th bucket of a chain, from 1, on the lines between its rows."""

    def __init__(self, rows: Sequence[Sequence[PlanRow]], most: int) -> None:
        self._rows = [sorted(own, key=lambda r: (r.micro_batch, r.seconds_s)) for own in rows]
        self._most = np.array([own[-1].micro_batch for own in self._rows])
        self._seconds = np.empty((len(rows), most + 1))
        for i, own in enumerate(self._rows):
            at = [0, *(r.micro_batch for r in own)]
            value = [0.0, *(r.seconds_s for r in own)]
            slope = (value[-1] - value[-2]) / (at[-1] - at[-2])
            beyond = max(most, at[-1]) + 1  # of no use, but the search is quick on even costs
            at.append(beyond)
            value.append(value[-1] + slope * (beyond - at[-2]))
            self._seconds[i] = np.interp(np.arange(most + 1), at, value)

    def seconds(self, count: IntArray, longest: IntArray) -> FloatArray:
        """Forward and backward; arguments broadcast."""
        found: FloatArray = self._seconds[longest - 1, count]
        return found

    def peak_bytes(self, count: IntArray, longest: IntArray) -> FloatArray:
        """2 where no row has so many samples, else 1, the limit: memory is in the rows."""
        found: FloatArray = np.where(count <= self._most[longest - 1], 1.0, 2.0)
        return found

    def row(self, longest: int, count: int) -> PlanRow:
        """Returns the smallest row that holds so many samples."""
        return next(r for r in self._rows[longest] if r.micro_batch >= count)
