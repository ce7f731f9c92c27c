"""Allocations and frees of a run in the order they happen, and those of copies that stand for more.

Where copies of a block stand for more (`Fold`), what they leave behind is added where the others
would run, in forward after the middle one, in backward before it. All live bytes are affine in the
number of copies, so that the first and the last of them have the peak of all.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import sympy
from torch import fx

from dcpc.ir import OUTSIDE, Fold
from dcpc.symbolic_profile.ops.fusion import Kernel
from dcpc.symbolic_profile.ops.realize import MOST_READS

Own = tuple[tuple[int, sympy.Expr], ...]  # identity and bytes of each storage of a value
Steps = Sequence[fx.Node | Kernel]
Place = tuple[int, int]  # steps, points before it
Events = list[tuple[int, int, int]]  # number of a size, weight, storage


@dataclass(frozen=True, slots=True)
class Folding:
    """Where in a list of calls the copies are whose steps are done again.

    Attributes:
        run: number of the run of blocks.
        first: position of the middle copy's first call.
        stop: position after its last.
        after: whether the others run after it (forward) or before it.
        times: how many others.
        first_copy: names of the first copy's steps in backward, where kernels are fused.
    """

    run: int
    first: int
    stop: int
    after: bool
    times: int
    first_copy: frozenset[str] = frozenset()

    @classmethod
    def forward(cls, fold: Fold | None, steps: Steps) -> list[Folding]:
        """Returns the middle copies' steps of forward, in order."""
        if fold is None:
            return []
        copies = [fold.copy(n.name) for n in steps]
        found = []
        for r, times in enumerate(fold.others):
            found.append(cls(r, copies.index((r, 1)), copies.index((r, 2)), True, times))
        return sorted(found, key=lambda f: f.first)

    @classmethod
    def backward(
        cls, fold: Fold | None, steps: Steps, again: set[fx.Node], fuses: bool
    ) -> list[Folding]:
        """Returns the middle copies' steps of backward, with what they make again first.

        Args:
            fold: which copies stand for more.
            steps: calls or kernels.
            again: the calls of forward; those in backward are made again.
            fuses: whether steps are fused kernels.
        """
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
            found.append(cls(r, first[r, 1], stop, False, times, names))
        return sorted(found, key=lambda f: f.first)


@dataclass(slots=True)
class Recorder:
    """Allocations and frees in the order they happen, and the points between them.

    Attributes:
        resident: storages that are not counted.
        steps: number of the size of each allocation or free.
        weights: 1 for an allocation, -1 for a free; times the copies that it stands for.
        storages: which storage each of them is of.
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
        """Notes a program point, and the number of what its call has besides."""
        self.done.append(len(self.steps))
        self.transients.append(transient)
        self.names.append(name)

    def repeat(self, folding: Folding, reached: Mapping[int, Place], start: int) -> None:
        """Does the steps of a middle copy again for the others.

        What these free of the one before them is what the copy after the middle one frees of it:
        the copy before may hand on something else, or the middle one be the last that reads a value
        from outside. The difference is made up after the steps. What all copies leave to the end,
        parts of a sum that a fused kernel makes, is freed there, but for what so many are that the
        kernel before it makes their sum.

        In forward the last copy has all that the others keep. In backward it has nothing of what
        they hand on: the first of them may need the most, and gets points of its own.

        Args:
            folding: where the copies are.
            reached: steps and points before each place.
            start: first step of the phase.
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
        if folding.after:
            self._insert(stop, end, [*own, *differing], folding.times)
            return
        done, transients = self.done[begin:end], self.transients[begin:end]
        # What it frees more than its steps say it may free last, what less it keeps from the start.
        self._insert(stop, end, [event for event in differing if event[1] < 0], 1)
        self._insert(first, begin, [event for event in differing if event[1] > 0], 1)
        if left < folding.times:
            summed = [(self.steps[i], left - folding.times, -1) for i in sorted(late)]
            self._insert(first, begin, summed, 1)
        self._insert(first, begin, [*own, *differing], folding.times - 1)
        self._insert(first, begin, own, 1)
        self.done[begin:begin], self.transients[begin:begin] = done, transients
        self.names[begin:begin] = self.names[begin:end]

    def _left(
        self, folding: Folding, made: set[int], frees: Sequence[int], before: Place
    ) -> list[int]:
        """Returns the frees of what all copies leave to a fused kernel that sums it up.

        It frees what copies before the middle one made, too, or runs after the first copy.

        Args:
            folding: where the copies are.
            made: storages that the middle copy made.
            frees: those after it.
            before: steps of backward before it, from and up to.
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
