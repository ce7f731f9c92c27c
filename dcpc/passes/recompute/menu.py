"""Makes the menu of recompute plans: which values to save and which to recompute, for many peaks.

    calls -> blocks (repeated, found by structure)
          -> per block its choices: (bytes saved, seconds of recompute, most bytes alive in its part
             of backward), those that no other is better than
          -> for a peak: the choices of all blocks of the fewest seconds, by dynamic programming

The plans of the menu are for peaks that fall in equal steps. Values that another block reads are
saved where backward needs them: one block at a time is recomputed. The peaks are those of the sizes
that the menu is made for; at other sizes a plan is still right, and the profile says what it needs.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from dcpc.fx.repeats import crossing, repeated_runs
from dcpc.ir import OUTSIDE
from dcpc.passes.recompute.block_cuts import (
    ForwardCall,
    Problem,
    RecomputeChoice,
    between,
    fewest_seconds,
    hull,
)
from dcpc.passes.recompute.peak import Timelines, ValueMemory

__all__ = ["AlikeBlocks", "ForwardCall", "Menu", "ValueMemory", "recompute_menu"]

ENOUGH = 32  # plans of blocks that choose alike; with fewer there are choices beside the hull's
LEVELS = 255  # peaks of the menu, between that of no recompute and the smallest
MOST_STATES = 256  # of the dynamic programme after each block: the cheapest of that many sizes
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class BlockChoices:
    """The choices of a block at the sizes of the menu, fewest seconds first.

    Attributes:
        again: names of the values that are not saved, for each choice.
        saved_bytes: bytes of saved values, with those that other blocks read, `[choices]`.
        seconds: seconds of recompute, `[choices]`.
        alive_bytes: largest number of bytes alive in the block's part of backward, without those
            that earlier blocks save, `[choices]`.
        forward_s: seconds of all calls of the block.
        crossing_bytes: bytes of the values that other blocks read.
        corners: (index, seconds for each byte freed by this step) of the choices on the lower hull
            of (bytes, seconds); 0 for the first.
    """

    again: tuple[frozenset[str], ...]
    saved_bytes: Floats
    seconds: Floats
    alive_bytes: Floats
    forward_s: float
    crossing_bytes: float
    corners: tuple[tuple[int, float], ...]


@dataclass(slots=True)
class Menu:
    """Numbered plans: 0 recomputes only values that cost nothing, `count` as many as possible.

    Those between are the cheapest for peaks that fall in equal steps; with `alike` those in which
    each block takes the steps of its hull up to a price, and between two of them, where equal
    blocks go through the choices that lie between the two. Plans up to a price have numbers in any
    menu: `at_price` tells them.

    Attributes:
        blocks: choices of the blocks, in execution order.
        count: number of the last plan.
        alike: whether only plans up to a price are counted.
    """

    blocks: tuple[BlockChoices, ...]
    count: int
    alike: bool = False
    _range: tuple[float, float] | None = None
    _plans: dict[int, tuple[int, ...]] = field(default_factory=dict)
    _of_prices: tuple[int, ...] = ()  # with `alike`: the plan up to each price

    @property
    def steps(self) -> range:
        """One number for each plan after plan 0."""
        return range(self.count)

    @property
    def prices(self) -> tuple[float, ...]:
        """The prices of all blocks' hulls, in seconds a byte freed, ascending."""
        return tuple(sorted({price for b in self.blocks for _, price in b.corners[1:]}))

    def by_ratio(self) -> Menu:
        """Returns the menu in which equal blocks make equal choices, however many they are."""
        plans, numbers = [(0,) * len(self.blocks)], []
        for price in self.prices:
            plans += _steps_of(self.blocks, plans[-1], price)
            numbers.append(len(plans) - 1)
        known = dict(enumerate(plans))
        return Menu(self.blocks, len(plans) - 1, True, None, known, tuple(numbers))

    def at_price(self, seconds_per_byte: float) -> int:
        """Returns the number of the plan that takes every step of at most this price."""
        taken = sum(price <= seconds_per_byte for price in self.prices)
        if self.alike:
            return self._of_prices[taken - 1] if taken else 0
        return self.count + taken if taken else 0

    def made_again(self, k: int) -> frozenset[str]:
        """Returns the names of the values that plan k does not save."""
        chosen = self.choices(k)
        return frozenset().union(*(b.again[c] for b, c in zip(self.blocks, chosen, strict=True)))

    def seconds(self, k: int) -> float:
        """Returns the seconds of recompute in plan k."""
        return sum(float(b.seconds[c]) for b, c in zip(self.blocks, self.choices(k), strict=True))

    def saved_bytes(self, k: int) -> float:
        """Returns the bytes that plan k saves."""
        chosen = zip(self.blocks, self.choices(k), strict=True)
        return sum(float(b.saved_bytes[c]) for b, c in chosen)

    def peak_bytes(self, k: int) -> float:
        """Returns the largest number of bytes alive in any block's part of backward."""
        return peak_bytes(self.blocks, self.choices(k))

    def choices(self, k: int) -> tuple[int, ...]:
        """Returns the choice of each block in plan k."""
        if k not in self._plans:
            self._plans[k] = self._solve(k)
        return self._plans[k]

    def _solve(self, k: int) -> tuple[int, ...]:
        if k == 0:
            return (0,) * len(self.blocks)
        assert not self.alike, f"got plan {k}; expected one of {self.count + 1}"
        if k > self.count:
            price = self.prices[k - 1 - self.count]
            return tuple([c for c, p in b.corners if p <= price][-1] for b in self.blocks)
        if k == self.count:
            return tuple(int(np.argmin(b.saved_bytes)) for b in self.blocks)
        if self._range is None:
            most = peak_bytes(self.blocks, self.choices(0))
            self._range = (smallest_peak(self.blocks, most), most)
        low, high = self._range
        chosen = cheapest(self.blocks, high + (low - high) * k / (self.count - 1))
        assert chosen is not None, f"plan {k} of {self.count} has no choices"
        return chosen


