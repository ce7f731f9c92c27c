"""The sizes at which a trace is compared with the plain model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from dcpc.buckets import BATCH, Bucket, Buckets
from dcpc.trace.capture.dims import named_dims

# Where a trace's own lengths are too long to be run in a moment, it is compared at such ones too:
# what agrees there is right there, what does not says nothing, as the trace was promised more.
TINY = 5


@dataclass(frozen=True, slots=True, eq=False)
class Point:
    """One shape to compare at.

    Attributes:
        sizes: length of every dim, batch included.
        promised: whether the trace is for such lengths, so that a difference is an error.
        extra: whether it is only tried where there is time to spare.
    """

    sizes: Mapping[str, int]
    promised: bool = True
    extra: bool = False

    @property
    def lone(self) -> bool:
        """Whether it has one sample, as micro-batches of long buckets have."""
        return self.sizes.get(BATCH, 1) == 1

    def __str__(self) -> str:
        return f"{{{', '.join(f'{n}: {s}' for n, s in self.sizes.items())}}}"


def points(buckets: Buckets, hints: Mapping[str, int]) -> list[Point]:
    """Returns shapes to compare at, those that say most first.

    Near the smallest bucket with other lengths than in the trace; that bucket itself with one
    sample; lengths far below; every other bucket, small ones first.

    Args:
        buckets: that share the trace.
        hints: sizes of the trace.
    """
    smallest, *others = sorted(buckets, key=lambda b: math.prod(n for _, n in b.shape_key))
    found = [
        Point(_near(buckets, smallest, hints)),
        Point(_with_batch(buckets, smallest, 1)),
        Point(_tiny(buckets, smallest), promised=False),
        *(Point(_with_batch(buckets, b, 2), extra=True) for b in others),
    ]
    unique = {tuple(sorted(p.sizes.items())): p for p in reversed(found)}
    return [p for p in found if unique[tuple(sorted(p.sizes.items()))] is p]


def _with_batch(buckets: Buckets, bucket: Bucket, batch: int) -> dict[str, int]:
    given = {BATCH: bucket.batch or batch} if BATCH in buckets.names else {}
    return {**dict(bucket.shape_key), **given}


def _near(buckets: Buckets, smallest: Bucket, hints: Mapping[str, int]) -> dict[str, int]:
    """Returns lengths near the smallest bucket's, of the other parity, none as in the trace."""
    dims = named_dims(buckets)
    found = _with_batch(buckets, smallest, 2)
    for name, size in found.items():
        if name == BATCH or name not in dims:
            continue
        low, high = dims[name].min, dims[name].max
        shifts = (1, -1, 3, -3, 2, -2)
        around = [size + k for k in shifts if max(low, 2) <= size + k <= high]
        found[name] = next((n for n in around if n != hints.get(name)), size)
    return found


def _tiny(buckets: Buckets, smallest: Bucket) -> dict[str, int]:
    found = _with_batch(buckets, smallest, 2)
    lengths = [n for n, s in found.items() if n != BATCH and s > 4 * TINY]
    return {**found, **{n: TINY + 2 * k for k, n in enumerate(lengths)}}
