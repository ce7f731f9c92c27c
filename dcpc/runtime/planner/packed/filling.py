"""From a layout to micro-batches: the short sequences, the longest first, where most room is."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from math import inf

import numpy as np

from dcpc.runtime.planner.packed.fluid import ShortFluid
from dcpc.runtime.planner.packed.layout import Laid
from dcpc.runtime.planner.packed.ways import Floats, PackedWork

# Micro-batches that are offered a sequence before it counts as left over.
_OFFERS = 8
_ROUNDING = 1e-9


@dataclass(slots=True)
class Bin:
    """A micro-batch under construction.

    Attributes:
        kind: number of its kind.
        first: first rank.
        rows: the sequences of each row.
        rooms: tokens that each row has left.
        load_s: seconds of its sequences.
    """

    kind: int
    first: int
    rows: list[list[int]]
    rooms: list[float]
    load_s: float = 0.0

    @property
    def empty(self) -> bool:
        """Whether it has no sequence."""
        return not any(self.rows)

    def add(self, work: PackedWork, sequence: int) -> bool:
        """Lays a sequence into the row with least room for it; False: no row has enough."""
        tokens = float(work.lengths[sequence])
        fitting = [(room, r) for r, room in enumerate(self.rooms) if room >= tokens]
        if not fitting:
            return False
        _, row = min(fitting)
        self.rows[row].append(sequence)
        self.rooms[row] -= tokens
        self.load_s += float(work.load_s[self.kind, sequence])
        return True


@dataclass(slots=True)
class PackedDraft:
    """The micro-batches of a step, in the order in which ranks run them.

    Attributes:
        work: the batch.
        bins: every micro-batch; an empty one does not run.
    """

    work: PackedWork
    bins: list[Bin] = field(default_factory=list)

    def ends_s(self) -> Floats:
        """Returns when each rank ends."""
        work = self.work
        free_s = np.zeros(work.ranks)
        for own in self.bins:
            if not own.empty:
                ranks = slice(own.first, own.first + work.kinds[own.kind].degree)
                free_s[ranks] = free_s[ranks].max() + work.fixed_s[own.kind] + own.load_s
        return free_s


def filled(layout: Laid) -> PackedDraft:
    """Returns the micro-batches of a layout with every short sequence in one.

    Sequences without room within the layout's seconds go where they end earliest.
    """
    work, filling = layout.work, _ShortFilling(layout)
    short = range(work.long, len(work.lengths))
    left = [s for s in short if not filling.offer(s)]
    if left:
        squeezing = _Squeezing(filling.draft, len(left))
        for sequence in left:
            squeezing.put(sequence)
    return filling.draft


class _ShortFilling:
    """The micro-batches of a layout, which take short sequences where there is most room.

    Those that the same ranks run one after the other share the seconds that are left for these.
    """

    def __init__(self, layout: Laid) -> None:
        self._work = layout.work
        self.draft = PackedDraft(layout.work)
        self._left_s: list[float] = []  # of micro-batches that share them
        self._shared: list[int] = []  # number in `_left_s`, of each micro-batch
        self._open(layout)
        bins = range(len(self.draft.bins))
        self._most = [(-self._room(number), number) for number in bins]
        heapq.heapify(self._most)

    def offer(self, sequence: int) -> bool:
        """Offers a sequence to the micro-batches with most room; returns whether one took it."""
        refused: list[tuple[float, int]] = []
        took = False
        while self._most and not took and len(refused) < _OFFERS:
            told, number = heapq.heappop(self._most)
            now = -self._room(number)
            if now > told + _ROUNDING:
                heapq.heappush(self._most, (now, number))
                continue
            own, shared = self.draft.bins[number], self._shared[number]
            load_s = float(self._work.load_s[own.kind, sequence])
            in_time = self._left_s[shared] >= load_s - _ROUNDING
            took = in_time and own.add(self._work, sequence)
            if took:
                self._left_s[shared] -= load_s
                heapq.heappush(self._most, (-self._room(number), number))
            else:
                refused.append((told, number))
        for entry in refused:
            heapq.heappush(self._most, entry)
        return took

    def _room(self, number: int) -> float:
        """Tokens of short sequences that a micro-batch can still take, in time."""
        own = self.draft.bins[number]
        in_time = self._left_s[self._shared[number]] / self._work.pace_s[own.kind]
        return float(min(in_time, sum(own.rooms)))

    def _open(self, layout: Laid) -> None:
        """Makes the groups' micro-batches, then those of ranks that are free at the end."""
        work = self._work
        free = [(s.first, s.size, s.left_s) for s in layout.segments]
        for group in layout.groups:
            taken_s = float(group.taken * work.pace_s[group.kind])
            bins = []
            for rows, rooms in zip(group.rows, group.rooms, strict=True):
                load_s = sum(float(work.load_s[group.kind, s]) for row in rows for s in row)
                own = [[*row] for row in rows]
                bins.append(Bin(group.kind, group.first, own, [*rooms], load_s))
            self._share(bins, taken_s)
            if group.open:
                free.append((group.first, int(work.degree[group.kind]), group.left_s - taken_s))
        for first, size, left_s in free:
            self._stack(layout.fluid, first, size, left_s)

    def _stack(self, fluid: ShortFluid, first: int, size: int, left_s: float) -> None:
        """Makes the micro-batches of groups of the base degree on free ranks."""
        count, number = fluid.bins(left_s)
        if not count:
            return
        kind = self._work.kinds[number]
        begin = -(-first // kind.degree) * kind.degree if self._work.aligned else first
        for at in range(begin, first + size - kind.degree + 1, kind.degree):
            bins = [empty_bin(self._work, number, at) for _ in range(count)]
            self._share(bins, left_s - count * kind.fixed_s)

    def _share(self, bins: list[Bin], left_s: float) -> None:
        self._shared += [len(self._left_s)] * len(bins)
        self._left_s.append(left_s)
        self.draft.bins += bins


def empty_bin(work: PackedWork, number: int, first: int) -> Bin:
    """Returns a micro-batch of a kind without sequences."""
    kind = work.kinds[number]
    return Bin(number, first, [[] for _ in range(kind.rows)], [float(kind.room)] * kind.rows)


class _Squeezing:
    """Puts each remaining sequence where it ends earliest, in a micro-batch with room or a new one.

    A rank with more work ends later: ranks that wait for it are not computed again.
    """

    def __init__(self, draft: PackedDraft, left: int) -> None:
        self._work, self._draft = draft.work, draft
        self._ends_s = draft.ends_s()
        self._of_rank: list[list[int]] = [[] for _ in range(draft.work.ranks)]
        count = len(draft.bins) + left  # each may need one more; until then it has no room
        self._kind, self._room = np.zeros(count, dtype=np.int64), np.zeros(count)
        self._launch_s, self._end_s = np.zeros(count), np.zeros(count)
        for number in range(len(draft.bins)):
            self._note(number)
            self._see(number)

    def put(self, sequence: int) -> None:
        """Puts one sequence where it ends earliest."""
        work, tokens = self._work, float(self._work.lengths[sequence])
        found_s = self._end_s + self._launch_s + work.load_s[self._kind, sequence]
        found_s[self._room < tokens] = inf
        number = int(found_s.argmin())
        kind = min(work.bases, key=lambda j: work.load_s[j, sequence] + work.fixed_s[j])
        degree = work.kinds[kind].degree
        blocks = work.ranks // degree
        block_s = self._ends_s[: blocks * degree].reshape(blocks, degree).max(axis=1)
        block = int(block_s.argmin())
        alone_s = float(block_s[block] + work.load_s[kind, sequence] + work.fixed_s[kind])
        if alone_s < found_s[number]:
            number = len(self._draft.bins)
            self._draft.bins.append(empty_bin(work, kind, block * degree))
            self._note(number)
        own = self._draft.bins[number]
        more_s = own.empty * work.fixed_s[own.kind] + work.load_s[own.kind, sequence]
        own.add(work, sequence)
        last = own.first + work.kinds[own.kind].degree
        self._ends_s[own.first : last] += more_s
        for other in {n for rank in range(own.first, last) for n in self._of_rank[rank]}:
            self._see(other)

    def _note(self, number: int) -> None:
        own = self._draft.bins[number]
        self._kind[number] = own.kind
        for rank in range(own.first, own.first + self._work.kinds[own.kind].degree):
            self._of_rank[rank].append(number)

    def _see(self, number: int) -> None:
        """Reads a micro-batch's room, end and launch again."""
        own = self._draft.bins[number]
        ranks = slice(own.first, own.first + self._work.kinds[own.kind].degree)
        self._room[number], self._end_s[number] = max(own.rooms), self._ends_s[ranks].max()
        self._launch_s[number] = own.empty * self._work.fixed_s[own.kind]
