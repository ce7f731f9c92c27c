"""Micro-batches at the length of their longest sample, in place of their bucket's.

A bucket says how a micro-batch is run: degree, recompute and placement, within the bucket's memory.
Its graphs are right at any lengths down to those of its trace's smallest bucket, so samples need no
padding to the bucket; they are padded to the longest beside them, or to the next multiple of a
number. Where the trace holds for the bucket's lengths alone, padding stays.

Samples of like length go together: within a bucket they are dealt longest first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from dcpc.buckets import Bucket, Sizes, tokens_of
from dcpc.ir import PlanRow
from dcpc.runtime.planner.plans import PlannedMicroBatch

# Seconds are predicted at every so manieth part of a bucket's lengths.
_PARTS = 32

Dims = tuple[tuple[str, int], ...]
RunsAt = Callable[[Bucket, Sizes], bool]
SecondsAt = Callable[[Bucket, PlanRow, Sizes, int], float]


@dataclass(slots=True)
class OwnLengths:
    """Lengths that samples are padded to, and the seconds at these lengths.

    Attributes:
        runs_at: function that tells whether a bucket's graphs are right at some lengths.
        seconds_at: function that predicts a row's seconds for some samples at some lengths; None:
            those of as many full samples of the bucket.
        least: function from a bucket to the shortest lengths of its graphs.
        multiple: divisor of the lengths, as far as the bucket has room.
    """

    runs_at: RunsAt
    seconds_at: SecondsAt | None
    least: Callable[[Bucket], Sizes]
    multiple: int = 1
    _padded: dict[tuple[Bucket, Dims], Dims] = field(default_factory=dict, init=False)
    _shares: dict[tuple[Bucket, PlanRow, Dims, int], float] = field(
        default_factory=dict, init=False
    )

    def padded(self, bucket: Bucket, dims: Dims) -> Dims:
        """Returns the lengths at which samples of at most these lengths are run."""
        key = bucket, dims
        if key not in self._padded:
            self._padded[key] = self._found(bucket, dict(dims))
        return self._padded[key]

    def _found(self, bucket: Bucket, dims: Sizes) -> Dims:
        """Returns the least lengths from these on with right graphs; one dim is searched."""
        most, least, step = bucket.shape_key, self.least(bucket), self.multiple
        found = {n: min(size, max(least[n], -(-dims[n] // step) * step)) for n, size in most}
        if len(found) == 1:
            ((name, first),) = found.items()
            for length in range(first, bucket[name], step):
                if self.runs_at(bucket, {name: length}):
                    return ((name, length),)
            return most
        return tuple(sorted(found.items())) if self.runs_at(bucket, found) else most

    def seconds_s(self, bucket: Bucket, row: PlanRow, dims: Dims, count: int) -> float:
        """Returns the seconds of a micro-batch, on a line between one sample and the row's most."""
        full_s = row.seconds_s * self._share(bucket, row, dims, row.micro_batch)
        if count == row.micro_batch:
            return full_s
        one_s = row.seconds_s * self._share(bucket, row, dims, 1)
        return one_s + (full_s - one_s) * (count - 1) / (row.micro_batch - 1)

    def uniform_s(self, bucket: Bucket, row: PlanRow, length: int, count: int) -> float:
        """Returns the seconds of sequences of one length, of a bucket of one named dim.

        Args:
            bucket: bucket of the row.
            row: row that runs them: it may have fewer sequences, of as many tokens in all.
            length: tokens of each sequence.
            count: number of sequences.
        """
        ((name, most),) = bucket.shape_key
        if self.seconds_at is None:
            return row.seconds_s * count * length / (row.micro_batch * most)
        return row.seconds_s * self._known_share(bucket, row, ((name, length),), count)

    def points(
        self, bucket: Bucket, rows: Sequence[PlanRow], dims: Dims, most: int
    ) -> list[tuple[int, float]]:
        """Returns samples and seconds of micro-batches of some lengths, ascending, on rows.

        One sample, as many as each row takes, and as many as there are.
        """
        ascending = sorted(rows, key=lambda row: (row.micro_batch, row.seconds_s))
        found: dict[int, float] = {}
        for row in ascending:
            for count in (*([] if found else [1]), min(row.micro_batch, most)):
                found.setdefault(count, self.seconds_s(bucket, row, dims, count))
        return sorted(found.items())

    def _share(self, bucket: Bucket, row: PlanRow, dims: Dims, count: int) -> float:
        """Returns the fraction of the row's seconds for some samples at these lengths, up to 1.

        With one dim it lies on the line between two lengths whose seconds are known; with several
        it is that of the next larger ones.
        """
        if self.seconds_at is None:
            return count / row.micro_batch
        grid = [(n, self._grid(bucket[n], size)) for n, size in dims]
        share = self._known_share(bucket, row, tuple((n, at[-1]) for n, at in grid), count)
        if len(grid) == 1:
            ((name, (before, after)),) = grid
            if before < after:
                less = self._known_share(bucket, row, ((name, before),), count)
                share -= (share - less) * (after - dims[0][1]) / (after - before)
        return min(1.0, share)

    @staticmethod
    def _grid(most: int, length: int) -> tuple[int, int]:
        """Returns the lengths around one at which seconds are predicted, for a bucket's length."""
        part = max(1, -(-most // _PARTS))
        after = min(most, -(-length // part) * part)
        return min(after, max(1, (length // part) * part)), after

    def _known_share(self, bucket: Bucket, row: PlanRow, dims: Dims, count: int) -> float:
        assert self.seconds_at is not None
        key = bucket, row, dims, count
        if key not in self._shares:
            full_s = self.seconds_at(bucket, row, bucket.sizes, row.micro_batch)
            own_s = self.seconds_at(bucket, row, dict(dims), count)
            self._shares[key] = own_s / full_s if full_s > 0 else 1.0
        return self._shares[key]


@dataclass(frozen=True, slots=True)
class BatchLengths:
    """The lengths of a global batch's samples.

    Attributes:
        own: lengths that they are padded to.
        dims: sample id -> its lengths.
    """

    own: OwnLengths
    dims: Mapping[int, Dims]

    def ordered(self, samples: Sequence[tuple[int, Bucket]]) -> list[tuple[int, Bucket]]:
        """Returns samples, those of a bucket longest first."""

        def size(sample: tuple[int, Bucket]) -> tuple[int, Dims]:
            dims = self.padded(sample[1], [sample[0]])
            return -tokens_of(n for _, n in dims), dims

        return sorted(samples, key=size)

    def padded(self, bucket: Bucket, ids: Sequence[int]) -> Dims:
        """Returns the lengths at which some samples of a bucket are run together."""
        longest: dict[str, int] = {}
        for i in ids:
            for name, size in self.dims[i]:
                longest[name] = max(size, longest.get(name, 0))
        return self.own.padded(bucket, tuple(sorted(longest.items())))

    def at_length(self, mb: PlannedMicroBatch, row: PlanRow) -> PlannedMicroBatch:
        """Returns a micro-batch at the lengths of its samples, with its seconds there."""
        dims = self.padded(mb.bucket, mb.sample_ids)
        seconds_s = self.own.seconds_s(mb.bucket, row, dims, len(mb.sample_ids))
        return replace(mb, dims=() if dims == mb.bucket.shape_key else dims, seconds_s=seconds_s)