def _steps_of(
    blocks: Sequence[BlockChoices], now: tuple[int, ...], price: float
) -> list[tuple[int, ...]]:
    """Returns the plans from one up to the next price, one kind of blocks after the other.

    The price's own plan is the last. Those before it cost more for a byte that they free, and free
    less: of choices between two of the hull the ones that no other is better than.
    """
    wanted = [[c for c, p in block.corners if p <= price][-1] for block in blocks]
    kinds: dict[Hashable, list[int]] = {}
    for i, block in enumerate(blocks):
        if wanted[i] != now[i]:
            alike = now[i], wanted[i], tuple(block.saved_bytes), tuple(block.seconds)
            kinds.setdefault(alike, []).append(i)
    plans = []
    for members in kinds.values():
        i = members[0]
        for c in _choices_up_to(blocks[i], now[i], wanted[i]):
            now = tuple(c if i in members else chosen for i, chosen in enumerate(now))
            plans.append(now)
    return plans


def _choices_up_to(block: BlockChoices, first: int, last: int) -> list[int]:
    """Returns a block's choices after one and up to another, the most bytes first."""
    saved, seconds = block.saved_bytes, block.seconds
    found = [last]
    for c in np.lexsort((seconds, saved)):
        cheaper = seconds[first] < seconds[c] < seconds[found[-1]]
        if cheaper and saved[last] < saved[c] < saved[first]:
            found.append(int(c))
    return found[::-1]


def peak_bytes(blocks: Sequence[BlockChoices], chosen: Sequence[int]) -> float:
    """Returns the largest number of bytes alive in any block's part of backward."""
    saved = most = 0.0
    for block, c in zip(blocks, chosen, strict=True):
        most = max(most, saved + float(block.alive_bytes[c]))
        saved += float(block.saved_bytes[c])
    return most


def cheapest(blocks: Sequence[BlockChoices], peak: float) -> tuple[int, ...] | None:
    """Returns the choices of fewest seconds within this peak, or None if there are none.

    A dynamic programme over the blocks in execution order: of two ways to have chosen for the first
    blocks the one that saves more and costs more is dropped.
    """
    saved, seconds = np.zeros(1), np.zeros(1)
    back: list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]] = []
    for block in blocks:
        fits = saved[:, None] + block.alive_bytes[None, :] <= peak * (1 + 1e-12)
        before, chosen = np.nonzero(fits)
        if not len(before):
            return None
        total_s = seconds[before] + block.seconds[chosen]
        total = saved[before] + block.saved_bytes[chosen]
        kept = _front(total, total_s)
        saved, seconds = total[kept], total_s[kept]
        back.append((before[kept], chosen[kept]))
    state = int(np.argmin(seconds))
    plan: list[int] = []
    for before, chosen in reversed(back):
        plan.append(int(chosen[state]))
        state = int(before[state])
    return tuple(reversed(plan))


