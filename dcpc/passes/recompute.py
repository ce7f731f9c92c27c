"""What to save for backward and what to make again: a menu of choices, from nothing to the least.

    calls -> blocks (repeated, found by structure) -> per block the choices on the convex hull of
    (bytes saved, seconds recomputed) -> steps of all blocks, the most bytes a second first

A choice for a block is a minimum cut. Every value is either saved (its bytes times a price), or not
there, or made again (its seconds), which takes that what it reads is there; what backward reads
must be there. Sweeping the price gives the hull. `k` steps of the menu are a plan: within one step
of the least seconds for the bytes it keeps, by the greedy optimum of the multi-choice knapsack.

Values that another block reads are saved where anything needs them: one block at a time is made
again.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from dcpc.repeats import repeated_runs

# Capacities of the cut are 32-bit integers: the finite ones add up to at most this.
SCALE = 1 << 28
INFINITE = 1 << 29


@dataclass(frozen=True, slots=True)
class Call:
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
class Step:
    """One block goes from one choice to the next, which saves less.

    Attributes:
        block: its index in execution order.
        freed_bytes: what it no longer saves.
        seconds: what it makes again in addition.
        again: names of the values that are made again from this step on.
        saved: names of those that are saved instead, made again before.
    """

    block: int
    freed_bytes: float
    seconds: float
    again: frozenset[str]
    saved: frozenset[str]

    @property
    def ratio(self) -> float:
        """Bytes freed a second."""
        return self.freed_bytes / max(self.seconds, 1e-30)

    def with_(self, other: Step) -> Step:
        """Returns both steps as one."""
        return Step(
            block=self.block,
            freed_bytes=self.freed_bytes + other.freed_bytes,
            seconds=self.seconds + other.seconds,
            again=self.again | other.again,
            saved=self.saved | other.saved,
        )


@dataclass(frozen=True, slots=True)
class Menu:
    """The steps from saving all to saving the least, in the order in which to take them.

    Attributes:
        start: names of the values that are made again at no cost, before any step.
        steps: the most freed bytes a second first; earlier blocks first where equal.
        blocks: number of blocks.
    """

    start: frozenset[str]
    steps: tuple[Step, ...]
    blocks: int

    def made_again(self, k: int) -> frozenset[str]:
        """Returns the names of the values made again once the first k steps are taken."""
        found = set(self.start)
        for step in self.steps[:k]:
            found -= step.saved
            found |= step.again
        return frozenset(found)

    def by_ratio(self) -> Menu:
        """Returns the menu in which steps of the same bytes a second are one: all equal blocks'."""
        merged: list[tuple[float, Step]] = []
        for step in self.steps:
            if merged and merged[-1][0] == step.ratio:
                merged[-1] = step.ratio, merged[-1][1].with_(step)
            else:
                merged.append((step.ratio, step))
        return Menu(self.start, tuple(step for _, step in merged), self.blocks)

    def seconds(self, k: int) -> float:
        """Returns the seconds of what the first k steps make again."""
        return sum(step.seconds for step in self.steps[:k])

    def freed_bytes(self, k: int) -> float:
        """Returns the bytes that the first k steps do not save."""
        return sum(step.freed_bytes for step in self.steps[:k])


def recompute_menu(calls: Sequence[Call]) -> Menu:
    """Returns the menu of a forward graph.

    Args:
        calls: those that depend on parameters or activations, in execution order.
    """
    blocks = _blocks(calls)
    outside = _read_outside(calls, blocks)
    known: dict[Hashable, list[_Choice]] = {}
    start: set[str] = set()
    steps: list[tuple[float, int, Step]] = []
    for index, (low, high) in enumerate(blocks):
        problem = _Problem.of(calls[low:high], outside)
        hull = known.get(problem.key())
        if hull is None:
            hull = known[problem.key()] = _hull(problem)
        names = [call.name for call in problem.calls]
        start |= {names[i] for i in hull[0].again}
        for before, after in pairwise(hull):
            freed, seconds = before.size_bytes - after.size_bytes, after.seconds - before.seconds
            again = frozenset(names[i] for i in after.again - before.again)
            saved = frozenset(names[i] for i in before.again - after.again)
            step = Step(index, freed, seconds, again, saved)
            steps.append((-freed / max(seconds, 1e-30), index, step))
    ordered = sorted(steps, key=lambda item: item[:2])
    return Menu(frozenset(start), tuple(step for _, _, step in ordered), len(blocks))


# ---------------------------------------------------------------------------------------- blocks


