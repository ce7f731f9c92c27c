"""A lower bound of a step with packed micro-batches: no plan of the batch ends earlier.

In a step of T seconds a sequence runs by a kind at which it alone takes at most T. A rank that runs
k micro-batches has T - k*fixed_s seconds for sequences, and k micro-batches' room. Let a be the
rank-seconds and w the share of a rank's micro-batch that a sequence takes at its best. Of n_k such
ranks the sequences take at most n_k*(T - k*fixed_s) seconds and n_k*k room. So for any prices p_k
from 0 to 1

    sum over sequences of min over k of (1 - p_k)*a/(T - k*fixed_s) + p_k*w/k  <=  ranks,

as by the prices of k the sequences of ranks with k micro-batches cost at most n_k. Where some
prices say more than `ranks`, no plan ends within T. The best ones are looked for along a
subgradient; any give a bound. Beyond the first k whose room never binds none need be looked at.
"""

from __future__ import annotations

import numpy as np

from dcpc.runtime.planner.packed.ways import Floats, Integers, PackedWork

_ROUNDING = 1e-9
# Sequences of lengths within this share are counted as the shortest of them, where there are more.
_MOST_LENGTHS, _ALIKE = 160, 0.005
# Steps along the subgradient, the first of them; T is looked for as finely as this.
_ASCENTS, _STRIDE, _FINELY = 50, 0.25, 0.001
# Kinds are told apart by so many amounts of room on a rank.
_ROOMS = 6
_MOST_BINS = 64


class _LeastSeconds:
    """Least seconds of sequences, by amounts of room, [amount, length]."""

    def __init__(self, work: PackedWork) -> None:
        self._counts, picks = _alike(work.lengths)
        self._alone_s = work.alone_s()[:, picks]
        self._area_s = (work.degree[:, None] * work.load_s)[:, picks]
        self._shares_s = work.shares_s()[:, picks]
        self._ranks, self._fixed_s = work.ranks, float(work.fixed_s.min())
        of_rank = work.tokens / work.degree
        amounts = np.unique(of_rank)
        self._parts = [np.isin(of_rank, part) for part in np.array_split(amounts, _ROOMS)]
        self._parts = [part for part in self._parts if part.any()]
        most = np.array([of_rank[part].max() for part in self._parts])
        self._room: Floats = work.lengths[picks] / most[:, None]
        self._prices: Floats = np.zeros(0)

    @property
    def longest_s(self) -> float:
        """Seconds of the slowest sequence on its fastest kind."""
        return float(self._alone_s.min(axis=0).max())

    def averaged_s(self, step_s: float) -> float:
        """Returns seconds of all ranks if each sequence pays its share of a full micro-batch."""
        cost_s = np.where(self._alone_s <= step_s * (1 + _ROUNDING), self._shares_s, np.inf)
        return float(cost_s.min(axis=0) @ self._counts) / self._ranks

    def too_short(self, step_s: float) -> bool:
        """Whether some prices show that a step of so many seconds is too short."""
        allowed = self._alone_s <= step_s * (1 + _ROUNDING)
        area_s = np.stack(
            [np.where(allowed & p[:, None], self._area_s, np.inf).min(axis=0) for p in self._parts]
        )
        usable = np.isfinite(area_s)
        area_s, room = np.where(usable, area_s, 0.0), np.where(usable, self._room, 0.0)
        bins = self._bins(area_s, room, step_s)
        by_time = area_s[None] / (step_s - bins * self._fixed_s)[:, None, None]
        by_room = room[None] / bins[:, None, None]
        prices = np.zeros(len(bins))
        known = min(len(bins), len(self._prices))
        prices[:known] = self._prices[:known]
        columns = np.arange(area_s.shape[1])
        for turn in range(_ASCENTS):
            price = prices[:, None, None]
            cost = np.where(usable, (1 - price) * by_time + price * by_room, np.inf)
            flat = cost.reshape(-1, len(columns))
            at = flat.argmin(axis=0)
            if float(flat[at, columns] @ self._counts) > self._ranks * (1 + _ROUNDING):
                self._prices = prices
                return True
            slope = (by_room - by_time).reshape(flat.shape)[at, columns] * self._counts
            ascent = np.bincount(at // len(area_s), slope, len(bins))
            size = float(np.linalg.norm(ascent))
            if size == 0:
                break
            prices = np.clip(prices + _STRIDE / (1 + turn / 4) * ascent / size, 0.0, 1.0)
        return False

    def _bins(self, area_s: Floats, room: Floats, step_s: float) -> Floats:
        """Numbers of micro-batches of a rank, up to the first whose room never binds."""
        busy = area_s > 0
        densest = float((room[busy] / area_s[busy]).max()) if busy.any() else 0.0
        most = max(1, int(np.ceil(step_s / self._fixed_s)) - 1) if self._fixed_s > 0 else _MOST_BINS
        bins = np.arange(1, min(most, _MOST_BINS) + 1, dtype=np.float64)
        bins = bins[step_s - bins * self._fixed_s > 0]
        binds = (step_s - bins * self._fixed_s) * densest > bins
        return bins[: int(binds.sum()) + 1]


def averaged_bound(work: PackedWork) -> float:
    """Returns a bound in little time: each sequence pays its share of a full micro-batch."""
    return _averaged(_LeastSeconds(work))


def packed_bound(work: PackedWork, most_s: float) -> float:
    """Returns a lower bound of the seconds of a step."""
    needs = _LeastSeconds(work)
    low_s, high_s = _averaged(needs), most_s
    while high_s > low_s * (1 + _FINELY):
        middle_s = (low_s + high_s) / 2
        low_s, high_s = (middle_s, high_s) if needs.too_short(middle_s) else (low_s, middle_s)
    return min(low_s, most_s)


def _averaged(needs: _LeastSeconds) -> float:
    low_s = needs.longest_s
    high_s = max(low_s, needs.averaged_s(low_s))
    while high_s > low_s * (1 + _FINELY):
        middle_s = (low_s + high_s) / 2
        fits = needs.averaged_s(middle_s) <= middle_s
        low_s, high_s = (low_s, middle_s) if fits else (middle_s, high_s)
    return low_s


def _alike(lengths: Floats) -> tuple[Floats, Integers]:
    """Counts of sequences of like length, and the number of the shortest of each."""
    found, first, counts = np.unique(lengths, return_index=True, return_counts=True)
    if len(found) > _MOST_LENGTHS:
        grid = np.floor(np.log(found) / np.log1p(_ALIKE))
        _, begin = np.unique(grid, return_index=True)
        counts = np.add.reduceat(counts, begin)
        first = first[begin]
    return counts.astype(np.float64), first