def _front(saved: Floats, seconds: Floats) -> npt.NDArray[np.int64]:
    """Returns the indices of undominated (bytes, seconds) states, fewest bytes first."""
    order = np.lexsort((seconds, saved))
    best = np.minimum.accumulate(seconds[order])
    better = np.concatenate(([True], best[1:] < best[:-1]))
    kept = order[better]
    if len(kept) > MOST_STATES:
        edges = np.linspace(saved[kept[0]], saved[kept[-1]], MOST_STATES)
        bins = np.searchsorted(edges, saved[kept])
        kept = kept[np.flatnonzero(np.diff(bins, append=bins[-1] + 1))]  # the cheapest of each bin
    return kept


def smallest_peak(blocks: Sequence[BlockChoices], most: float) -> float:
    """Returns an achievable peak within a thousandth of the smallest one."""
    low, high = 0.0, most
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        chosen = cheapest(blocks, middle)
        low, high = (middle, high) if chosen is None else (low, peak_bytes(blocks, chosen))
    return high


class AlikeBlocks:
    """The blocks of a forward graph, where equal blocks make equal choices.

    Args:
        calls: calls that depend on parameters or activations, in execution order.
        copies: for each call, its copy of a block, or `OUTSIDE`. The copies are the menu's blocks,
            even if the first one is split differently: a copy that stands for many must not
            recompute values of another one.
    """

    def __init__(self, calls: Sequence[ForwardCall], copies: Sequence[Hashable]) -> None:
        ranges = _ranges(calls, copies)
        outside = _read_outside(calls, ranges)
        self._problems = [Problem.of(calls[low:high], outside) for low, high in ranges]
        self._keys = [problem.key() for problem in self._problems]
        self._distinct = dict(zip(self._keys, self._problems, strict=True))
        self._forward_s = [sum(call.seconds for call in calls[low:high]) for low, high in ranges]

    @cached_property
    def least(self) -> frozenset[str]:
        """The values that plan 0 recomputes, for callers that need no other plan."""
        fewest = {key: fewest_seconds(problem) for key, problem in self._distinct.items()}
        pairs = zip(self._problems, self._keys, strict=True)
        return frozenset(p.calls[i].name for p, key in pairs for i in fewest[key].again)

    @cached_property
    def menu(self) -> Menu:
        """The menu; its blocks have no peaks."""
        hulls = {key: hull(problem) for key, problem in self._distinct.items()}
        found = self._menu(hulls, hulls)
        if found.count >= ENOUGH:
            return found
        more = {key: between(problem, hulls[key]) for key, problem in self._distinct.items()}
        return self._menu(hulls, more)

    def _menu(
        self,
        hulls: Mapping[Hashable, Sequence[RecomputeChoice]],
        every: Mapping[Hashable, Sequence[RecomputeChoice]],
    ) -> Menu:
        blocks = []
        for problem, key, own_s in zip(self._problems, self._keys, self._forward_s, strict=True):
            names = [call.name for call in problem.calls]
            again = [frozenset(names[i] for i in choice.again) for choice in every[key]]
            peaks = np.zeros(len(again))
            blocks.append(_block(hulls[key], every[key], again, peaks, own_s, 0.0))
        return Menu(tuple(blocks), 0).by_ratio()


def recompute_menu(calls: Sequence[ForwardCall], memory: ValueMemory) -> Menu:
    """Returns the menu of recompute plans of a forward graph."""
    ranges = _repeated_ranges(calls)
    outside = _read_outside(calls, ranges)
    timelines = Timelines(calls, ranges, outside, memory)
    hulls: dict[Hashable, tuple[list[RecomputeChoice], list[RecomputeChoice]]] = {}
    alive: dict[Hashable, list[float]] = {}
    blocks = []
    for index, (low, high) in enumerate(ranges):
        problem = Problem.of(calls[low:high], outside)
        key = problem.key()
        if key not in hulls:
            corners = hull(problem)
            hulls[key] = corners, between(problem, corners)
        corners, every = hulls[key]
        names = [call.name for call in problem.calls]
        again = [frozenset(names[i] for i in choice.again) for choice in every]
        like = key, timelines.shape(index)
        if like not in alive:
            alive[like] = [timelines.peak_bytes(index, a) for a in again]
        total = np.array(alive[like]) + timelines.passing_bytes(index)
        forward_s = sum(call.seconds for call in calls[low:high])
        crossing = timelines.crossing_bytes(index)
        blocks.append(_block(corners, every, again, total, forward_s, crossing))
    plans = 1 if all(len(b.again) == 1 for b in blocks) else LEVELS
    return Menu(tuple(blocks), plans if blocks else 0)


