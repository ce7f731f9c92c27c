"""A lower bound of a step: no plan of a global batch from the same table ends earlier.

Let t(m) be the seconds of a micro-batch of m samples at a degree, and n the samples of a bucket.
In a step of T seconds a sample runs at a degree at which it alone takes at most T. There it takes
degree * min t(m)/m rank-seconds, over m up to n, which pay for launches only as far as n samples
can share them. So T is at least

    the seconds of the sample that takes longest at its fastest degree;
    the rank-seconds of all samples, each at the cheapest of those degrees, over the ranks;
    the same with each share x = min t(m)/m / T of a rank's step replaced by f(x), for a
    function f under which no rank's shares add up to more than 1 (a dual feasible function).

The last one holds for samples that cannot be halved: three of 0.6 T do not fit on two ranks.
Functions are those of S. P. Fekete and J. Schepers, "New classes of fast lower bounds for bin
packing problems", Mathematical Programming 91 (2001). Ranks of unequal speed count as much as they
do; waiting for others, in rounds or in a group, only adds to T.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dcpc.runtime.planner.own_lengths import Dims, OwnLengths
from dcpc.runtime.planner.speeds import least_slowness, power
from dcpc.runtime.planner.table import PlanTable, holds

_ROUNDING = 1e-9
_CLASSES = (1, 2, 3, 4, 5)  # k of Fekete's and Schepers' u(k)
_LEAST_SHARES = 16  # shares below which a sample is left out, at most so many are tried
_HALVINGS = 30

_Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class StepBound:
    """A lower bound of a step's seconds.

    Attributes:
        seconds_s: lower bound of the seconds of any plan.
        work_s: seconds of all ranks if every sample ran at its cheapest degree and none waited.
    """

    seconds_s: float
    work_s: float


def step_bound(
    keys: Sequence[int],
    table: PlanTable,
    pads: bool = False,
    lengths: Sequence[Dims] = (),
    own: OwnLengths | None = None,
) -> StepBound:
    """Returns a lower bound of the step of a global batch.

    Args:
        keys: number in the table of each sample's bucket; at least one.
        table: rows to choose from.
        pads: whether a sample may also run in any other bucket that holds it.
        lengths: lengths that each sample is padded to by itself; none: its bucket's.
        own: seconds at shorter lengths, where there are any.
    """
    work = _SecondsByKind(keys, table, pads, lengths, own)
    least_s = work.least_s()
    if not work.fits(least_s):
        least_s = work.halved(least_s)
    return StepBound(least_s, work.work_s)


class _SecondsByKind:
    """The samples of a batch by kind, with the seconds of one at each degree, [degree, kind].

    Samples of one kind have a bucket and lengths in common.
    """

    def __init__(
        self,
        keys: Sequence[int],
        table: PlanTable,
        pads: bool,
        lengths: Sequence[Dims],
        own: OwnLengths | None,
    ) -> None:
        of_bucket = Counter(keys)
        by_kind = Counter(zip(keys, lengths or [()] * len(keys), strict=True))
        kinds, counts = sorted(by_kind), np.array([by_kind[k] for k in sorted(by_kind)])
        degrees = sorted({row.sp for rows in table.rows for row in rows if row.sp <= table.world})
        alone = np.full((len(degrees), len(kinds)), np.inf)
        share = alone.copy()
        for k, (key, dims) in enumerate(kinds):
            bucket = table.buckets[key]
            within = [j for j, b in enumerate(table.buckets) if pads and holds(b, bucket)] or [key]
            most = len(keys) if pads else of_bucket[key]
            for d, degree in enumerate(degrees):
                curves = [_curve(table, j, degree, dims, own, most) for j in within]
                alone[d, k] = min((_least(c) for c in curves if c), default=np.inf)
                share[d, k] = min((_least_share(c, most) for c in curves if c), default=np.inf)
        slow = np.array([least_slowness(table.speeds, d) for d in degrees])
        self._alone, self._share = alone * slow[:, None], share
        self._degrees = np.array(degrees, dtype=np.float64)[:, None]
        self._counts, self._world = counts, table.world
        self._power = power(table.speeds, table.world)
        self.work_s = self._area_s(np.inf)

    def least_s(self) -> float:
        """Returns the least T by the first two lines of the module: exact, without the third."""
        times = np.unique(self._alone[np.isfinite(self._alone)])
        times = times[times >= self._alone.min(axis=0).max()]
        low, high = 0, len(times) - 1
        while low < high:  # the first time from which on the work fits before the next
            middle = (low + high) // 2
            if self._area_s(times[middle]) < times[middle + 1]:
                high = middle
            else:
                low = middle + 1
        return max(float(times[low]), self._area_s(times[low]))

    def fits(self, step_s: float) -> bool:
        """Whether no function of shares says that a step of so many seconds is too short."""
        allowed = self._alone <= step_s * (1 + _ROUNDING)
        shares = self._share / step_s
        room = self._world * (1 + _ROUNDING)
        for each in _feasible(np.where(allowed, shares, 0.0)):
            least = np.where(allowed, self._degrees * each, np.inf).min(axis=0)
            if float(least @ self._counts) > room:
                return False
        return True

    def halved(self, low_s: float) -> float:
        """Returns the largest T found at which `fits` says no, from one at which it does."""
        high_s = 2 * low_s
        while not self.fits(high_s):
            low_s, high_s = high_s, 2 * high_s
        for _ in range(_HALVINGS):
            middle_s = (low_s + high_s) / 2
            low_s, high_s = (low_s, middle_s) if self.fits(middle_s) else (middle_s, high_s)
        return low_s

    def _area_s(self, step_s: float) -> float:
        area = np.where(self._alone <= step_s, self._degrees * self._share, np.inf).min(axis=0)
        return float(area @ self._counts) / self._power


def _curve(
    table: PlanTable, key: int, degree: int, dims: Dims, own: OwnLengths | None, most: int
) -> list[tuple[int, float]]:
    """Returns samples and seconds of a degree's rows, ascending, as `PlanTable.run` uses them."""
    bucket, rows = table.buckets[key], [r for r in table.rows[key] if r.sp == degree]
    if own is None:
        return sorted((r.micro_batch, r.seconds_s) for r in rows)
    return own.points(bucket, rows, dims, most)


def _least(curve: Sequence[tuple[int, float]]) -> float:
    """Least t(m) along a curve: that of one sample, but where rows take less for more."""
    (count, seconds_s), *others = curve
    return min([seconds_s / count, *(more_s for _, more_s in others)])


def _least_share(curve: Sequence[tuple[int, float]], most: int) -> float:
    """Least t(m)/m of m up to `most` along a curve; on a line between two rows it is at an end."""
    few, few_s, least_s = 0, 0.0, np.inf
    for count, seconds_s in curve:
        if count >= most:
            last_s = few_s + (most - few) / max(count - few, 1) * (seconds_s - few_s)
            return float(min(least_s, last_s / most))
        few, few_s = count, seconds_s
        least_s = min(least_s, seconds_s / count)
    return float(least_s)


def _feasible(shares: _Floats) -> Iterator[_Floats]:
    """Yields f(shares) for dual feasible functions f, rounded so that none is too large."""
    for k in _CLASSES:
        yield np.floor((k + 1) * shares - _ROUNDING) / k
    small = np.unique(shares[(shares > 0) & (shares <= 0.5)])
    for least in small[:: -(-len(small) // _LEAST_SHARES) or 1]:
        large = np.where(shares > 1 - least + _ROUNDING, 1.0, shares)
        yield np.where(shares < least, 0.0, large)
