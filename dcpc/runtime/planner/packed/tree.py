"""Long sequences as a tree: groups of ranks, and in each those that run after it on its ranks.

A group is worth the tokens of short sequences (`fluid.py`) that its ranks take up: in its own
micro-batches, in the groups inside it, and on ranks that these leave free.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field, replace
from math import ceil, floor, inf

import numpy as np

from dcpc.runtime.planner.packed.filling import PackedDraft, empty_bin
from dcpc.runtime.planner.packed.fluid import ShortFluid
from dcpc.runtime.planner.packed.layout import Laid, LaidGroup, Segment, first_rank
from dcpc.runtime.planner.packed.ways import PackedWork

Long = tuple[int, ...]  # the long sequences of a micro-batch
Bins = tuple[Long, ...]
_Pairs = list[tuple[int, int]]

ROOT = 0  # all ranks
_ROUNDING = 1e-9
# Tokens that a rank takes up are lost so many times where a group ends late.
_LATE = 20.0
_REMEMBERED = 50  # seconds, of each group


@dataclass(slots=True)
class TreeGroup:
    """Ranks that run micro-batches of one kind.

    Attributes:
        kind, degree: number of the kind; ranks.
        bins: sequences of each micro-batch.
        outer: number of the group on whose ranks it runs.
        inner: numbers of the groups on its ranks after it.
        free: ranks without one.
        need_s, room: seconds of its micro-batches with their long sequences; tokens left in them.
        worth: by seconds until the end: tokens taken up, and how many of them in its micro-batches.
    """

    kind: int
    degree: int
    bins: Bins
    outer: int
    free: int
    inner: tuple[int, ...] = ()
    need_s: float = 0.0
    room: float = 0.0
    worth: dict[float, tuple[float, float]] = field(default_factory=dict)


class Tree:
    """The groups of a batch's long sequences.

    A change is made to copies of the groups that it touches and of those around them.

    Attributes:
        groups, now: groups by number, without the change and with it.
    """

    def __init__(self, fluid: ShortFluid, draft: PackedDraft) -> None:
        """Reads the long sequences of a draft."""
        self._fluid, self._work = fluid, fluid.work
        work = fluid.work
        self._degree, self._load_s = work.degree.tolist(), work.load_s.tolist()
        self._fixed_s, self._pace_s = work.fixed_s.tolist(), work.pace_s.tolist()
        self._tokens, self._length = work.tokens.tolist(), work.lengths.tolist()
        self._at, self._taken = fluid.at.tolist(), fluid.tokens.tolist()
        self._slope = [*(np.diff(fluid.tokens) / np.diff(fluid.at)).tolist(), 0.0]
        self._late = _LATE * work.tokens_in_s / work.ranks
        self.now = {ROOT: TreeGroup(0, work.ranks, (), ROOT, work.ranks)}
        self.groups, self._next = self.now, 1
        begun = [(0, work.ranks, ROOT)]  # first rank, the one after the last, number
        for own in draft.bins:
            long = tuple(s for row in own.rows for s in row if s < work.long)
            end = own.first + self._degree[own.kind]
            outer = next(n for b, e, n in reversed(begun) if b <= own.first and end <= e)
            group = self.now[outer]
            if long and outer != ROOT and (group.kind, group.inner) == (own.kind, ()):
                self.fill(outer, (*group.bins, long))
            elif long:
                begun.append((own.first, end, self._next))
                self.add(own.kind, (long,), outer)

    def own(self, number: int) -> TreeGroup:
        """Returns the change's copy of a group."""
        group = self.now[number]
        if group is self.groups.get(number):
            group = self.now[number] = replace(group, worth={})
            if number != ROOT:
                self.own(group.outer)
        return group

    def holds(self, long: Long, kind: int) -> bool:
        """Whether a micro-batch of a kind holds these sequences."""
        if sum([self._length[s] for s in long]) > self._tokens[kind]:
            return False
        own = empty_bin(self._work, kind, 0) if self._work.kinds[kind].rows > 1 else None
        return own is None or all(own.add(self._work, s) for s in sorted(long))

    def fill(self, number: int, bins: Bins) -> None:
        """Gives a group other micro-batches; without any it ends, and those inside it stay."""
        group = self.own(number)
        if bins:
            self._settle(group, group.kind, bins)
            return
        outer = self.own(group.outer)
        outer.inner = (*(n for n in outer.inner if n != number), *group.inner)
        outer.free += group.free
        for inner in group.inner:
            self.own(inner).outer = group.outer
        del self.now[number]

    def add(self, kind: int, bins: Bins, outer: int) -> bool:
        """Begins a group on ranks of another; False: there are too few."""
        self.now[self._next] = group = TreeGroup(kind, 0, bins, outer, 0)
        self._next += 1
        self._settle(group, kind, bins)
        return self._attach(self._next - 1, outer)

    def move(self, number: int, kind: int, outer: int) -> bool:
        """Gives a group another kind, or ranks of another group; False: there are too few."""
        group = self.own(number)
        before = self.own(group.outer)
        before.inner = tuple(n for n in before.inner if n != number)
        before.free += group.degree
        self._settle(group, kind, group.bins)
        return self._attach(number, outer)

    def _attach(self, number: int, outer: int) -> bool:
        group, around = self.own(number), self.own(outer)
        group.outer, around.inner = outer, (*around.inner, number)
        around.free -= group.degree
        return min(around.free, group.free) >= 0

    def _settle(self, group: TreeGroup, kind: int, bins: Bins) -> None:
        group.free += self._degree[kind] - group.degree
        group.kind, group.degree, group.bins = kind, self._degree[kind], bins
        long, load_s = [s for each in bins for s in each], self._load_s[kind]
        group.need_s = self._fixed_s[kind] * len(bins) + sum([load_s[s] for s in long])
        group.room = self._tokens[kind] * len(bins) - sum([self._length[s] for s in long])

    def worth(self, number: int, left_s: float) -> float:
        """Returns tokens that a group's ranks take up in so many seconds; less where it is late."""
        group = self.now[number]
        known = group.worth.get(left_s)
        if known is not None:
            return known[0]
        rest_s, pace_s = left_s - group.need_s, self._pace_s[group.kind]
        best, most = -inf, 0.0
        for taken in _amounts(group, rest_s, pace_s, self._fluid.period_s):
            after_s = rest_s - taken * pace_s
            value = taken
            if group.free and after_s > 0:
                at = bisect_right(self._at, after_s) - 1
                rank = self._taken[at] + self._slope[at] * (after_s - self._at[at])
                value += group.free * rank
            if rest_s < 0:
                value = self._late * rest_s * group.degree
            for inner in group.inner:
                value += self.worth(inner, after_s)
            if value > best:
                best, most = value, taken
        if len(group.worth) > _REMEMBERED:
            group.worth.clear()
        group.worth[left_s] = best, most
        return best

    def has_ranks(self, number: int = ROOT, first: int = 0) -> bool:
        """Whether the groups inside one that begins at some rank have ranks of their own."""
        found = _blocks(self._work, self.now, self.now[number], first)
        return found is not None and all(
            self.has_ranks(n, begin) for n, begin in found[0] if self.now[n].inner
        )

    def laid(self, step_s: float) -> Laid:
        """Returns the groups with their ranks in a step of so many seconds."""
        found = Laid(self._fluid)
        self._lay(found, ROOT, 0, step_s)
        return found

    def _lay(self, found: Laid, number: int, first: int, left_s: float) -> bool:
        group = self.now[number]
        self.worth(number, left_s)
        rest_s, taken = left_s - group.need_s, group.worth[left_s][1]
        if number != ROOT:
            bins = [empty_bin(self._work, group.kind, first) for _ in group.bins]
            for own, long in zip(bins, group.bins, strict=True):
                if not all(own.add(self._work, s) for s in sorted(long)):
                    return False
            rows, rooms = [own.rows for own in bins], [own.rooms for own in bins]
            is_open = not group.inner
            laid = LaidGroup(first, group.kind, rows, rooms, rest_s, taken, is_open)
            found.groups.append(laid)
            if is_open:
                return True
        rest_s -= taken * self._pace_s[group.kind]
        blocks = _blocks(self._work, self.now, group, first)
        if blocks is None:
            return False
        found.segments += [Segment(b, n, rest_s) for n, b in blocks[1]]
        return all(self._lay(found, inner, begin, rest_s) for inner, begin in blocks[0])