def _block(
    corners: Sequence[RecomputeChoice],
    every: Sequence[RecomputeChoice],
    again: Sequence[frozenset[str]],
    alive_bytes: Floats,
    forward_s: float,
    crossing_bytes: float,
) -> BlockChoices:
    prices = [0.0]
    for a, b in pairwise(corners):
        prices.append((b.seconds - a.seconds) / (a.size_bytes - b.size_bytes))
    saved_bytes = np.array([c.size_bytes for c in every]) + crossing_bytes
    seconds = np.array([c.seconds for c in every])
    on_hull = [every.index(c) for c in corners]
    kept = _undominated(saved_bytes, seconds, alive_bytes, on_hull)
    numbers = [kept.index(i) for i in on_hull]
    return BlockChoices(
        again=tuple(again[i] for i in kept),
        saved_bytes=saved_bytes[kept],
        seconds=seconds[kept],
        alive_bytes=alive_bytes[kept],
        forward_s=forward_s,
        crossing_bytes=crossing_bytes,
        corners=tuple(zip(numbers, prices, strict=True)),
    )


def _undominated(saved: Floats, seconds: Floats, alive: Floats, keep: Sequence[int]) -> list[int]:
    """Returns the indices of the choices undominated in all three, and those in `keep`."""
    values = np.stack([saved, seconds, alive], axis=1)
    found: list[int] = []
    for i in np.lexsort((alive, saved, seconds)):
        if i in keep or not (values[found] <= values[i]).all(axis=1).any():
            found.append(int(i))
    return found


# ---------------------------------------------------------------------------------------- blocks


def _repeated_ranges(calls: Sequence[ForwardCall]) -> list[tuple[int, int]]:
    """Returns the blocks as (first, after the last), in order; other runs are one block each."""
    position = {call.name: i for i, call in enumerate(calls)}
    last_read = [i for i in range(len(calls))]
    for i, call in enumerate(calls):
        for name in call.reads:
            last_read[position[name]] = i
    borders = {0, len(calls)}
    runs = repeated_runs([call.kind for call in calls])
    for run in runs:
        first = min(
            range(run.start, run.start + run.period),
            key=lambda at: crossing(last_read, at + run.period, run.period),
        )
        borders |= {run.start, run.stop, *range(first, run.stop + 1, run.period)}
    if len(borders) > 2:
        borders.remove(sorted(borders)[1])  # calls before the first block join it
    return _between(borders)


def _ranges(calls: Sequence[ForwardCall], copies: Sequence[Hashable]) -> list[tuple[int, int]]:
    """Returns the same where each call's copy of a block is known.

    Repeated runs outside of the copies are blocks, too. A few calls before the first copy join it;
    more of them may be a block of their own, as the first of a run may be wired differently.
    """
    changes = [i for i, (a, b) in enumerate(pairwise(copies), 1) if a != b]
    outside = {
        start
        for start, _ in _repeated_ranges(calls)
        if start and copies[start] == copies[start - 1] == OUTSIDE
    }
    if copies[0] == OUTSIDE and 2 * changes[0] <= changes[1] - changes[0]:
        del changes[0]
    return _between({0, len(calls), *changes, *outside})


def _between(borders: set[int]) -> list[tuple[int, int]]:
    return list(pairwise(sorted(borders)))


def _read_outside(calls: Sequence[ForwardCall], blocks: Sequence[tuple[int, int]]) -> set[str]:
    """Returns the names of the values that other blocks read, and the bases of such views.

    A view is recomputed wherever it is read, so the other block needs its base.
    """
    block_of = {c.name: i for i, (low, high) in enumerate(blocks) for c in calls[low:high]}
    outside = {name for c in calls for name in c.reads if block_of[name] != block_of[c.name]}
    for call in reversed(calls):
        if call.name in outside and not call.savable:
            outside.update(call.reads)
    return outside
