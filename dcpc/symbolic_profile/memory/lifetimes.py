"""Computes when each storage of a list of calls and kernels is made and freed, on arrays.

A graph's nodes are read once; each of its runs is then a few passes over arrays. A run of fused
kernels is read by itself, as which values have memory depends on what is fused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import sympy
from torch import fx

from dcpc.symbolic_profile.memory.events import Folding, Place, Recorder, Steps
from dcpc.symbolic_profile.memory.run import RankRun
from dcpc.symbolic_profile.ops.facts import Facts
from dcpc.symbolic_profile.ops.fused.fusion import Kernel
from dcpc.symbolic_profile.polynomials import Integers

Mask = npt.NDArray[np.bool_]
ZERO = sympy.Integer(0)  # sympy has one zero


@dataclass(frozen=True, slots=True)
class _Arrays:
    """All nodes, by number.

    A node's value has a slot for each of its tensors.

    Attributes:
        first_read: for each node and one more: start of its inputs in `reads`.
        reads: inputs.
        first_slot: for each node and one more: its first slot.
        above: slot of the input, or of the same value, in whose memory a slot lies; else the slot.
        root: slot that owns the memory in the end.
        size: number of the bytes of a slot's memory.
        transient: number of a call's transient bytes.
    """

    first_read: Integers
    reads: Integers
    first_slot: Integers
    above: Integers
    root: Integers
    size: Integers
    transient: Integers


@dataclass(frozen=True, slots=True)
class _MadeValues:
    """Values that a list of calls and kernels makes.

    Attributes:
        numbers: number of each value, in order.
        place: position in the list of the step that makes it; each step makes at least one.
        count: length of the list.
    """

    numbers: Integers
    place: Integers
    count: int


class Numbered:
    """Numbers the nodes of a graph: inputs of each, and the memory that its value lies in.

    Args:
        facts: reader of the nodes.
        transient: function from a call to its bytes besides the outputs.
    """

    def __init__(self, facts: Facts, transient: Callable[[fx.Node], sympy.Expr]) -> None:
        self.facts, self._transient_of = facts, transient
        self._sizes: dict[sympy.Expr, int] = {ZERO: 0}
        self._expressions: list[sympy.Expr] = [ZERO]
        self._number: dict[fx.Node, int] = {}
        self._names: list[str] = []
        self._first_read, self._first_slot = [0], [0]
        self._reads: list[int] = []
        self._above: list[int] = []
        self._size: list[int] = []
        self._transient: list[int] = []
        self._arrays: _Arrays | None = None

    def of(self, nodes: Iterable[fx.Node]) -> Integers:
        """Returns the numbers of nodes; inputs of an unknown node are known, or come before it."""
        known = self._number
        return np.array([known[n] if n in known else self._add(n) for n in nodes], dtype=np.int64)

    def fused(self) -> Numbered:
        """Returns the same sizes without any node, for one run of fused kernels."""
        found = Numbered(self.facts, self._transient_of)
        found._sizes, found._expressions = self._sizes, self._expressions
        return found

    def values(self, steps: Steps) -> _MadeValues:
        """Returns the values that steps make; with kernels among them each has its own number."""
        if not any(isinstance(step, Kernel) for step in steps):
            nodes: Any = steps
            return _MadeValues(self.of(nodes), np.arange(len(steps)), len(steps))
        each = [self._make(s) if isinstance(s, Kernel) else [self._add(s)] for s in steps]
        place = np.repeat(np.arange(len(steps)), [len(numbers) for numbers in each])
        return _MadeValues(np.array([n for own in each for n in own]), place, len(steps))

    def known(self) -> dict[fx.Node, int]:
        """Returns the number of each node's value, of the last one that was made."""
        return dict(self._number)

    def expressions(self, numbers: Integers) -> list[sympy.Expr]:
        """Returns sizes by their numbers."""
        return [self._expressions[i] for i in numbers.tolist()]

    def names(self, numbers: Integers) -> list[str]:
        """Returns the names of nodes."""
        return [self._names[i] for i in numbers.tolist()]

    @property
    def arrays(self) -> _Arrays:
        """All that is known."""
        if self._arrays is None:
            lists = (self._first_read, self._reads, self._first_slot, self._above)
            first_read, reads, first_slot, above = (np.array(x, dtype=np.int64) for x in lists)
            size, transient = (np.array(x, dtype=np.int64) for x in (self._size, self._transient))
            root = _followed(above)
            self._arrays = _Arrays(first_read, reads, first_slot, above, root, size, transient)
        return self._arrays

    def _add(self, node: fx.Node) -> int:
        first = len(self._above)
        for source, position, size_bytes in self.facts.aliases(node):
            start = first if source is None else self._first_slot[self._number[source]]
            self._above.append(start + position)
            self._size.append(self.size(size_bytes))
        called = node.op != "placeholder"
        reads = [self._number[n] for n in self.facts.reads(node)] if called else []
        return self._append(node, reads, self._transient_of(node) if called else ZERO)

    def _make(self, kernel: Kernel) -> list[int]:
        """Returns the numbers of a kernel's values, in new memory or in that of an input."""
        reads, found = [self._number[n] for n in kernel.all_input_nodes], []
        for node in kernel.makes:
            taken = kernel.in_place.get(node)
            start = len(self._above) if taken is None else self._first_slot[self._number[taken]]
            for position, tensor in enumerate(self.facts.of(node)):
                self._above.append(start + position)
                self._size.append(self.size(tensor.storage_bytes))
            found.append(self._append(node, reads, ZERO))
            reads = []
        return found

    def _append(self, node: fx.Node, reads: list[int], transient: sympy.Expr) -> int:
        self._arrays = None
        self._reads += reads
        self._transient.append(self.size(transient))
        self._first_read.append(len(self._reads))
        self._first_slot.append(len(self._above))
        self._names.append(node.name)
        self._number[node] = len(self._names) - 1
        return self._number[node]

    def size(self, size: sympy.Expr) -> int:
        """Returns the number of a size."""
        number = self._sizes.setdefault(size, len(self._sizes))
        if number == len(self._expressions):
            self._expressions.append(size)
        return number


