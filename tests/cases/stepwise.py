"""When each storage of a run is made and freed, told step by step: the oracle of `lifetimes.py`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import sympy
from torch import fx

from dcpc.symbolic_profile.memory.events import Folding, Own, Place, Recorder, Steps
from dcpc.symbolic_profile.memory.lifetimes import Numbered
from dcpc.symbolic_profile.memory.run import RankRun
from dcpc.symbolic_profile.ops.facts import Facts
from dcpc.symbolic_profile.ops.fused.fusion import Kernel


class Stepwise:
    """The storages of one run.

    Which memory a value lies in is told from its inputs alone. What the facts say is whether it is
    a view of an *input*. It is no identity beyond that: a recomputed node says the same as the one
    it repeats, and graphs that were traced apart do not share any.

    Args:
        run: calls and kernels.
        numbered: numbers sizes, and reads the nodes.
        recorder: what happens is written there.
        transient: bytes that a call has besides its outputs.
    """

    def __init__(
        self, run: RankRun, numbered: Numbered, recorder: Recorder, transient: Any
    ) -> None:
        self._steps: Any = run
        self._transient_of = transient
        self._numbered, self._recorder, self._facts = numbered, recorder, numbered.facts
        self._own: dict[fx.Node, Own] = {}
        self._count = itertools.count()
        self._holders: dict[int, int] = {}  # storage -> number of values in it
        self._number_of: dict[int, int] = {}  # storage -> number of its size
        recorder.resident = {storage for n in run.primals for storage, _ in self._enter(n)}

    def forward(self, foldings: Sequence[Folding]) -> None:
        """Runs the steps of forward, of which what is returned and what is saved stay.

        Args:
            foldings: where copies are that stand for more.
        """
        run = self._steps
        self._run(run.forward, [*run.outputs, *run.saved], foldings)

    def start_backward(self) -> None:
        """Leaves what backward takes."""
        run = self._steps
        kept = [self._own[n] for n in run.saved if n not in run.outputs]
        self._own = {node: self._own[source] for node, source in run.given}
        for own in self._own.values():
            self._hold(own)
        for tangent in run.tangents:
            self._hold(self._enter(tangent))
        for own in kept:
            self._drop(own)
        self._recorder.mark("backward")

    def backward(self, foldings: Sequence[Folding]) -> None:
        """Runs the steps of backward, of which the gradients stay.

        Args:
            foldings: where copies are that stand for more.
        """
        run = self._steps
        self._run(run.backward, [g for g in run.gradients if g is not None], foldings)

    def of(self, nodes: Sequence[fx.Node]) -> list[tuple[fx.Node, int, sympy.Expr]]:
        """Returns identity and bytes of the storage of each tensor of some nodes, in order."""
        return [(node, *own) for node in nodes for own in self._own[node]]

    def _enter(self, node: fx.Node) -> Own:
        """Gives a node's value its storages: its inputs' where it is a view, else new ones."""
        own: list[Any] = []
        for source, first, size in self._facts.aliases(node):
            if source is not None:
                own.append(self._own[source][first])
            else:
                own.append((next(self._count), size) if first == len(own) else own[first])
        self._own[node] = found = tuple(own)
        return found

    def _make(self, kernel: Kernel) -> Own:
        """Gives what a fused kernel makes its storages: new ones, or those it takes."""
        found: list[Any] = []
        for node in kernel.makes:
            taken = kernel.in_place.get(node)
            new = [(next(self._count), t.storage_bytes) for t in self._facts.of(node)]
            self._own[node] = tuple(new) if taken is None else self._own[taken]
            found += self._own[node]
        return tuple(found)

    def _hold(self, storages: Own) -> bool:
        """Adds a value; allocates what it lies in. Returns whether anything was allocated."""
        recorder = self._recorder
        before = len(recorder.steps)
        for storage, size in storages:
            if storage in recorder.resident:
                continue
            count = self._holders.get(storage, 0)
            if not count:
                number = self._number_of[storage] = self._numbered.size(size)
                recorder.step(number, 1, storage)
            self._holders[storage] = count + 1
        return len(recorder.steps) > before

    def _drop(self, storages: Own) -> None:
        """Removes a value; frees what no other value lies in."""
        for storage, _ in storages:
            count = self._holders.get(storage, 0)
            if count:
                self._holders[storage] = count - 1
                if count == 1:
                    self._recorder.step(self._number_of[storage], -1, storage)

    def _run(self, steps: Steps, outputs: Iterable[fx.Node], foldings: Sequence[Folding]) -> None:
        """Runs steps on the timeline: allocate, mark the point, free what was used last.

        The outputs stay.
        """
        recorder = self._recorder
        dying, read = _last_uses(steps, outputs, self._facts)
        start = len(recorder.steps)
        borders = {at for f in foldings for at in (f.first, f.stop)}
        reached: dict[int, Place] = {}
        for position, n in enumerate(steps):
            if position in borders:
                reached[position] = len(recorder.steps), len(recorder.done)
            made: Sequence[fx.Node]
            if isinstance(n, Kernel):
                made, own, transient = n.makes, self._make(n), 0
            else:
                made, own = (n,), self._enter(n)
                transient = self._numbered.size(self._transient_of(n))
            if self._hold(own) or transient:
                recorder.mark(n.name, transient)
            for used in dying.get(position, ()):
                self._drop(self._own[used])
            for unused in made:
                if unused not in read:
                    self._drop(self._own[unused])
        for folding in reversed(foldings):
            recorder.repeat(folding, reached, start, self.of)


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
