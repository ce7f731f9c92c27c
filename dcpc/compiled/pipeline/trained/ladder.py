"""The lengths of a batch's micro-batches as the planner of schedules takes them: places in a row.

A place is a bucket, or lengths within one: the largest of the bucket's samples up to there, in each
dim. So a sample runs at its own place or a later one of its bucket. Stages are priced at lengths
rounded up to a part of the bucket's, within its memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dcpc.buckets import Bucket, Sizes, tokens_of
from dcpc.runtime.planner.own_lengths import BatchLengths, Dims

PARTS = 16  # of a bucket's lengths: a price at each


@dataclass(frozen=True, slots=True)
class Ladder:
    """The places of a batch's samples.

    Attributes:
        places: place of each sample.
        sizes: lengths of each place, at which its micro-batches are priced.
        homes: number of the bucket of each place.
    """

    places: tuple[int, ...]
    sizes: tuple[Sizes, ...]
    homes: tuple[int, ...]

    @classmethod
    def of(
        cls,
        samples: Sequence[tuple[int, Bucket]],
        buckets: Sequence[Bucket],
        lengths: BatchLengths | None = None,
    ) -> Ladder:
        """Returns the places of samples."""
        numbers = {bucket: n for n, bucket in enumerate(buckets)}
        if lengths is None:
            places = tuple(numbers[bucket] for _, bucket in samples)
            return cls(places, tuple(b.sizes for b in buckets), tuple(range(len(buckets))))
        own = [lengths.padded(bucket, [i]) for i, bucket in samples]
        order = sorted(range(len(samples)), key=lambda k: (
            numbers[samples[k][1]], tokens_of(n for _, n in own[k]), own[k]))  # fmt: skip
        found, steps = [0] * len(samples), list[tuple[int, Dims]]()
        before, reached = None, dict[str, int]()
        for k in order:
            bucket = samples[k][1]
            if bucket != before:
                before, reached = bucket, {}
            reached = {name: max(size, reached.get(name, 0)) for name, size in own[k]}
            step = numbers[bucket], _rounded(bucket, reached)
            if not steps or steps[-1] != step:
                steps.append(step)
            found[k] = len(steps) - 1
        return cls(
            tuple(found), tuple(dict(dims) for _, dims in steps), tuple(home for home, _ in steps)
        )

    def groups(self, most: Sequence[int]) -> dict[int, tuple[int, int]]:
        """Returns place -> its bucket's number, and most samples of a micro-batch of it.

        Args:
            most: largest number of samples of a micro-batch, for each bucket.
        """
        return {place: (home, most[home]) for place, home in enumerate(self.homes)}


def _rounded(bucket: Bucket, sizes: Sizes) -> Dims:
    """Lengths up to the next part of the bucket's."""
    parts = {name: -(-bucket[name] // PARTS) for name in sizes}
    return tuple(
        (name, min(bucket[name], -(-size // parts[name]) * parts[name]))
        for name, size in sorted(sizes.items())
    )