class Lifetimes:
    """The storages of one run.

    A storage of forward has the number of its slot; a new one of backward, where a value of forward
    may be recomputed, has one behind all slots.
    """

    def __init__(self, run: RankRun, numbered: Numbered, recorder: Recorder) -> None:
        steps: Steps = (*run.forward, *run.backward)
        if any(isinstance(step, Kernel) for step in steps):
            numbered = numbered.fused()
        self._numbered, self._recorder = numbered, recorder
        primals = numbered.of(run.primals)
        self._forward = numbered.values(run.forward)
        self._outputs = numbered.of([*run.outputs, *run.saved])
        self._given = numbered.of([n for n, _ in run.given])
        self._taken = numbered.of([n for _, n in run.given])
        self._returned = len(run.outputs)
        self._known = numbered.known()
        self._tangents = numbered.of(run.tangents)
        self._back = numbered.of([n for _, n in run.returning])
        self._backward = numbered.values(run.backward)
        self._gradients = numbered.of([g for g in run.gradients if g is not None])
        self._asked = numbered.of([n for n, _ in run.returning])
        arrays = numbered.arrays
        self._slot_count = len(arrays.above)
        self._storage = arrays.root
        self._resident: Mask = np.zeros(2 * self._slot_count, dtype=bool)
        self._resident[self._storage[self._slots(primals)]] = True
        recorder.resident = set(np.flatnonzero(self._resident).tolist())
        self._stays = np.empty(0, dtype=np.int64)

    def forward(self, foldings: Sequence[Folding]) -> None:
        """Runs the calls of forward; returned and saved values stay."""
        fresh = self._numbered.arrays.above == np.arange(self._slot_count)
        self._run(self._forward, self._outputs[:0], self._outputs, fresh, foldings)
        self._stays = self._storage[self._slots(self._outputs[: self._returned])]

    def start_backward(self) -> None:
        """Starts backward: allocates the tangents, sets the storages that its values lie in."""
        recorder, count = self._recorder, self._slot_count
        self._known = self._numbered.known()
        taken, slots = self._storage[self._slots(self._taken)], self._slots(self._tangents)
        held = np.full(count, -1)
        held[self._slots(self._given)] = taken
        held[slots] = slots + count
        held[self._slots(self._back)] = self._slots(self._asked) + count
        recorder.steps += self._numbered.arrays.size[slots].tolist()
        recorder.weights += [1] * len(slots)
        recorder.storages += held[slots].tolist()
        recorder.mark("backward")
        self._again = np.zeros(count, dtype=bool)
        self._again[self._slots(self._backward.numbers)] = True
        own = np.arange(count)
        top = _followed(np.where(self._again, self._numbered.arrays.above, own))
        self._again &= top == own
        self._storage = np.where(held[top] >= 0, held[top], top + count)

    def backward(self, foldings: Sequence[Folding]) -> None:
        """Runs the calls of backward; gradients stay."""
        given = np.concatenate((self._given, self._tangents, self._back))
        self._run(self._backward, given, self._gradients, self._again, foldings)

    def of(self, nodes: Sequence[fx.Node]) -> list[tuple[fx.Node, int, sympy.Expr]]:
        """Returns identity and bytes of the storage of each tensor of some nodes, in order."""
        arrays = self._numbered.arrays
        numbers = np.array([self._known[n] for n in nodes], dtype=np.int64)
        place, slots = _gathered(arrays.first_slot, numbers)
        sizes = self._numbered.expressions(arrays.size[slots])
        own = [nodes[i] for i in place.tolist()]
        return list(zip(own, self._storage[slots].tolist(), sizes, strict=True))

    def _slots(self, nodes: Integers) -> Integers:
        return _gathered(self._numbered.arrays.first_slot, nodes)[1]

    def _run(
        self,
        values: _MadeValues,
        given: Integers,
        outputs: Integers,
        fresh: Mask,
        foldings: Sequence[Folding],
    ) -> None:
        """Runs calls: allocate, mark the point, free values after their last use."""
        arrays, recorder = self._numbered.arrays, self._recorder
        of, slots = _gathered(arrays.first_slot, values.numbers)
        new = fresh[slots] & ~self._resident[self._storage[slots]]
        made_at, made = values.place[of[new]], self._storage[slots[new]]
        freed_at, freed = self._frees(values, given, outputs)
        order = np.argsort(np.append(2 * made_at, 2 * freed_at + 1), kind="stable")
        weights = np.repeat([1, -1], [len(made), len(freed)])[order]
        storages = np.append(made, freed)[order]
        # Of each call: steps before it, those up to its point, and whether it has one.
        allocations = np.bincount(made_at, minlength=values.count + 1)
        each = allocations + np.bincount(freed_at, minlength=values.count + 1)
        before = np.cumsum(each) - each
        last = np.zeros(values.count, dtype=np.int64)
        last[values.place] = values.numbers  # of a kernel the last one, which names it
        transients = arrays.transient[last]
        marked = (allocations[:-1] > 0) | (transients > 0)
        points = np.append(0, np.cumsum(marked))
        start, point = len(recorder.steps), len(recorder.done)
        borders = {position for f in foldings for position in (f.first, f.stop)}
        reached: dict[int, Place] = {
            b: (start + int(before[b]), point + int(points[b])) for b in borders
        }
        recorder.steps += arrays.size[storages % len(arrays.above)].tolist()
        recorder.weights += weights.tolist()
        recorder.storages += storages.tolist()
        recorder.done += (start + (before + allocations)[:-1][marked]).tolist()
        recorder.transients += transients[marked].tolist()
        recorder.names += self._numbered.names(last[marked])
        for folding in reversed(foldings):
            recorder.repeat(folding, reached, start, self.of)

    def _frees(
        self, values: _MadeValues, given: Integers, outputs: Integers
    ) -> tuple[Integers, Integers]:
        """Returns, for each free in order, the call after which it comes, and its storage.

        A storage is freed with the last of its values, a value after its last reader. Values with
        the same last reader go in the order of their first reads, and then the unread ones.
        """
        arrays, nodes = self._numbered.arrays, values.numbers
        at, flat = _gathered(arrays.first_read, nodes)
        sources, never = arrays.reads[flat], values.count
        last = np.full(len(arrays.transient), -1)
        last[sources] = values.place[at]  # the last one counts
        first = np.zeros(len(arrays.transient), dtype=np.int64)
        first[sources[::-1]] = np.arange(len(sources))[::-1]
        own = np.arange(len(nodes))
        unread = last[nodes] < 0
        last[nodes[unread]] = values.place[unread]
        first[nodes[unread]] = len(sources) + own[unread]
        last[outputs] = never
        every = np.append(given, nodes)
        last[given[last[given] < 0]] = never
        of, slots = _gathered(arrays.first_slot, every)
        within = slots - arrays.first_slot[every][of]
        most = int(within.max(initial=0)) + 1
        span = (len(sources) + len(nodes) + 1) * most
        key = last[every][of] * span + first[every][of] * most + within
        ends = np.full(len(self._resident), -1)
        np.maximum.at(ends, self._storage[slots], key)
        ends[self._resident] = -1
        ends[self._stays] = -1
        (freed,) = np.nonzero((ends >= 0) & (ends < never * span))
        freed = freed[np.argsort(ends[freed])]
        return ends[freed] // span, freed


def _gathered(starts: Integers, rows: Integers) -> tuple[Integers, Integers]:
    """Returns of each entry of some rows the row's place among them, and where the entry lies."""
    first, lengths = starts[rows], starts[rows + 1] - starts[rows]
    place = np.repeat(np.arange(len(rows)), lengths)
    within = np.arange(len(place)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return place, first[place] + within


def _followed(above: Integers) -> Integers:
    """Returns where each leads in the end."""
    while True:
        further: Any = above[above]
        if (further == above).all():
            return above
        above = further
