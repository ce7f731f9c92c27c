"""The choices of one block: which of its values are saved, and which are made again.

A choice is a minimum cut. Every value is either saved (its bytes times a price), or not there, or
made again (its seconds), which takes that what it reads is there; what backward reads must be
there. Sweeping the price gives the lower convex hull of (bytes saved, seconds). Between two choices
of the hull lie others: what the second makes again falls into parts that have nothing to do with
each other, and some of them may be taken alone.
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
# Of a step of the hull that has more parts than this not every subset is tried.
MOST_PARTS = 4
PLACES = 8  # in a block at which the first calls may go on to the next choice without the others


@dataclass(frozen=True, slots=True)
class ForwardCall:
    """One call of the forward graph, in execution order.

    Attributes:
        name: of the node.
        reads: names of the calls whose values it reads; what is always there is left out
            (parameters, inputs, tables of positions).
        kind: what tells calls apart: the op and its shapes.
        seconds: to make it again; 0 for a view.
        size_bytes: of its value.
        savable: whether it can be saved: a tensor of its own memory.
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
    """One choice for a block; positions are those of its calls.

    Attributes:
        again: what is made again if it is needed.
        size_bytes: of what is saved.
        seconds: of what is made again.
    """

    again: frozenset[int]
    size_bytes: float
    seconds: float


@dataclass(slots=True)
class Problem:
    """The calls of a block that are not read outside of it, and what they read of each other."""

    calls: list[ForwardCall]
    reads: list[tuple[int, ...]] = field(default_factory=list)
    _wiring: _Wiring | None = None

    @classmethod
    def of(cls, block: Sequence[ForwardCall], outside: set[str]) -> Problem:
        """Returns the problem of a block.

        Args:
            block: its calls, in execution order.
            outside: names of the values that other blocks read.
        """
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
        """Equal for blocks that have the same choices."""
        return tuple(
            (c.kind, c.seconds, c.size_bytes, c.savable, c.needed, r)
            for c, r in zip(self.calls, self.reads, strict=True)
        )

    def choice(self, saved: Iterable[int]) -> RecomputeChoice | None:
        """Returns the choice that saves these values as far as they are needed, None if none is."""
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
        """Returns the choice of least `price` of what is saved plus `cost` of what is made again.

        Node 2v says that value v is there, node 2v + 1 that it is made again.
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
    """The edges of a problem's cuts, each with the one that goes back, row by row.

    Attributes:
        graph: their capacities; an edge that only goes back has none.
        prices: of each value: number of the edge from it to that it is made again.
        costs: of the edge from that on to the sink.
        ends: of each node the edges' numbers and where they lead.
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
        """Returns the nodes that free edges lead to."""
        is_free, found, stack = free.tolist(), {start}, [start]
        while stack:
            for edge, end in self.ends[stack.pop()]:
                if is_free[edge] and end not in found:
                    found.add(end)
                    stack.append(end)
        return found


def fewest_seconds(problem: Problem) -> RecomputeChoice:
    """Returns the choice of the fewest bytes that makes nothing again that takes time."""
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

    Of two neighbours on the hull some parts of the step are taken, or the step only for calls
    before some place: what is made of these is used last in backward, when the rest is gone.
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
    """Yields the first so many of the values, at evenly spaced places."""
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
    """Yields what is in some of the parts, for all subsets where these are few."""
    counts: Sequence[int] = range(1, len(parts))
    if len(parts) > MOST_PARTS:
        counts = (1, len(parts) - 1)
        for n in range(2, len(parts) - 1):
            yield frozenset().union(*parts[:n])
    for n in counts:
        for taken in combinations(parts, n):
            yield frozenset().union(*taken)
