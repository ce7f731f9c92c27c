"""The costs by which a cut into pipeline stages is chosen, and the cut itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class CutCosts:
    """The seconds of every stage into which a chain of blocks could be cut.

    Attributes:
        seconds: `[buckets, kinds, places, blocks + 1, blocks + 1]`: element `[l, k, i, a, b]` is
            seconds of a micro-batch of bucket `l` on a device of kind `k` that runs the blocks from
            `a` up to `b` (exclusive) and has `i` stages behind it; `inf` where it does not fit. A
            stage has at least one block, so `a < b`; the rest is not read. One place stands for
            all: then the seconds do not depend on it.
        weights: share of each bucket in the micro-batches; they sum to 1.
        counts: number of devices of each kind.
    """

    seconds: Floats
    weights: tuple[float, ...]
    counts: tuple[int, ...]

    @property
    def blocks(self) -> int:
        """The number of blocks in the chain."""
        return int(self.seconds.shape[-1]) - 1

    def at(self, kind: int, place: int) -> Floats:
        """Returns the seconds on a kind of device, `[buckets, blocks + 1, blocks + 1]`."""
        found: Floats = self.seconds[:, kind, min(place, self.seconds.shape[2] - 1)]
        return found

    def bottlenecks(self, borders: Sequence[int], kinds: Sequence[int]) -> Floats:
        """Returns the seconds of the slowest stage of each bucket, `[buckets]`."""
        last = len(kinds) - 1
        each = [
            self.at(kind, last - j)[:, borders[j], borders[j + 1]] for j, kind in enumerate(kinds)
        ]
        return np.asarray(np.max(each, axis=0))

    def expected(self, bottlenecks: Floats) -> float:
        """Returns the weighted mean over the buckets of seconds `[..., buckets]`."""
        return float(bottlenecks @ np.array(self.weights))

    def blended(self) -> CutCosts:
        """Returns the costs of a single bucket that takes the mean over all."""
        weights = np.array(self.weights)
        mean = np.tensordot(weights, self.seconds, axes=1)[None]
        return CutCosts(mean, (1.0,), self.counts)

    def only(self, bucket: int) -> CutCosts:
        """Returns the costs of one bucket alone."""
        return CutCosts(self.seconds[bucket : bucket + 1], (1.0,), self.counts)


@dataclass(frozen=True, slots=True)
class StageCut:
    """A chain of blocks cut into stages.

    Attributes:
        borders: first block of each stage, and the number of blocks.
        kinds: kind of the device of each stage. Devices that are too slow may be left out.
        bottleneck_s: seconds of the slowest stage for each bucket.
        expected_s: mean of these by the weights.
        bound_s: lower bound on the expected seconds of any cut.
        exact: whether no cut is better; False if the search was cut short.
    """

    borders: tuple[int, ...]
    kinds: tuple[int, ...]
    bottleneck_s: tuple[float, ...]
    expected_s: float
    bound_s: float
    exact: bool = True


def cut_of(costs: CutCosts, borders: Sequence[int], kinds: Sequence[int]) -> StageCut:
    """Returns a cut with its costs, without a bound."""
    found = costs.bottlenecks(borders, kinds)
    times = tuple(map(float, found))
    return StageCut(tuple(borders), tuple(kinds), times, costs.expected(found), -inf)


def spread(costs: CutCosts, cut: StageCut) -> StageCut:
    """Returns a cut in which unused devices take work, where that costs nothing.

    The bottleneck may leave other devices idle: they take blocks of the largest stages, which saves
    memory and time to fill the pipeline.
    """
    while True:
        left = [n - cut.kinds.count(k) for k, n in enumerate(costs.counts)]
        tried = [
            cut_of(costs, [*cut.borders[: j + 1], b, *cut.borders[j + 1 :]], kinds)
            for k in range(len(left))
            if left[k]
            for j in range(len(cut.kinds))
            for b in range(cut.borders[j] + 1, cut.borders[j + 1])
            for kinds in ([*cut.kinds[:at], k, *cut.kinds[at:]] for at in (j, j + 1))
        ]
        no_worse = [t for t in tried if t.expected_s <= cut.expected_s * (1 + 1e-12)]
        if not no_worse:
            return cut
        best = min(no_worse, key=lambda t: _squares(costs, t))
        cut = replace(best, bound_s=cut.bound_s, exact=cut.exact)


def _squares(costs: CutCosts, cut: StageCut) -> float:
    """Returns the sum of squares of the stages' mean seconds, smallest if they are equal."""
    last = len(cut.kinds) - 1
    means = (
        costs.expected(costs.at(kind, last - j)[:, cut.borders[j], cut.borders[j + 1]])
        for j, kind in enumerate(cut.kinds)
    )
    return sum(mean**2 for mean in means)
