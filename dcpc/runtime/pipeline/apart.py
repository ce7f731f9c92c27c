"""The split into micro-batches where samples of different groups do not share one.

Within a group samples are sorted by length, and a micro-batch is padded to its longest one. A group
of one length has ways with each number of micro-batches, which are as large as each other, to one
sample; one of several lengths has these and the best splits of it alone (`planner/splits/
microbatch.py`) for some weights of its longest micro-batch. With a cap on the slowest micro-batch
each group takes the way of least seconds in all, and every cap that is some way's slowest is tried.
So the split is exact for (weight - 1) * longest + sum / replicas among these ways.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import inf

import numpy as np

from dcpc.errors import PlanError
from dcpc.runtime.planner.splits.microbatch import FloatArray, IntArray, PaddedCost, microbatch

Parts = tuple[tuple[int, ...], ...]  # positions of samples, by micro-batch
Group = tuple[int, int]  # its number, and the most samples of a micro-batch

WEIGHTS = (1, 2, 4, 16)  # of the longest micro-batch, in the splits of a group of several lengths


@dataclass(frozen=True, slots=True)
class _Cut:
    """Micro-batches for the samples of a group.

    Attributes:
        longest_s: seconds of the slowest micro-batch.
        total_s: seconds of all micro-batches.
        ends: number of sorted samples up to the end of each micro-batch.
    """

    longest_s: float
    total_s: float
    ends: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Limited(PaddedCost):
    """A cost by which micro-batches of more samples do not fit."""

    cost: PaddedCost
    most: int

    def seconds(self, count: IntArray, longest: IntArray) -> FloatArray:
        """Those of the cost, of as many samples as fit: they rise no further."""
        return np.asarray(self.cost.seconds(np.minimum(count, self.most), longest))

    def peak_bytes(self, count: IntArray, longest: IntArray) -> FloatArray:
        """The cost's; of more samples more than fits."""
        found = np.asarray(self.cost.peak_bytes(np.minimum(count, self.most), longest))
        return np.where(count <= self.most, found, np.maximum(found, 2.0))


def split_apart(
    lengths: Sequence[int],
    cost: PaddedCost,
    weights: Sequence[int],
    replicas: int,
    groups: Mapping[int, Group],
) -> Iterator[Parts]:
    """Yields micro-batches of one group each, shortest first, for each weight.

    Args:
        lengths: length of each sample, in any order.
        cost: cost of a micro-batch; one fits if its bytes are at most 1.
        weights: weights of the longest micro-batch, as `stages` of `dcpc.microbatch`.
        replicas: pipelines that share the micro-batches.
        groups: length -> its group.

    Raises:
        PlanError: a sample does not fit alone.
    """
    at: dict[Group, list[int]] = {}
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        at.setdefault(groups[lengths[i]], []).append(i)
    ways = {
        group: _ways([lengths[i] for i in own], cost, group[1], {*WEIGHTS, *weights}, replicas)
        for group, own in at.items()
    }
    for weight in weights:
        best = _least(ways, weight, replicas)
        yield tuple(
            tuple(own[first:end])
            for group, own in at.items()
            for first, end in pairwise((0, *best[group].ends))
        )


def _least(ways: Mapping[Group, list[_Cut]], weight: int, replicas: int) -> dict[Group, _Cut]:
    """Returns the way of each group by which the micro-batches of all take least."""
    best_s, best = inf, dict[Group, _Cut]()
    for cap_s in sorted({way.longest_s for found in ways.values() for way in found}):
        under = {n: [w for w in found if w.longest_s <= cap_s] for n, found in ways.items()}
        if not all(under.values()):
            continue
        chosen = {n: min(found, key=lambda w: w.total_s) for n, found in under.items()}
        longest_s = max(w.longest_s for w in chosen.values())
        total_s = sum(w.total_s for w in chosen.values())
        value_s = (weight - 1) * longest_s + total_s / replicas
        if value_s < best_s:
            best_s, best = value_s, chosen
    return best


def _ways(
    lengths: Sequence[int], cost: PaddedCost, most: int, weights: Set[int], replicas: int
) -> list[_Cut]:
    """Returns the ways of a group that fit, its samples in ascending length.

    Raises:
        PlanError: none fits.
    """
    sizes = np.arange(1, min(len(lengths), most) + 1)
    different = np.array(sorted({*lengths}))
    seconds = np.asarray(cost.seconds(sizes[None, :], different[:, None]))
    fits = np.asarray(cost.peak_bytes(sizes[None, :], different[:, None])) <= 1.0
    row = np.searchsorted(different, lengths)
    found = []
    for ends in dict.fromkeys(_cuts(lengths, cost, len(sizes), weights, replicas)):
        counts = np.diff(ends, prepend=0)
        cells = Counter(zip(row[np.array(ends) - 1].tolist(), (counts - 1).tolist(), strict=True))
        if counts.max() <= len(sizes) and all(fits[cell] for cell in cells):
            total_s = sum(n * float(seconds[cell]) for cell, n in cells.items())
            found.append(_Cut(max(float(seconds[cell]) for cell in cells), total_s, ends))
    if not found:
        raise PlanError(
            f"pipeline: got a sample of length {lengths[-1]} that does not fit on a stage alone; "
            "expected one that does; take more stages, or raise memory="
        )
    return found


def _cuts(
    lengths: Sequence[int], cost: PaddedCost, most: int, weights: Set[int], replicas: int
) -> Iterator[tuple[int, ...]]:
    """Yields the ends of micro-batches: alike, then the best of a group of several lengths."""
    samples = len(lengths)
    for count in sorted({-(-samples // size) for size in range(1, most + 1)}):
        small, larger = divmod(samples, count)
        yield tuple(accumulate(small + (n < larger) for n in range(count)))
    if lengths[0] == lengths[-1]:
        return
    limited = _Limited(cost, most)
    for own in sorted(weights):
        try:
            split = microbatch(lengths, limited, 1.0, own, replicas)
        except PlanError:  # a sample does not fit alone
            return
        yield tuple(accumulate(map(len, split.batches)))
