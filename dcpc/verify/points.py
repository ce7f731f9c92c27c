"""The sizes at which a trace is compared with the plain model, and the time and room for it."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from dcpc.buckets import BATCH, Bucket, Buckets
from dcpc.ir import Program
from dcpc.trace.capture.dims import named_dims

# Where buckets are longer than a few such lengths, a trace is compared at these too. If it is not
# for them, what agrees there is right there, and what does not says nothing.
TINY = 5
LEAST_ROOM_BYTES = 1 << 26


@dataclass(frozen=True, slots=True, eq=False)
class Point:
    """One shape to compare at.

    Attributes:
        sizes: length of every dim, batch included.
        promised: whether the trace is for such lengths, so that a difference is an error.
        extra: whether it is only tried where there is time to spare.
        short: whether its lengths are the shortest ones that say enough.
    """

    sizes: Mapping[str, int]
    promised: bool = True
    extra: bool = False
    short: bool = False

    @property
    def lone(self) -> bool:
        """Whether it has one sample, as micro-batches of long buckets have."""
        return self.sizes.get(BATCH, 1) == 1

    def __str__(self) -> str:
        return f"{{{', '.join(f'{n}: {s}' for n, s in self.sizes.items())}}}"


def points(buckets: Buckets, program: Program) -> list[Point]:
    """Returns shapes to compare at, the most telling first.

    Near the smallest bucket with other lengths than in the trace; that bucket itself with one
    sample; lengths far below; every other bucket, small ones first.
    """
    hints = program.hints
    smallest, *others = sorted(buckets, key=lambda b: math.prod(n for _, n in b.shape_key))
    found = [
        Point(_near(buckets, smallest, hints)),
        Point(_with_batch(buckets, smallest, 1)),
        _tiny(buckets, smallest, program),
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


def _tiny(buckets: Buckets, smallest: Bucket, program: Program) -> Point:
    """Returns lengths far below the smallest bucket's; promised, where the trace is for them."""
    found = _with_batch(buckets, smallest, 2)
    lengths = [n for n, s in found.items() if n != BATCH and s > 4 * TINY]
    found |= {n: TINY + 2 * k for k, n in enumerate(lengths)}
    own = {n: size for n, size in found.items() if n != BATCH}
    within = all(program.least.get(n, smallest[n]) <= size for n, size in own.items())
    return Point(found, bool(lengths) and within and program.holds_at(own), short=True)


class Budget:
    """Limits of comparisons: seconds, and bytes.

    Args:
        unbounded: whether time does not matter.

    Attributes:
        spent_s: seconds in `within`.
        room_bytes: memory for copies of parameters and for gradients.
    """

    def __init__(self, unbounded: bool) -> None:
        self._unbounded = unbounded
        self.spent_s, self.room_bytes = 0.0, 0
        self._start_s = self._until_s = self._spare_s = 0.0

    @contextmanager
    def within(self, budget_s: float, spare_s: float, room_bytes: int) -> Iterator[None]:
        """Sets the end of the time for comparisons, and adds up the seconds they take."""
        self._start_s = time.perf_counter()
        self._until_s = math.inf if self._unbounded else self._start_s + budget_s
        self.spare(spare_s)
        self.room_bytes = max(room_bytes, LEAST_ROOM_BYTES)
        try:
            yield
        finally:
            self.spent_s += time.perf_counter() - self._start_s

    def spare(self, spare_s: float) -> None:
        """Sets in how many seconds of `within` extra points may be begun."""
        self._spare_s = math.inf if self._unbounded else self._start_s + spare_s

    @property
    def has_spare_time(self) -> bool:
        """Whether comparisons beyond the required ones may begin."""
        return time.perf_counter() < self._spare_s

    def allows(self, seconds_s: float, extra: bool) -> bool:
        """Whether something that takes so long may be begun; `extra`: that need not be."""
        return time.perf_counter() + seconds_s <= (self._spare_s if extra else self._until_s)
