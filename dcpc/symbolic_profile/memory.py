"""Live memory of a forward and a backward at every program point.

    node        allocates its outputs' storages (a view allocates none), and its transient
                -> a program point: live + transient
    last use    of all values in a storage -> the storage is freed

Forward's placeholders (parameters, buffers, inputs) are resident and not counted. After forward
the loss and the saved values live; backward frees a saved value after its last use; gradients
live to the end. Sizes are those of storages, not of shapes: a saved slice keeps the whole of what
it is cut from.

Where copies of a block stand for more (`Fold`), what they leave behind is added where the others
would run, in forward after the middle one, in backward before it. All live bytes are affine in the
number of copies, so that the first and the last of them have the peak of all.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import sympy
from torch import fx

from dcpc.ir import OUTSIDE, Fold, Partition, Schedule
from dcpc.symbolic_profile.facts import Facts
from dcpc.symbolic_profile.fusion import MOST_READS, Kernel, fuse
from dcpc.symbolic_profile.polynomials import Basis, Floats, Integers

Transient = Callable[[fx.Node], sympy.Expr]
Own = tuple[tuple[int, sympy.Expr], ...]  # identity and bytes of each storage of a value
Steps = Sequence[fx.Node | Kernel]
Place = tuple[int, int]  # steps, points before it
Events = list[tuple[int, int, int]]  # number of a size, weight, storage
ZERO = sympy.Integer(0)  # sympy has one zero


@dataclass(frozen=True, slots=True)
class Run:
    """What one rank runs: calls of forward, then calls of backward.

    Attributes:
        primals: forward's placeholders.
        forward: its calls.
        loss: what it returns first.
        saved: what it returns for backward.
        given: backward's placeholders and the forward values they take.
        tangent: backward's placeholder for the loss's gradient.
        backward: its calls; a node of forward among them is made again.
        gradients: what it returns; None for a parameter without a gradient.
    """

    primals: Sequence[fx.Node]
    forward: Sequence[fx.Node]
    loss: fx.Node
    saved: Sequence[fx.Node]
    given: Sequence[tuple[fx.Node, fx.Node]]
    tangent: fx.Node
    backward: Sequence[fx.Node]
    gradients: Sequence[fx.Node | None]

    @classmethod
    def of(cls, what: Partition | Schedule) -> Run:
        """Returns what the graphs of a partition run, or what a schedule says."""
        if isinstance(what, Schedule):
            return cls(
                primals=what.primals,
                forward=what.forward,
                loss=what.loss,
                saved=what.saved,
                given=[(n, n) for n in (*what.saved, *what.backward_primals)],
                tangent=what.tangent,
                backward=what.backward,
                gradients=what.gradients,
            )
        forward, backward = what.forward.graph, what.backward.graph
        by_name = {n.name: n for n in forward.nodes}
        names = [*what.saved, *what.backward_primals]
        *taken, tangent = (n for n in backward.nodes if n.op == "placeholder")
        assert len(taken) == len(names), (
            f"backward takes {len(taken)} values and the loss' gradient; forward gives {len(names)}"
        )
        loss, *saved = _outputs(forward)
        return cls(
            primals=[n for n in forward.nodes if n.op == "placeholder"],
            forward=_calls(forward),
            loss=loss,
            saved=saved,
            given=[(n, by_name[name]) for n, name in zip(taken, names, strict=True)],
            tangent=tangent,
            backward=_calls(backward),
            gradients=_outputs(backward),
        )


def _calls(graph: fx.Graph) -> list[fx.Node]:
    return [n for n in graph.nodes if n.op not in ("placeholder", "output")]


def _outputs(graph: fx.Graph) -> list[Any]:
    outputs = graph.output_node().args[0]
    assert isinstance(outputs, list | tuple), f"the graph returns {outputs}; expected a list"
    return list(outputs)


@dataclass(frozen=True, slots=True)
class Timeline:
    """Live bytes at each program point, as sums over numbered sizes.

    Attributes:
        sizes: the distinct sizes.
        steps: number of the size of each allocation or free.
        weights: 1 for an allocation, -1 for a free; times the copies that it stands for.
        storages: which storage each of them is of.
        done: steps done at each point.
        transients: number of the size of each point's transient.
        names: node of each point.
        saved: size -> how often it is among the saved values' distinct storages.
        gradients: the same for what backward returns.
    """

    sizes: tuple[sympy.Expr, ...]
    steps: Integers
    weights: Integers
    storages: tuple[int, ...]
    done: Integers
    transients: Integers
    names: tuple[str, ...]
    saved: Mapping[sympy.Expr, int]
    gradients: Mapping[sympy.Expr, int]

    def live(self, values: Any) -> Any:
        """Returns the live bytes of each point, `[points]` or `[points, n]`.

        Args:
            values: of the sizes, `[sizes]`, or `[sizes, n]`: n numbers, or coefficients of n terms.
        """
        taken = values[self.steps]
        weights = self.weights if taken.ndim == 1 else self.weights[:, None]
        start = np.zeros((1, *values.shape[1:]), dtype=values.dtype)
        live = np.concatenate([start, np.cumsum(taken * weights, axis=0, dtype=values.dtype)])
        return live[self.done] + values[self.transients]


def live_rows(timeline: Timeline) -> tuple[Floats, Basis]:
    """Returns the live bytes at each point, as a row over the basis of all sizes."""
    basis = Basis(timeline.sizes)
    return timeline.live(basis.matrix(timeline.sizes)), basis


@dataclass(slots=True)
class _Recorder:
    """Allocations and frees in the order they happen, and the points between them.

    Attributes:
        transient: bytes that a call has besides its outputs.
        resident: storages that are not counted.
        holders: storage -> number of values in it.
        numbers: size -> its number.
        number_of: storage -> number of its size, once it was allocated.
        made: run of blocks -> storages that its middle copy made.
    """

    transient: Transient
    resident: set[int] = field(default_factory=set)
    holders: dict[int, int] = field(default_factory=dict)
    numbers: dict[sympy.Expr, int] = field(default_factory=lambda: {ZERO: 0})
    number_of: dict[int, int] = field(default_factory=dict)
    steps: list[int] = field(default_factory=list)
    weights: list[int] = field(default_factory=list)
    storages: list[int] = field(default_factory=list)
    done: list[int] = field(default_factory=list)
    transients: list[int] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    made: dict[int, set[int]] = field(default_factory=dict)

    def number(self, size: sympy.Expr) -> int:
        return self.numbers.setdefault(size, len(self.numbers))

    def hold(self, storages: Own) -> bool:
        """Adds a value; allocates what it lies in. Returns whether anything was allocated."""
        before = len(self.steps)
        for storage, size in storages:
            if storage in self.resident:
                continue
            count = self.holders.get(storage, 0)
            if not count:
                number = self.number_of[storage] = self.number(size)
                self.steps.append(number)
                self.weights.append(1)
                self.storages.append(storage)
            self.holders[storage] = count + 1
        return len(self.steps) > before

    def drop(self, storages: Own) -> None:
        """Removes a value; frees what no other value lies in."""
        for storage, _ in storages:
            count = self.holders.get(storage, 0)
            if count:
                self.holders[storage] = count - 1
                if count == 1:
                    self.steps.append(self.number_of[storage])
                    self.weights.append(-1)
                    self.storages.append(storage)

    def mark(self, name: str, transient: sympy.Expr) -> None:
        """Notes a program point."""
        self.done.append(len(self.steps))
        self.transients.append(0 if transient is ZERO else self.number(transient))
        self.names.append(name)

    def repeat(self, folding: _Folding, reached: Mapping[int, Place], start: int) -> None:
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
        late = self._left(folding, made, [i for i in frees if i >= stop], (start, first))
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
            summed = [(self.steps[i], left - folding.times, -1) for i in late]
            self._insert(first, begin, summed, 1)
        self._insert(first, begin, [*own, *differing], folding.times - 1)
        self._insert(first, begin, own, 1)
        self.done[begin:begin], self.transients[begin:begin] = done, transients
        self.names[begin:begin] = self.names[begin:end]

    def _left(
        self, folding: _Folding, made: set[int], frees: Sequence[int], before: Place
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


class _Storages:
    """Which memory each node's value lies in, told from its inputs alone.

    What the facts say is whether a node's value is a view of an *input*. It is no identity beyond
    that: a recomputed node says the same as the one it repeats, and graphs that were traced apart
    do not share any.
    """

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self._own: dict[fx.Node, Own] = {}
        self._count = itertools.count()

    def of(self, node: fx.Node) -> Own:
        """Returns identity and bytes of each tensor's storage of a node that was entered."""
        return self._own[node]

    def enter(self, node: fx.Node) -> Own:
        """Gives a node's value its storages: its inputs' where it is a view, else new ones."""
        aliases = self.facts.aliases(node)
        if len(aliases) == 1:
            source, first, size = aliases[0]
            one = (next(self._count), size) if source is None else self._own[source][first]
            self._own[node] = only = (one,)
            return only
        own: list[tuple[int, sympy.Expr]] = []
        for source, first, size in aliases:
            if source is not None:
                own.append(self._own[source][first])
            else:
                own.append((next(self._count), size) if first == len(own) else own[first])
        self._own[node] = found = tuple(own)
        return found

    def make(self, kernel: Kernel) -> Own:
        """Gives what a fused kernel makes its storages: new ones, or those it takes."""
        found: list[tuple[int, sympy.Expr]] = []
        for node in kernel.makes:
            taken = kernel.in_place.get(node)
            new = [(next(self._count), t.storage_bytes) for t in self.facts.of(node)]
            self._own[node] = tuple(new) if taken is None else self._own[taken]
            found += self._own[node]
        return tuple(found)

    def start_backward(self, given: Iterable[tuple[fx.Node, fx.Node]]) -> None:
        """Forgets forward's values but for those that backward's placeholders take."""
        self._own = {node: self._own[source] for node, source in given}


