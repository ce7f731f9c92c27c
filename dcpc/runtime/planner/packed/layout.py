"""Long sequences on groups of ranks, in a step of given seconds.

The longest first, each where it displaces least of the short sequences' tokens (`fluid.py`):

    fresh   a new group on ranks that have run nothing since some second
    join    a micro-batch that a group has launched and that has room
    launch  one more micro-batch on a group's ranks
    inside  a new, smaller group on ranks of a group, after what that runs

A larger group takes no more short sequences once a smaller one begins: its ranks are free from then
on. So ranks run groups from the largest to the smallest, each within the one before.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from dcpc.runtime.planner.packed.fluid import ShortFluid
from dcpc.runtime.planner.packed.ways import Floats, Integers, PackedWork

# Of two places that displace as much the one of fewer rank-seconds; counts as much beside tokens.
_THRIFT = 1e-3
# Fresh ranks are tried in so many places, by what is displaced there.
_TRIED = 24
_ROUNDING = 1e-9


@dataclass(slots=True)
class Segment:
    """Consecutive ranks that are free for the last seconds of the step."""

    first: int
    size: int
    left_s: float


@dataclass(slots=True)
class LaidGroup:
    """Ranks that run micro-batches of one kind.

    Attributes:
        first: first rank.
        kind: number of the kind.
        rows: for each micro-batch: the sequences of each row.
        rooms: for each micro-batch: the tokens left in each row.
        left_s: seconds until the end of the step.
        taken: tokens of short sequences to put into its micro-batches.
        open: whether all its ranks are free after it.
    """

    first: int
    kind: int
    rows: list[list[list[int]]] = field(default_factory=list)
    rooms: list[list[float]] = field(default_factory=list)
    left_s: float = 0.0
    taken: float = 0.0
    open: bool = True


@dataclass(frozen=True, slots=True)
class _Places:
    """Places where a sequence could go: one entry of each array a place.

    Attributes:
        anew: number of the first places, which make a group; the others have one.
        where: number of the segment or group; of a group to begin inside, after all segments; of
            one to launch a micro-batch, after all groups.
        kind: kind of the group that runs it.
        left_s: seconds that the group has left then.
        room: tokens of room that the group has then.
        before: tokens of short sequences that these ranks would run without it.
        cost_s: rank-seconds of the sequence there.
    """

    anew: int
    where: Integers
    kind: Integers
    left_s: Floats
    room: Floats
    before: Floats
    cost_s: Floats


class Laid:
    """The long sequences of a batch on ranks.

    Attributes:
        fluid, work: the batch.
        groups: groups in the order in which ranks run them.
        segments: ranks without a group, or after one.
    """

    def __init__(self, fluid: ShortFluid) -> None:
        """Makes one without groups and ranks."""
        self.fluid, self.work = fluid, fluid.work
        self.groups: list[LaidGroup] = []
        self.segments: list[Segment] = []


class Layout(Laid):
    """The long sequences of a batch placed in a step of given seconds.

    Attributes:
        step_s: seconds of the step.
        spare: tokens that could be taken up besides the short sequences; < 0: it is too short, by
            about so many.
    """

    def __init__(self, fluid: ShortFluid, step_s: float) -> None:
        """Places the sequences."""
        super().__init__(fluid)
        work, self.step_s = self.work, step_s
        self.segments = [Segment(0, work.ranks, step_s)]
        count = work.long
        self._kind: Integers = np.zeros(count, dtype=np.int64)
        self._left_s, self._room, self._row = np.zeros(count), np.zeros(count), np.zeros(count)
        self._value, self._taken = np.zeros(count), np.zeros(count)
        self._open = np.zeros(count, dtype=bool)
        most = work.ranks * float(fluid.rank_tokens(np.array(step_s)))
        self.spare = most - work.short_tokens
        for sequence in range(count):
            if self.spare < 0 or not self._place(sequence):
                self.spare = min(self.spare, -float(work.lengths[sequence:].sum()))
                break

    def _place(self, sequence: int) -> bool:
        """Places one sequence; False: it fits nowhere."""
        places = self._places(sequence)
        value, taken = self.fluid.group_tokens(places.left_s, places.room, places.kind)
        displaced = places.before - value
        cost = displaced + _THRIFT / self.work.pace_s[self.work.base] * places.cost_s
        for _ in range(min(_TRIED, len(cost))):
            at = int(cost.argmin())
            if not np.isfinite(cost[at]):
                return False
            group = self._enter(places, at, sequence)
            if group is not None:
                self._left_s[group], self._room[group] = places.left_s[at], places.room[at]
                self._value[group], self._taken[group] = value[at], taken[at]
                self.groups[group].left_s = float(places.left_s[at])
                self.groups[group].taken = float(taken[at])
                self.spare -= float(displaced[at])
                return True
            cost[at] = np.inf
        return False

    def _places(self, sequence: int) -> _Places:
        work, count = self.work, len(self.groups)
        tokens, fixed_s = work.lengths[sequence], work.fixed_s
        alone_s = self.fluid.alone_s[:, sequence]
        own, left_s, is_open = self._kind[:count], self._left_s[:count], self._open[:count]
        self.segments.sort(key=lambda s: s.size)
        size = np.array([s.size for s in self.segments], dtype=np.int64)
        free_s = np.array([s.left_s for s in self.segments])
        # A group inside another one is smaller, and begins after that one's short sequences.
        size = np.concatenate([size, np.where(is_open, work.degree[own] - 1, 0)])
        free_s = np.concatenate([free_s, left_s - self._taken[:count] * work.pace_s[own]])
        fits = (free_s[:, None] >= alone_s) & (work.degree <= size[:, None])
        begun, kind = np.nonzero(fits)
        before = work.degree[kind] * self.fluid.rank_tokens(free_s)[begun]
        # Micro-batches that a group has launched, and one more of each group.
        join_s = left_s - (alone_s - fixed_s)[own]
        then_s = np.concatenate([join_s, join_s - fixed_s[own]])
        fits = np.concatenate([is_open & (self._row[:count] >= tokens), is_open])
        added = np.nonzero(fits & (then_s >= -_ROUNDING))[0]
        group = added % max(1, count)
        room = self._room[group] + np.where(added < count, 0.0, work.tokens[own[group]]) - tokens
        kinds = np.concatenate([kind, own[group]])
        then_s = np.concatenate([free_s[begun] - alone_s[kind], then_s[added]])
        since_s = np.concatenate([free_s[begun], left_s[group]])
        return _Places(
            len(begun),
            np.concatenate([begun, added]),
            kinds,
            then_s,
            np.concatenate([work.tokens[kind] - tokens, room]),
            np.concatenate([before, self._value[group]]),
            work.degree[kinds] * (since_s - then_s),
        )

    def _enter(self, places: _Places, at: int, sequence: int) -> int | None:
        """Puts a sequence in a place; returns the number of its group, None: ranks do not allow."""
        where, degree = int(places.where[at]), int(self.work.degree[places.kind[at]])
        if at >= places.anew:
            number = where % len(self.groups)
            if where >= len(self.groups):
                self._launch(number)
            self._add(number, sequence)
            return number
        if where >= len(self.segments):
            within = where - len(self.segments)
            outer = self.groups[within]
            outer.open = self._open[within] = False
            left_s = outer.left_s - outer.taken * self.work.pace_s[outer.kind]
            size = int(self.work.degree[outer.kind])
            self.segments.append(Segment(outer.first, size, float(left_s)))
            where = len(self.segments) - 1
        own = self.segments[where]
        first = first_rank(self.work, own.first, own.size, degree)
        if first is None:
            return None
        self._split(self.segments.pop(where), first, degree)
        number = len(self.groups)
        self.groups.append(LaidGroup(first, int(places.kind[at])))
        self._kind[number], self._open[number] = places.kind[at], True
        self._launch(number)
        self._add(number, sequence)
        return number

    def _launch(self, number: int) -> None:
        group = self.groups[number]
        kind = self.work.kinds[group.kind]
        group.rows.append([[] for _ in range(kind.rows)])
        group.rooms.append([float(kind.room)] * kind.rows)
        self._row[number] = kind.room

    def _add(self, number: int, sequence: int) -> None:
        """Lays a sequence into the row of a group that has least room for it."""
        group, tokens = self.groups[number], float(self.work.lengths[sequence])
        _, batch, row = min(
            (room, batch, row)
            for batch, rooms in enumerate(group.rooms)
            for row, room in enumerate(rooms)
            if room >= tokens
        )
        group.rows[batch][row].append(sequence)
        group.rooms[batch][row] -= tokens
        self._row[number] = max(max(rooms) for rooms in group.rooms)

    def _split(self, segment: Segment, first: int, degree: int) -> None:
        """Leaves the ranks before and after a new group as segments."""
        after, end = first + degree, segment.first + segment.size
        if first > segment.first:
            self.segments.append(Segment(segment.first, first - segment.first, segment.left_s))
        if after < end:
            self.segments.append(Segment(after, end - after, segment.left_s))


def first_rank(work: PackedWork, first: int, size: int, degree: int) -> int | None:
    """Returns the first of so many ranks of a block; small groups stay inside a node."""
    end, begin = first + size, first
    if work.aligned:
        begin = -(-first // degree) * degree
    elif degree >= work.node_ranks:
        begin = -(-first // work.node_ranks) * work.node_ranks
        if begin + degree > end:
            begin = first
    elif first // work.node_ranks != (first + degree - 1) // work.node_ranks:
        begin = (first // work.node_ranks + 1) * work.node_ranks
    return begin if begin + degree <= end else None
