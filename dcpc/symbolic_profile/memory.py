"""Live memory of a partition at every program point, and the expressions that can be its peak.

    node        allocates its outputs' storages (a view allocates none), and its transient
                -> a program point: live + transient
    last use    of all values in a storage -> the storage is freed

Forward's placeholders (parameters, buffers, inputs) are resident and not counted. After forward
the loss and the saved values live; backward frees a saved value after its last use; gradients
live to the end. Sizes are those of storages, not of shapes: a saved slice keeps the whole of what
it is cut from.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import sympy
from torch import fx

from dcpc.ir import Partition
from dcpc.symbolic_profile.facts import Facts
from dcpc.symbolic_profile.polynomials import Basis, Floats, undominated
from dcpc.symbolic_profile.transients import transient_bytes


@dataclass(frozen=True, slots=True)
class MemoryProfile:
    """Live memory of one rank, parameters, buffers and inputs excluded.

    Attributes:
        saved_bytes: distinct storages of the values saved for backward.
        peak_terms: live bytes at the program points that can be the peak.
        peak_points: the node at which each of them holds.
        gradient_bytes: distinct storages of backward's outputs.
    """

    saved_bytes: sympy.Expr
    peak_terms: tuple[sympy.Expr, ...]
    peak_points: tuple[str, ...]
    gradient_bytes: sympy.Expr


@dataclass(slots=True)
class _Timeline:
    """Allocations and frees in the order they happen, and the points between them.

    Attributes:
        resident: storages that are not counted.
        holders: storage -> nodes whose value lies in it.
        steps: (size, +1 or -1) for each allocation or free.
        points: (steps done, transient, node name).
    """

    resident: set[int]
    holders: dict[int, set[fx.Node]] = field(default_factory=dict)
    steps: list[tuple[sympy.Expr, int]] = field(default_factory=list)
    points: list[tuple[int, sympy.Expr, str]] = field(default_factory=list)

    def hold(self, holder: fx.Node, storages: Iterable[tuple[int, sympy.Expr]]) -> bool:
        """Adds a value; allocates what it lies in. Returns whether anything was allocated."""
        before = len(self.steps)
        for storage, size in storages:
            if storage in self.resident:
                continue
            if storage not in self.holders:
                self.steps.append((size, 1))
                self.holders[storage] = set()
            self.holders[storage].add(holder)
        return len(self.steps) > before

    def drop(self, holder: fx.Node, storages: Iterable[tuple[int, sympy.Expr]]) -> None:
        """Removes a value; frees what no other value lies in."""
        for storage, size in storages:
            holders = self.holders.get(storage, set())
            if holder in holders:
                holders.remove(holder)
                if not holders:
                    self.steps.append((size, -1))

    def mark(self, name: str, transient: sympy.Expr) -> None:
        """Notes a program point."""
        self.points.append((len(self.steps), transient, name))


def profile_memory(partition: Partition, facts: Facts, threads: int) -> MemoryProfile:
    """Returns the saved bytes, the gradients' bytes and the peak's candidates of a partition.

    Args:
        partition: the graphs one rank runs.
        facts: reads its nodes; `facts.symbols` are the symbols of the result.
        threads: threads an op runs on.
    """
    forward, backward = partition.forward.graph, partition.backward.graph
    storages = _Storages(facts)
    primals = [n for n in forward.nodes if n.op == "placeholder"]
    timeline = _Timeline(resident={s for n in primals for s, _ in storages.enter(n)})
    _run(forward, timeline, storages, threads)
    loss, *saved = _outputs(forward)
    given = storages.of_names([*partition.saved, *partition.backward_primals], forward)
    _start_backward(backward, timeline, storages, given)
    for n in saved:
        timeline.drop(n, storages.of(n))
    timeline.mark("backward", sympy.Integer(0))
    _run(backward, timeline, storages, threads)
    gradients = [g for g in _outputs(backward) if g is not None]
    rows, basis = _live_rows(timeline)
    kept = undominated(rows, basis)
    return MemoryProfile(
        saved_bytes=_distinct(saved, storages, timeline.resident | _ids(loss, storages)),
        peak_terms=tuple(basis.expression(rows[i]) for i in kept),
        peak_points=tuple(timeline.points[i][2] for i in kept),
        gradient_bytes=_distinct(gradients, storages, set()),
    )


class _Storages:
    """Which memory each node's value lies in, told from its inputs alone.

    A FakeTensor's storage says whether a node's value is a view of an *input*. It is no identity
    beyond that: a recomputed node carries the FakeTensor of the one it repeats, and graphs that
    were traced apart do not share any.
    """

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self._ids: dict[fx.Node, tuple[int, ...]] = {}
        self._count = itertools.count()

    def of(self, node: fx.Node) -> list[tuple[int, sympy.Expr]]:
        """Returns (identity, bytes) of each tensor of a node that was entered."""
        tensors = self.facts.of(node)
        return [(s, t.storage_bytes) for s, t in zip(self._ids[node], tensors, strict=True)]

    def of_names(self, names: Sequence[str], graph: fx.Graph) -> list[list[tuple[int, sympy.Expr]]]:
        by_name = {n.name: n for n in graph.nodes}
        return [self.of(by_name[name]) for name in names]

    def enter(self, node: fx.Node) -> list[tuple[int, sympy.Expr]]:
        """Gives a node's value its storages: its inputs' where it is a view, else new ones."""
        known: dict[int, int] = {}
        for i in node.all_input_nodes:
            known |= zip((t.storage for t in self.facts.of(i)), self._ids[i], strict=True)
        for t in self.facts.of(node):
            if t.storage not in known:
                known[t.storage] = next(self._count)
        self._ids[node] = tuple(known[t.storage] for t in self.facts.of(node))
        return self.of(node)

    def give(self, node: fx.Node, ids: Iterable[int]) -> list[tuple[int, sympy.Expr]]:
        """Gives a backward placeholder the storages of the forward value it takes."""
        self._ids[node] = tuple(ids)
        return self.of(node)


def _run(graph: fx.Graph, timeline: _Timeline, storages: _Storages, threads: int) -> None:
    """Runs a graph's calls on the timeline: allocate, mark the point, free what was used last.

    What the output node uses stays.
    """
    nodes = list(graph.nodes)
    dying: dict[fx.Node, list[fx.Node]] = {}
    last_use = {i: n for n in nodes for i in n.all_input_nodes}
    for n, user in last_use.items():
        dying.setdefault(user, []).append(n)
    for n in nodes:
        if n.op in ("placeholder", "output"):
            continue
        allocated = timeline.hold(n, storages.enter(n))
        transient = transient_bytes(n, storages.facts, threads)
        if allocated or transient != 0:
            timeline.mark(n.name, transient)
        for used in dying.get(n, []) + [n] * (n not in last_use):
            timeline.drop(used, storages.of(used))


def _start_backward(
    graph: fx.Graph,
    timeline: _Timeline,
    storages: _Storages,
    given: Sequence[Sequence[tuple[int, sympy.Expr]]],
) -> None:
    """Makes backward's placeholders hold what forward gives them, and the loss' gradient."""
    *taken, tangent = (n for n in graph.nodes if n.op == "placeholder")
    assert len(taken) == len(given), (
        f"backward takes {len(taken)} values and the loss' gradient; forward gives {len(given)}"
    )
    for n, source in zip(taken, given, strict=True):
        timeline.hold(n, storages.give(n, [s for s, _ in source]))
    timeline.hold(tangent, storages.enter(tangent))


def _outputs(graph: fx.Graph) -> list[Any]:
    """Returns the nodes a graph returns; None for a parameter without a gradient."""
    outputs = graph.output_node().args[0]
    assert isinstance(outputs, list | tuple), f"the graph returns {outputs}; expected a list"
    return list(outputs)


def _ids(node: fx.Node, storages: _Storages) -> set[int]:
    return {s for s, _ in storages.of(node)}


def _distinct(nodes: Iterable[fx.Node], storages: _Storages, without: set[int]) -> sympy.Expr:
    """Returns the bytes of the nodes' distinct storages."""
    found = {s: size for n in nodes for s, size in storages.of(n) if s not in without}
    basis = Basis(found.values())
    return basis.expression(basis.matrix(list(found.values())).sum(axis=0))


def _live_rows(timeline: _Timeline) -> tuple[Floats, Basis]:
    """Returns the live bytes at each point, as a row over the basis of all sizes."""
    sizes = list(dict.fromkeys([s for s, _ in timeline.steps] + [t for _, t, _ in timeline.points]))
    basis = Basis(sizes)
    table = dict(zip(sizes, basis.matrix(sizes), strict=True))
    live = np.zeros((len(timeline.steps) + 1, len(basis.terms)))
    for i, (size, sign) in enumerate(timeline.steps):
        live[i + 1] = live[i] + sign * table[size]
    return np.array([live[done] + table[t] for done, t, _ in timeline.points]), basis