def timeline_of(
    run: Run,
    facts: Facts,
    transient: Transient,
    fold: Fold | None = None,
    fuses: bool = False,
) -> Timeline:
    """Returns the allocations and frees of a run.

    Args:
        run: the calls of one rank.
        facts: reads its nodes.
        transient: bytes that a call has besides its outputs.
        fold: which copies of a block stand for more.
        fuses: whether the backend makes kernels of what is pointwise, as Inductor does.
    """
    again = set(run.forward)
    if fuses:
        returned = [g for g in run.gradients if g is not None]
        forward: Any = fuse(run.forward, [run.loss, *run.saved], facts)
        backward: Any = fuse(run.backward, returned, facts)
        run = replace(run, forward=forward, backward=backward)
    recorder, storages = _Recorder(transient), _Storages(facts)
    recorder.resident = {storage for n in run.primals for storage, _ in storages.enter(n)}
    _run(run.forward, [run.loss, *run.saved], recorder, storages, _Folding.forward(fold, run))
    loss, kept = storages.of(run.loss), [storages.of(n) for n in run.saved]
    without = recorder.resident | {storage for storage, _ in loss}
    saved = _distinct(run.saved, kept, without, fold)
    storages.start_backward(run.given)
    for node, _ in run.given:
        recorder.hold(storages.of(node))
    recorder.hold(storages.enter(run.tangent))
    for value in kept:
        recorder.drop(value)
    recorder.mark("backward", ZERO)
    outputs = [g for g in run.gradients if g is not None]
    _run(run.backward, outputs, recorder, storages, _Folding.backward(fold, run, again, fuses))
    gradients = _distinct(outputs, [storages.of(n) for n in outputs], set(), fold)
    return Timeline(
        sizes=tuple(recorder.numbers),
        steps=np.array(recorder.steps, dtype=np.int64),
        weights=np.array(recorder.weights, dtype=np.int64),
        storages=tuple(recorder.storages),
        done=np.array(recorder.done, dtype=np.int64),
        transients=np.array(recorder.transients, dtype=np.int64),
        names=tuple(recorder.names),
        saved=saved,
        gradients=gradients,
    )


