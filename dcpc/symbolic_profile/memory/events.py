"""Allocations and frees of a run in the order they happen, and those of copies that stand for more.

Where a copy of a block stands for more (`Fold`), the bytes that the others leave behind are added
where they would run: in forward after the middle copy, in backward before it. All live bytes are
affine in the number of copies, so the first or the last copy has the peak.

Where some copies keep gathered parameters from forward (`Kept`), those and the others are two
stretches of copies, each affine:

    backward   last | keeps .. keeps | keeps, gathers the next one's | gathers .. gathers | first
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import sympy
from torch import fx

from dcpc.ir import OUTSIDE, Fold
from dcpc.symbolic_profile.ops.fused.fusion import Kernel
from dcpc.symbolic_profile.ops.fused.realize import MOST_READS

Own = tuple[tuple[int, sympy.Expr], ...]  # identity and bytes of each storage of a value
Steps = Sequence[fx.Node | Kernel]
Place = tuple[int, int]  # steps, points before it
Events = list[tuple[int, int, int]]  # number of a size, weight, storage
# Of calls: each with the identity and bytes of the storage of each of its tensors.
StoragesOf = Callable[[Sequence[fx.Node]], Sequence[tuple[fx.Node, int, sympy.Expr]]]


@dataclass(frozen=True, slots=True)
class Kept:
    """Copies, from the last on, that keep parameters which the middle copy gathers again.

    Attributes:
        times: number of such copies, at least 1.
        sizes: numbers of the bytes that each copy keeps from forward to backward.
        read: positions of the kept parameters.
        own: call of the middle copy that gathers them again.
        before: call of the first copy that gathers them.
    """

    times: int
    sizes: tuple[int, ...]
    read: tuple[int, ...]
    own: fx.Node
    before: fx.Node


@dataclass(frozen=True, slots=True)
class Folding:
    """Positions in a list of calls of the copies whose steps are repeated.

    Attributes:
        run: number of the run of blocks.
        first: position of the middle copy's first call.
        stop: position after its last.
        after: whether the others run after it (forward) or before it.
        times: number of other copies.
        first_copy: names of the first copy's steps in backward, where kernels are fused.
        kept: other copies that keep parameters; None: none do.
    """

    run: int
    first: int
    stop: int
    after: bool
    times: int
    first_copy: frozenset[str] = frozenset()
    kept: Kept | None = None

    @classmethod
    def forward(cls, fold: Fold | None, steps: Steps, kept: Mapping[int, Kept]) -> list[Folding]:
        """Returns the middle copies' steps of forward, in order."""
        if fold is None:
            return []
        copies = [fold.copy(n.name) for n in steps]
        found = []
        for r, times in enumerate(fold.others):
            first, stop = copies.index((r, 1)), copies.index((r, 2))
            found.append(cls(r, first, stop, True, times, kept=kept.get(r)))
        return sorted(found, key=lambda f: f.first)

    @classmethod
    def backward(
        cls,
        fold: Fold | None,
        steps: Steps,
        again: set[fx.Node],
        fuses: bool,
        kept: Mapping[int, Kept],
    ) -> list[Folding]:
        """Returns the middle copies' steps of backward, with the recomputed ones before them."""
        if fold is None:
            return []
        copies = [fold.copy(n.name) for n in steps]
        made = [again.issuperset(n.makes if isinstance(n, Kernel) else (n,)) for n in steps]
        first: dict[tuple[int, int], int] = {}
        for i, copy in enumerate(copies):
            if copy not in first and not made[i]:
                first[copy] = i
                while first[copy] and copies[first[copy] - 1] == copy:
                    first[copy] -= 1
        found = []
        for r, times in enumerate(fold.others):
            stop = first[r, 0]
            while made[stop - 1] and copies[stop - 1] == OUTSIDE:
                stop -= 1  # what only the first copy needs again from outside
            own = zip(steps, copies, strict=True)
            names = frozenset(n.name for n, copy in own if fuses and copy == (r, 0))
            found.append(cls(r, first[r, 1], stop, False, times, names, kept.get(r)))
        return sorted(found, key=lambda f: f.first)


