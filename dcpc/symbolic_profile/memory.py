"""Live memory of a forward and a backward at every program point.

    node        allocates its outputs' storages (a view allocates none), and its transient
                -> a program point: live + transient
    last use    of all values in a storage -> the storage is freed

Forward's placeholders (parameters, buffers, inputs) are resident and not counted. After forward
the loss and the saved values live; backward frees a saved value after its last use; gradients
live to the end. Sizes are those of storages, not of shapes: a saved slice keeps the whole of what
it is cut from. Copies of a block that stand for more: `events.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import sympy
from torch import fx

from dcpc.ir import Fold, Partition, Schedule
from dcpc.symbolic_profile.events import ZERO, Folding, Own, Place, Recorder, Steps, Transient
from dcpc.symbolic_profile.facts import Facts
from dcpc.symbolic_profile.fusion import Kernel, fuse
from dcpc.symbolic_profile.polynomials import Basis, Floats, Integers


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
        own: list[tuple[int, sympy.Expr]] = []
        for source, first, size in self.facts.aliases(node):
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
    outputs = [g for g in run.gradients if g is not None]
    if fuses:
        forward: Any = fuse(run.forward, [run.loss, *run.saved], facts)
        backward: Any = fuse(run.backward, outputs, facts)
        run = replace(run, forward=forward, backward=backward)
    recorder, storages = Recorder(transient), _Storages(facts)
    recorder.resident = {storage for n in run.primals for storage, _ in storages.enter(n)}
    middle = Folding.forward(fold, run.forward)
    _run(run.forward, [run.loss, *run.saved], recorder, storages, middle)
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
    middle = Folding.backward(fold, run.backward, again, fuses)
    _run(run.backward, outputs, recorder, storages, middle)
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


def _run(
    nodes: Steps,
    outputs: Iterable[fx.Node],
    recorder: Recorder,
    storages: _Storages,
    foldings: Sequence[Folding],
) -> None:
    """Runs calls on the timeline: allocate, mark the point, free what was used last.

    The outputs stay.
    """
    dying, read = _last_uses(nodes, outputs, storages.facts)
    start = len(recorder.steps)
    borders = {at for f in foldings for at in (f.first, f.stop)}
    reached: dict[int, Place] = {}
    for position, n in enumerate(nodes):
        if position in borders:
            reached[position] = len(recorder.steps), len(recorder.done)
        made: Sequence[fx.Node]
        if isinstance(n, Kernel):
            made, own, transient = n.makes, storages.make(n), ZERO
        else:
            made, own, transient = (n,), storages.enter(n), recorder.transient(n)
        allocated = recorder.hold(own)
        if allocated or transient is not ZERO:
            recorder.mark(n.name, transient)
        for used in dying.get(position, ()):
            recorder.drop(storages.of(used))
        for unused in made:
            if unused not in read:
                recorder.drop(storages.of(unused))
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