@dataclass(frozen=True, slots=True)
class _Folding:
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
    def forward(cls, fold: Fold | None, run: Run) -> list[_Folding]:
        """Returns the middle copies' calls of forward, in order."""
        if fold is None:
            return []
        copies = [fold.copy(n.name) for n in run.forward]
        found = []
        for r, times in enumerate(fold.others):
            found.append(cls(r, copies.index((r, 1)), copies.index((r, 2)), True, times))
        return sorted(found, key=lambda f: f.first)

    @classmethod
    def backward(
        cls, fold: Fold | None, run: Run, again: set[fx.Node], fuses: bool
    ) -> list[_Folding]:
        """Returns the middle copies' calls of backward, with what they make again first.

        Args:
            fold: which copies stand for more.
            run: its steps are calls or kernels.
            again: the calls of forward; those in backward are made again.
            fuses: whether steps are fused kernels.
        """
        if fold is None:
            return []
        copies = [fold.copy(n.name) for n in run.backward]
        made = [again.issuperset(n.makes if isinstance(n, Kernel) else (n,)) for n in run.backward]
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
            own = zip(run.backward, copies, strict=True)
            steps = frozenset(n.name for n, copy in own if fuses and copy == (r, 0))
            found.append(cls(r, first[r, 1], stop, False, times, steps))
        return sorted(found, key=lambda f: f.first)