@dataclass(frozen=True, slots=True)
class _MiddleSteps:
    """The steps of a middle copy in backward.

    Attributes:
        place: position of its first step, and number of points before it.
        own: steps of the copy.
        differing: differences to make up for after them.
        points: steps before each of its points, the number of its transient, and its name.
    """

    place: Place
    own: Events
    differing: Events
    points: Sequence[tuple[int, int, str]]


@dataclass(slots=True)
class Recorder:
    """Allocations and frees in the order they happen, and the points between them.

    Attributes:
        resident: storages that are not counted.
        steps: number of the size of each allocation or free.
        weights: 1 for an allocation, -1 for a free; times the copies that it stands for.
        storages: storage of each allocation or free.
        done: steps done at each point.
        transients: number of the size of each point's transient.
        names: node of each point.
        made: run of blocks -> storages that its middle copy made.
    """

    resident: set[int] = field(default_factory=set)
    steps: list[int] = field(default_factory=list)
    weights: list[int] = field(default_factory=list)
    storages: list[int] = field(default_factory=list)
    done: list[int] = field(default_factory=list)
    transients: list[int] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    made: dict[int, set[int]] = field(default_factory=dict)

    def step(self, size: int, weight: int, storage: int) -> None:
        """Adds an allocation or a free."""
        self.steps.append(size)
        self.weights.append(weight)
        self.storages.append(storage)

    def mark(self, name: str, transient: int = 0) -> None:
        """Records a program point, and the number of its call's transient bytes."""
        self.done.append(len(self.steps))
        self.transients.append(transient)
        self.names.append(name)

    def repeat(
        self, folding: Folding, reached: Mapping[int, Place], start: int, storages_of: StoragesOf
    ) -> None:
        """Repeats the steps of a middle copy for the others.

        What these free of the one before them is what the copy after the middle one frees of it:
        the copy before may hand on something else, or the middle one be the last that reads a value
        from outside. The difference is made up after the steps. What all copies leave to the end,
        parts of a sum that a fused kernel makes, is freed there, but for what so many are that the
        kernel before it makes their sum.

        In forward the last copy has all that the others keep. In backward it has nothing of what
        they hand on: the first of them may need the most, and gets points of its own.
        """
        (first, begin), (stop, end) = reached[folding.first], reached[folding.stop]
        made = self.made.setdefault(folding.run, set())
        made |= {self.storages[i] for i in range(first, stop) if self.weights[i] > 0}
        frees = [i for i in range(start, len(self.steps)) if self.weights[i] < 0]
        more = Counter(self.steps[i] for i in frees if first <= i < stop)
        late = set(self._left(folding, made, [i for i in frees if i >= stop], (start, first)))
        handed = [i for i in frees if self.storages[i] in made and i not in late]
        more.subtract(self.steps[i] for i in handed)
        left = min(folding.times, MOST_READS)
        for i in late:
            self.weights[i] *= 1 + left
        own: Events = [*zip(*(kept[first:stop] for kept in self._events), strict=True)]
        differing: Events = [(size, count, -1) for size, count in more.items() if count]
        kept = folding.kept
        if folding.after:
            self._insert(stop, end, [*own, *differing], folding.times)
            if kept is not None:
                self._insert(stop, end, [(size, 1, -1) for size in kept.sizes], kept.times)
            return
        points = [(self.done[p], self.transients[p], self.names[p]) for p in range(begin, end)]
        # What it frees more than its steps say it may free last, what less it keeps from the start.
        self._insert(stop, end, [event for event in differing if event[1] < 0], 1)
        self._insert(first, begin, [event for event in differing if event[1] > 0], 1)
        if left < folding.times:
            summed = [(self.steps[i], left - folding.times, -1) for i in sorted(late)]
            self._insert(first, begin, summed, 1)
        stretch = _MiddleSteps((first, begin), own, differing, points)
        if kept is None:
            self._insert_copies(stretch, folding.times, top=True)
        else:
            self._insert_keeping(stretch, folding.times, kept, start, storages_of)

    def _insert_keeping(
        self, stretch: _MiddleSteps, times: int, kept: Kept, start: int, storages_of: StoragesOf
    ) -> None:
        """Puts copies of which the last keep parameters before the middle one.

        A unit is gathered while the copy after its own runs, where its turn comes so early: the
        first copy that keeps its parameters then gathers those of the one before.
        """
        own = [[s for _, s, _ in storages_of([n])][:-1] for n in (kept.own, kept.before)]
        every = {s for storages in own for s in storages}  # but for tokens
        read = {storages[i] for storages in own for i in kept.read}

        def goes(weight: int, storage: int) -> bool:
            return storage in every and (weight > 0 or storage not in read)

        first, begin = stretch.place
        early = False
        for i in range(start, first):
            if goes(self.weights[i], self.storages[i]):
                self.weights[i], early = 0, True
        for p in range(begin):
            if self.names[p] == kept.own.name and self.done[p] > start:
                self.transients[p] = 0
        crossing = min(1, kept.times) * early
        self._insert_copies(stretch, times - kept.times, top=False)
        self._insert_copies(stretch, crossing, top=kept.times == crossing)
        gathers = {kept.own.name, kept.before.name}
        silent = _MiddleSteps(
            stretch.place,
            [(size, 0 if goes(w, s) else w, s) for size, w, s in stretch.own],
            stretch.differing,
            [(d, 0 if name in gathers else t, name) for d, t, name in stretch.points],
        )
        self._insert_copies(silent, kept.times - crossing, top=True)

    def _insert_copies(self, stretch: _MiddleSteps, times: int, *, top: bool) -> None:
        """Puts copies before others; the first of them gets points of its own."""
        if not times:
            return
        (first, begin), own, differing = stretch.place, stretch.own, stretch.differing
        happens = [event for event in own if event[1]]
        self._insert(first, begin, [*happens, *differing], times - 1)
        self._insert(first, begin, own if top else [*own, *differing], 1)
        done, transients, names = (
            zip(*stretch.points, strict=True) if stretch.points else ((), (), ())
        )
        self.done[begin:begin], self.transients[begin:begin] = done, transients
        self.names[begin:begin] = names

    def _left(
        self, folding: Folding, made: set[int], frees: Sequence[int], before: Place
    ) -> list[int]:
        """Returns the frees of values that all copies leave to a fused kernel that sums them.

        The kernel also frees values of copies before the middle one, or runs after the first one.
        """
        if not folding.first_copy:
            return []
        points = range(len(self.names) - 1, -1, -1)
        end = next((self.done[p] for p in points if self.names[p] in folding.first_copy), 0)
        earlier = {self.storages[i] for i in range(*before) if self.weights[i] > 0}
        kernel = {i: (self.steps[i], bisect_right(self.done, i)) for i in frees}
        sums = {kernel[i] for i in frees if self.storages[i] in earlier}
        return [i for i in frees if self.storages[i] in made and (i >= end or kernel[i] in sums)]

    @property
    def _events(self) -> tuple[list[int], list[int], list[int]]:
        return self.steps, self.weights, self.storages

    def _insert(self, at: int, point: int, events: Events, times: int) -> None:
        """Puts steps before others, and before a point, so many times."""
        if not events or not times:
            return
        steps, weights, storages = zip(*events, strict=True)
        self.steps[at:at] = steps
        self.weights[at:at] = [w * times for w in weights]
        self.storages[at:at] = storages
        self.done[point:] = [d + len(steps) for d in self.done[point:]]