def _blocks(calls: Sequence[Call]) -> list[tuple[int, int]]:
    """Returns the blocks as (first, after the last), in order; what is not repeated is one each."""
    position = {call.name: i for i, call in enumerate(calls)}
    last_read = [i for i in range(len(calls))]
    for i, call in enumerate(calls):
        for name in call.reads:
            last_read[position[name]] = i
    borders = {0, len(calls)}
    for run in repeated_runs([call.kind for call in calls]):
        first = min(
            range(run.start, run.start + run.period),
            key=lambda at: _crossing(last_read, at + run.period, run.period),
        )
        borders |= {run.start, run.stop, *range(first, run.stop + 1, run.period)}
    ordered = sorted(borders)
    return [(a, b) for a, b in pairwise(ordered) if b > a]


def _crossing(last_read: Sequence[int], border: int, period: int) -> int:
    """Returns how many values of the block before a border the blocks after it read."""
    return sum(last_read[i] >= border for i in range(max(border - period, 0), border))


def _read_outside(calls: Sequence[Call], blocks: Sequence[tuple[int, int]]) -> set[str]:
    """Names of the values that a block other than their own reads."""
    block_of = {c.name: i for i, (low, high) in enumerate(blocks) for c in calls[low:high]}
    return {name for c in calls for name in c.reads if block_of[name] != block_of[c.name]}


# ------------------------------------------------------------------------------------------ cuts


@dataclass(frozen=True, slots=True)
class _Choice:
    """One choice for a block; positions are those of its calls."""

    again: frozenset[int]
    size_bytes: float
    seconds: float


@dataclass(slots=True)
class _Problem:
    """The calls of a block that are not read outside of it, and what they read of each other."""

    calls: list[Call]
    reads: list[tuple[int, ...]] = field(default_factory=list)

    @classmethod
    def of(cls, block: Sequence[Call], outside: set[str]) -> _Problem:
        calls = [call for call in block if call.name not in outside]
        position = {call.name: i for i, call in enumerate(calls)}
        reads = [tuple(position[n] for n in c.reads if n in position) for c in calls]
        return cls(calls, reads)

    def key(self) -> Hashable:
        """Equal for blocks that have the same choices."""
        return tuple(
            (c.kind, c.seconds, c.size_bytes, c.savable, c.needed, r)
            for c, r in zip(self.calls, self.reads, strict=True)
        )

    def cut(self, price: npt.NDArray[np.float64], cost: npt.NDArray[np.float64]) -> _Choice:
        """Returns the choice of least `price` of what is saved plus `cost` of what is made again.

        Node 2v says that value v is there, node 2v + 1 that it is made again.
        """
        n = len(self.calls)
        source, sink = 2 * n, 2 * n + 1
        finite = np.concatenate([price[np.isfinite(price)], cost[np.isfinite(cost)]])
        unit = SCALE / (float(finite.sum()) or 1.0)

        def capacity(value: float) -> int:
            return min(round(value * unit), INFINITE) if np.isfinite(value) else INFINITE

        edges: dict[tuple[int, int], int] = {}
        for v, call in enumerate(self.calls):
            if call.needed:
                edges[source, 2 * v] = INFINITE
            edges[2 * v, 2 * v + 1] = capacity(price[v])
            edges[2 * v + 1, sink] = capacity(cost[v])
            for u in self.reads[v]:
                edges[2 * v + 1, 2 * u] = INFINITE
        rows, columns = zip(*edges, strict=True)
        graph = csr_matrix(
            (np.array(list(edges.values()), dtype=np.int32), (rows, columns)),
            shape=(2 * n + 2, 2 * n + 2),
        )
        flow = maximum_flow(graph, source, sink).flow
        left = (graph - flow).tocsr()
        left.data = (left.data > 0).astype(np.int32)
        left.eliminate_zeros()
        there = set(breadth_first_order(left, source, return_predecessors=False).tolist())
        saved = {v for v in range(n) if 2 * v in there and 2 * v + 1 not in there}
        made = [v for v in range(n) if 2 * v + 1 in there]
        return _Choice(
            again=frozenset(range(n)) - saved,
            size_bytes=float(sum(self.calls[v].size_bytes for v in saved)),
            seconds=float(sum(self.calls[v].seconds for v in made)),
        )


def _hull(problem: _Problem) -> list[_Choice]:
    """Returns the choices on the lower convex hull, from the fewest seconds to the fewest bytes."""
    if not problem.calls:
        return [_Choice(frozenset(), 0.0, 0.0)]
    seconds = np.array([c.seconds for c in problem.calls])
    sizes = np.array([c.size_bytes if c.savable else np.inf for c in problem.calls])
    least_seconds = problem.cut(sizes, np.where(seconds > 0, np.inf, 0.0))
    tie_break = seconds / max(seconds.sum(), 1e-300) * 1e-6 * sizes[np.isfinite(sizes)].sum()
    least_bytes = problem.cut(sizes, tie_break)

    def between(low: _Choice, high: _Choice) -> list[_Choice]:
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