def _run(
    nodes: Steps,
    outputs: Iterable[fx.Node],
    recorder: _Recorder,
    storages: _Storages,
    foldings: Sequence[_Folding],
) -> None:
    """Runs calls on the timeline: allocate, mark the point, free what was used last.

    The outputs stay.
    """
    dying, read = _last_uses(nodes, outputs, storages.facts)
    start = len(recorder.steps)
    borders = {at for f in foldings for at in (f.first, f.stop)}
    reached: dict[int, Place] = {}
    made: Sequence[fx.Node]
    enter, hold, drop, of = storages.enter, recorder.hold, recorder.drop, storages.of
    for position, n in enumerate(nodes):
        if position in borders:
            reached[position] = len(recorder.steps), len(recorder.done)
        if isinstance(n, Kernel):
            made, own, transient = n.makes, storages.make(n), ZERO
        else:
            made, own, transient = (n,), enter(n), recorder.transient(n)
        allocated = hold(own)
        if allocated or transient is not ZERO:
            recorder.mark(n.name, transient)
        if position in dying:
            for used in dying[position]:
                drop(of(used))
        for unused in made:
            if unused not in read:
                drop(of(unused))
    for folding in reversed(foldings):
        recorder.repeat(folding, reached, start)


def _last_uses(
    nodes: Steps, outputs: Iterable[fx.Node], facts: Facts
) -> tuple[dict[int, list[fx.Node]], set[fx.Node]]:
    """Returns what each position's call is the last to read, and all that is read at all.

    Of what a kernel makes once more, the one before is read up to there. Outputs stay.
    """
    found: dict[fx.Node, int] = {}
    dying: dict[int, list[fx.Node]] = {}
    for position, n in enumerate(nodes):
        if isinstance(n, Kernel):
            for node in n.makes:
                if node in found:
                    dying.setdefault(found.pop(node), []).append(node)
            found |= dict.fromkeys(n.all_input_nodes, position)
        else:
            found |= dict.fromkeys(facts.reads(n), position)
    found |= dict.fromkeys(outputs, len(nodes))
    for node, position in found.items():
        dying.setdefault(position, []).append(node)
    return dying, set(found)


def _distinct(
    nodes: Sequence[fx.Node],
    storages: Sequence[Own],
    without: set[int],
    fold: Fold | None,
) -> dict[sympy.Expr, int]:
    """Returns size -> count of the nodes' distinct storages, those of other copies included."""
    found: dict[sympy.Expr, int] = {}
    seen = set(without)
    for node, own in zip(nodes, storages, strict=True):
        count = 1 if fold is None else fold.count(node.name)
        for storage, size in own:
            if storage not in seen:
                seen.add(storage)
                found[size] = found.get(size, 0) + count
    return found
