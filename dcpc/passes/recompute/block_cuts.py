"""The choices of one block: which of its values are saved, and which are recomputed.

A choice is a minimum cut. Every value is either saved (cost: its bytes times a price), or not
available, or recomputed (cost: its seconds). To recompute a value its operands must be available,
and values that backward reads must be available. Sweeping the price gives the lower convex hull of
(bytes saved, seconds). Between two choices of the hull there are others: the values that only the
second one recomputes fall into independent parts, and some of these may be taken alone.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

# Capacities of the cut are 32-bit integers: the finite ones add up to at most this.
SCALE = 1 << 28
INFINITE = 1 << 29
# If a step of the hull has more parts than this, not every subset is tried.
MOST_PARTS = 4
PLACES = 8  # a step of the hull may be taken for the first calls up to one of so many positions


@dataclass(frozen=True, slots=True)
class ForwardCall:
    """One call of the forward graph, in execution order.

    Attributes:
        name: name of the node.
        reads: names of the calls whose values it reads, without values that are always available
            (parameters, inputs, tables of positions).
        kind: key that is equal for equal calls: the op and its shapes.
        seconds: seconds to recompute it; 0 for a view.
        size_bytes: bytes of its value.
        savable: whether it can be saved: a tensor with its own storage.
        needed: whether backward reads its value.
    """

    name: str
    reads: tuple[str, ...]
    kind: Hashable
    seconds: float
    size_bytes: float
    savable: bool
    needed: bool


@dataclass(frozen=True, slots=True)
class RecomputeChoice:
    """One choice for a block; positions are indices of the block's calls.

    Attributes:
        again: positions of the values that are recomputed when needed.
        size_bytes: bytes of the saved values.
        seconds: seconds of recompute.
    """

    again: frozenset[int]
    size_bytes: float
    seconds: float


@dataclass(slots=True)
class Problem:
    """The calls of a block that are not read outside of it, and their reads of each other."""

    calls: list[ForwardCall]
    reads: list[tuple[int, ...]] = field(default_factory=list)
    _wiring: _Wiring | None = None

    @classmethod
    def of(cls, block: Sequence[ForwardCall], outside: set[str]) -> Problem:
        """Returns the problem of a block."""
        calls = [call for call in block if call.name not in outside]
        position = {call.name: i for i, call in enumerate(calls)}
        reads = [tuple(position[n] for n in c.reads if n in position) for c in calls]
        return cls(calls, reads)

    @property
    def costs(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Seconds of each call, and bytes of its value, infinite where it cannot be saved."""
        seconds = np.array([c.seconds for c in self.calls])
        return seconds, np.array([c.size_bytes if c.savable else np.inf for c in self.calls])

    def key(self) -> Hashable:
        """Returns a key that is equal for blocks with equal choices."""
        return tuple(
            (c.kind, c.seconds, c.size_bytes, c.savable, c.needed, r)
            for c, r in zip(self.calls, self.reads, strict=True)
        )

    def choice(self, saved: Iterable[int]) -> RecomputeChoice | None:
        """Returns the choice that saves the needed ones of these values, or None if impossible."""
        kept, used = set(saved), set()
        made: set[int] = set()
        stack = [v for v, call in enumerate(self.calls) if call.needed]
        while stack:
            v = stack.pop()
            if v in used or v in made:
                continue
            if v in kept:
                if not self.calls[v].savable:
                    return None
                used.add(v)
            else:
                made.add(v)
                stack.extend(self.reads[v])
        return RecomputeChoice(
            again=frozenset(range(len(self.calls))) - used,
            size_bytes=float(sum(self.calls[v].size_bytes for v in used)),
            seconds=float(sum(self.calls[v].seconds for v in made)),
        )

    def cut(self, price: npt.NDArray[np.float64], cost: npt.NDArray[np.float64]) -> RecomputeChoice:
        """Returns the choice of least `price` of saved values plus `cost` of recomputed ones.

        Node 2v stands for "value v is available", node 2v + 1 for "it is recomputed".
        """
        n = len(self.calls)
        source, sink = 2 * n, 2 * n + 1
        if self._wiring is None:
            self._wiring = _Wiring.of(self)
        wiring = self._wiring
        finite = np.concatenate([price[np.isfinite(price)], cost[np.isfinite(cost)]])
        unit = SCALE / (float(finite.sum()) or 1.0)

        def capacity(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
            scaled = np.where(np.isfinite(values), np.rint(values * unit), INFINITE)
            return np.minimum(scaled, INFINITE)

        graph = wiring.graph
        graph.data[wiring.prices], graph.data[wiring.costs] = capacity(price), capacity(cost)
        from scipy.sparse.csgraph import maximum_flow  # takes a third of a second to import

        flow = maximum_flow(graph, source, sink).flow
        there = wiring.reached(source, graph.data > flow.data)
        found = self.choice(v for v in range(n) if 2 * v in there and 2 * v + 1 not in there)
        assert found is not None, "a cut never saves what cannot be saved"
        return found


@dataclass(frozen=True, slots=True)
class _Wiring:
    """The edges of a problem's minimum cuts, each with its reverse edge, row by row.

    Attributes:
        graph: capacities of the edges; a reverse edge has none.
        prices: index of the edge from "available" to "recomputed" for each value.
        costs: index of the edge from "recomputed" to the sink for each value.
        ends: (edge index, end node) of each node's edges.
    """

    graph: csr_matrix
    prices: npt.NDArray[np.intp]
    costs: npt.NDArray[np.intp]
    ends: list[list[tuple[int, int]]]

    @classmethod
    def of(cls, problem: Problem) -> _Wiring:
        """Returns the edges of a problem."""
        n = len(problem.calls)
        source, sink = 2 * n, 2 * n + 1
        edges: set[tuple[int, int]] = set()
        for v, call in enumerate(problem.calls):
            edges |= {(source, 2 * v)} if call.needed else set()
            edges |= {(2 * v, 2 * v + 1), (2 * v + 1, sink)}
            edges |= {(2 * v + 1, 2 * u) for u in problem.reads[v]}
        ordered = sorted(edges | {(end, start) for start, end in edges})
        number = {edge: i for i, edge in enumerate(ordered)}
        capacity = np.array([INFINITE if edge in edges else 0 for edge in ordered], np.int32)
        from scipy.sparse import csr_matrix

        graph = csr_matrix((capacity, tuple(zip(*ordered, strict=True))), (2 * n + 2, 2 * n + 2))
        ends: list[list[tuple[int, int]]] = [[] for _ in range(2 * n + 2)]
        for i, (start, end) in enumerate(ordered):
            ends[start].append((i, end))
        return cls(
            graph=graph,
            prices=np.array([number[2 * v, 2 * v + 1] for v in range(n)], np.intp),
            costs=np.array([number[2 * v + 1, sink] for v in range(n)], np.intp),
            ends=ends,
        )

    def reached(self, start: int, free: npt.NDArray[np.bool_]) -> set[int]:
        """Returns the nodes that can be reached over free edges."""
        is_free, found, stack = free.tolist(), {start}, [start]
        while stack:
            for edge, end in self.ends[stack.pop()]:
                if is_free[edge] and end not in found:
                    found.add(end)
                    stack.append(end)
        return found


def fewest_seconds(problem: Problem) -> RecomputeChoice:
    """Returns the choice of fewest bytes that recomputes nothing that takes time."""
    if not problem.calls:
        return RecomputeChoice(frozenset(), 0.0, 0.0)
    seconds, sizes = problem.costs
    return problem.cut(sizes, np.where(seconds > 0, np.inf, 0.0))


def hull(problem: Problem) -> list[RecomputeChoice]:
    """Returns the choices on the lower convex hull, from the fewest seconds to the fewest bytes."""
    least_seconds = fewest_seconds(problem)
    if not problem.calls:
        return [least_seconds]
    seconds, sizes = problem.costs
    tie_break = seconds / max(seconds.sum(), 1e-300) * 1e-6 * sizes[np.isfinite(sizes)].sum()
    least_bytes = problem.cut(sizes, tie_break)

    def between(low: RecomputeChoice, high: RecomputeChoice) -> list[RecomputeChoice]:
        """The choices strictly between two of the hull."""
        freed, added = low.size_bytes - high.size_bytes, high.seconds - low.seconds
        if freed <= 0 or added <= 0:
            return []
        slope = added / freed
        middle = problem.cut(sizes * slope, seconds)
        line = low.seconds + slope * low.size_bytes
        if middle.seconds + slope * middle.size_bytes >= line * (1 - 1e-6):
            return []
        return [*between(low, middle), middle, *between(middle, high)]

    if least_bytes.size_bytes >= least_seconds.size_bytes:
        return [least_seconds]
    return [least_seconds, *between(least_seconds, least_bytes), least_bytes]


def between(problem: Problem, corners: Sequence[RecomputeChoice]) -> list[RecomputeChoice]:
    """Returns the choices of the hull and others between them, the fewest seconds first.

    Between two neighbours on the hull, some independent parts of the step are taken, or the step
    for the first calls only: their values are used last in backward, when others are gone.
    """
    found = {c.again: c for c in corners}
    every = frozenset(range(len(problem.calls)))
    pairs = [*pairwise(corners)]
    if len(corners) > 2:
        pairs.append((corners[0], corners[-1]))
    for low, high in pairs:
        changed = low.again ^ high.again
        for taken in (*_subsets(_parts(problem, changed)), *_prefixes(changed)):
            again = (low.again - taken) | (high.again & taken)
            choice = problem.choice(every - again)
            if choice is not None:
                found.setdefault(choice.again, choice)
    return sorted(found.values(), key=lambda c: (c.seconds, c.size_bytes))


def _prefixes(changed: frozenset[int]) -> Iterator[frozenset[int]]:
    """Yields the first values, up to evenly spaced positions."""
    ordered = sorted(changed)
    for place in range(1, PLACES):
        yield frozenset(ordered[: len(ordered) * place // PLACES])


def _parts(problem: Problem, changed: frozenset[int]) -> list[frozenset[int]]:
    """Returns the changed values in parts that read nothing of each other."""
    part = {v: v for v in changed}

    def root(v: int) -> int:
        while part[v] != v:
            v = part[v]
        return v

    for v in changed:
        for u in problem.reads[v]:
            if u in part:
                part[root(v)] = root(u)
    groups: dict[int, set[int]] = {}
    for v in sorted(changed):
        groups.setdefault(root(v), set()).add(v)
    return [frozenset(group) for group in groups.values()]


def _subsets(parts: Sequence[frozenset[int]]) -> Iterator[frozenset[int]]:
    """Yields unions of some of the parts, for all subsets if there are few parts."""
    counts: Sequence[int] = range(1, len(parts))
    if len(parts) > MOST_PARTS:
        counts = (1, len(parts) - 1)
        for n in range(2, len(parts) - 1):
            yield frozenset().union(*parts[:n])
    for n in counts:
        for taken in combinations(parts, n):
            yield frozenset().union(*taken)