def _amounts(group: TreeGroup, rest_s: float, pace_s: float, period_s: float) -> list[float]:
    """Tokens that its micro-batches may take, as in `ShortFluid.group_tokens`."""
    top = min(group.room, rest_s / pace_s)
    if top <= 0 or group.inner:
        return [0.0, top] if top > 0 else [0.0]
    whole = ceil((rest_s - top * pace_s) / period_s - _ROUNDING)
    counts = floor(rest_s / period_s), whole
    found = [(rest_s - count * period_s) / pace_s for count in counts]
    return [0.0, top, *(taken for taken in found if 0 < taken < top)]


def _blocks(
    work: PackedWork, groups: dict[int, TreeGroup], group: TreeGroup, first: int
) -> tuple[_Pairs, _Pairs] | None:
    """Groups inside one with their first ranks; and the parts that they leave, alike."""
    left, found = [(group.degree, first)], []
    for degree, number in sorted([(-groups[n].degree, n) for n in group.inner]):
        for at, (size, block) in enumerate(left):
            begin = first_rank(work, block, size, -degree) if size >= -degree else None
            if begin is not None:
                parts = (begin - block, block), (block + size - begin + degree, begin - degree)
                left = sorted([*left[:at], *left[at + 1 :], *(p for p in parts if p[0])])
                found.append((number, begin))
                break
        else:
            return None
    return found, left
