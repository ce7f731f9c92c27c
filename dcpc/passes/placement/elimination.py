"""The exact minimum of a network of costs over small label sets, by variable elimination.

Each variable takes one label. A unary table prices the labels of one variable, an edge table the
labels of two variables together; `inf` forbids. The sum is minimised by removing one variable at a
time:

    unary[v]  +  table[a, v]  +  table[b, v]   --min over v-->   table[a, b]

Variables of at most two neighbours go first, then the one that needs the smallest table. Chains and
trees never grow a table beyond two variables, a graph of treewidth w about w + 1. Walking back
through the removed variables reads off the labels.

What makes it fast is what is *not* done: no best label is stored on the way forward (the way back
recomputes one small vector a variable), the usual cases (one or two neighbours) stay plain 2-D
arithmetic, labels that can never win are dropped before any table of three variables is built, and
what was computed from the same array objects before is not computed again: repeated layers that
share their tables are worked out once. Networks of one shape are minimised together, as cases of
one network: a bucket of another size has other costs, and all buckets take little longer than one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import inf, prod
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from dcpc.errors import PlanError
from dcpc.passes.placement.cost_tables import (
    Costs,
    Labels,
    Shared,
    add_first,
    add_least,
    flipped,
    joined_least,
    least_between,
    move_last,
    take,
    undominated,
)

Scope: TypeAlias = tuple[int, ...]

# 5e7 float64 are 400 MB; the join holds a table of this size once, and its minimum.
LARGEST_TABLE_ENTRIES = 50_000_000

HUB = 12  # neighbours from which on a variable is not looked at before all others are gone


class ForbiddenError(PlanError):
    """No labels have a finite cost."""


class WideError(PlanError):
    """A table would exceed the limit; with one variable held at a label it is smaller.

    Attributes:
        variable: handle of the variable of it that has most neighbours.
        labels: labels of the variable, one of which is in a best solution.
    """

    variable: int
    labels: Sequence[int]


@dataclass(frozen=True, slots=True)
class Solution:
    """The labels of least total cost.

    Attributes:
        labels: label index of each variable, in the order the variables were added.
        cost: sum of all tables at these labels.
        width: largest number of neighbours of a variable at its removal: the induced width of the
            order, an upper bound on the treewidth after variables of one label and useless labels
            are removed. A joined table spans at most width + 1 variables.
        largest_table: entries of the largest joined table built, 0 if there was none.
    """

    labels: tuple[int, ...]
    cost: float
    width: int
    largest_table: int


class CostNetwork:
    """Variables with unary costs, and edges with pairwise costs.

    Example:
        problem = CostNetwork()
        a = problem.add_variable("a", np.array([0.0, 1.0]))
        b = problem.add_variable("b", np.array([5.0, 0.0]))
        problem.add_edge(a, b, np.array([[0.0, 2.0], [2.0, 0.0]]))
        problem.minimise().labels  # (1, 1)
    """

    def __init__(
        self, *, largest_table_entries: int = LARGEST_TABLE_ENTRIES, cases: int | None = None
    ) -> None:
        """Start an empty network; no table of more entries than the given number is ever built.

        Args:
            largest_table_entries: largest number of entries in a table, all cases together.
            cases: number of networks; tables then have a last axis for them. None: one network, and
                tables have no such axis.
        """
        self._cases = cases
        self._names: list[str] = []
        self._unaries: list[Costs] = []
        self._edges: dict[tuple[int, int], Costs] = {}
        self._largest_table_entries = largest_table_entries
        self._shared = Shared()

    def add_variable(self, name: str, unary: npt.ArrayLike) -> int:
        """Return the handle (0, 1, ...) of a new variable.

        Args:
            name: name of the variable in error messages.
            unary: cost of each label, shape (labels,), at least one label; `inf` forbids a label.
        """
        costs = self._table(unary)
        assert costs.ndim == 2, f"variable {name}: unary has shape {costs.shape}"
        assert costs.size, f"variable {name} has no label"
        self._names.append(name)
        self._unaries.append(costs)
        return len(self._names) - 1

    def add_edge(self, u: int, v: int, table: npt.ArrayLike) -> None:
        """Add a cost for each pair of labels of two variables; edges of the same pair are summed.

        Give equal tables as the same array: what follows from them is then worked out once.

        Args:
            u: handle of one variable.
            v: handle of another variable.
            table: costs, shape (labels of u, labels of v); `inf` forbids a pair.
        """
        costs = self._table(table)
        expected = len(self._unaries[u]), len(self._unaries[v]), self._cases or 1
        assert u != v, f"edge from {self._names[u]} to itself"
        assert costs.shape == expected, (
            f"edge {self._names[u]}, {self._names[v]}: table of shape {costs.shape}, not {expected}"
        )
        if u > v:
            u, v, costs = v, u, self._shared(flipped, costs)
        known = self._edges.get((u, v))
        self._edges[u, v] = costs if known is None else self._shared(np.add, known, costs)

    def _table(self, costs: npt.ArrayLike) -> Costs:
        """Return costs with an axis for the cases; the same array for the same."""
        table = np.asarray(costs, np.float64)
        return table if self._cases is not None else self._shared(_as_case, table)

    def cost(self, labels: Sequence[int], case: int = 0) -> float:
        """Return the sum of all tables of a case at the given labels, one for each variable."""
        own = zip(self._unaries, labels, strict=True)
        total = sum(unary.item(label, case) for unary, label in own)
        return total + sum(t.item(labels[u], labels[v], case) for (u, v), t in self._edges.items())

    def minimise(self) -> Solution:
        """Return labels of least total cost; the network stays as it is.

        The result depends only on the order in which variables and edges were added. Of equally
        good labels of a variable, given those fixed before it, the lowest is taken.

        Raises:
            WideError: a table would exceed the limit.
            ForbiddenError: no labels have a finite cost.
        """
        (solution,) = self.minimise_cases()
        return solution

    def minimise_cases(self) -> list[Solution]:
        """Return the labels of least total cost of each case.

        Raises:
            WideError: a table would exceed the limit.
            ForbiddenError: one case has no labels of finite cost.
        """
        self._check_values()
        limit = self._largest_table_entries // (self._cases or 1)
        work = _Elimination(self._names, self._unaries, self._edges, limit, self._shared)
        work.run()
        for case in np.flatnonzero(work.total == inf).tolist():
            raise _infeasible(
                self._names, self._first_forbidden(case) or work.first_forbidden(case)
            )
        return [
            Solution(labels, self.cost(labels, case), work.width, work.largest_table)
            for case, labels in enumerate(work.labels())
        ]

    def _check_values(self) -> None:
        """Assert that no cost is nan or -inf: both would silently spoil every sum they enter."""
        tables = {id(t): t for t in (*self._unaries, *self._edges.values())}
        if tables:
            worst = np.minimum.reduce(np.concatenate([t.ravel() for t in tables.values()]))
            assert worst > -inf, f"a cost is {worst}; costs are finite or inf"

    def _first_forbidden(self, case: int) -> Scope:
        """Return the variables of a case's first table that is all inf, () if there is none."""
        given: list[tuple[Scope, Costs]] = [((v,), t) for v, t in enumerate(self._unaries)]
        given.extend(self._edges.items())
        return next((scope for scope, table in given if np.isinf(table[..., case]).all()), ())


def _as_case(table: Costs) -> Costs:
    return table[..., None]


def _infeasible(names: Sequence[str], scope: Scope) -> ForbiddenError:
    shown = ", ".join(names[v] for v in scope)
    return ForbiddenError(
        f"no labels have a finite cost: every combination of the labels of ({shown}) is forbidden"
        " (inf); give one of them a label that is allowed next to all labels of its neighbours"
    )


class _Restriction(NamedTuple):
    """A step that kept only some labels of a variable."""

    variable: int
    kept: Labels


class _Removal(NamedTuple):
    """A step that removed a variable, with the tables it was in, its own axis last in each."""

    variable: int
    unary: Costs
    pairs: list[tuple[int, Costs]]
    joints: list[tuple[Scope, Costs]]


class _Elimination:
    """The shrinking network; `steps` records the removals and, read backwards, gives the labels.

    `near[v][u]` is the table of an edge, shape (labels of u, labels of v), or None where u and v
    meet only in a table of three or more variables. Those are in `joints`, by ascending variables;
    `scopes[v]` are the keys that hold v. Dicts serve as ordered sets: no order depends on hashing.
    """

    def __init__(
        self,
        names: Sequence[str],
        unaries: Iterable[Costs],
        edges: dict[tuple[int, int], Costs],
        largest_table_entries: int,
        shared: Shared,
    ) -> None:
        self.shared = shared
        self.names = names
        self.limit = largest_table_entries
        self.unary = list(unaries)
        self.near: list[dict[int, Costs | None]] = [{} for _ in names]
        for (u, v), table in edges.items():
            self.near[v][u] = table
            self.near[u][v] = shared(flipped, table)
        self.joints: dict[Scope, Costs] = {}
        self.scopes: list[dict[Scope, None]] = [{} for _ in names]
        self.steps: list[_Restriction | _Removal] = []
        self.alive = [True] * len(names)
        cases = self.unary[0].shape[1] if self.unary else 1
        self.total: Costs = np.zeros(cases)
        self.stuck = [-1] * cases  # the first variable whose one label left is forbidden
        self.width = 0
        self.largest_table = 0

    def run(self) -> None:
        """Remove every variable; `total` is then the least cost, inf if nothing is feasible."""
        heap = [(self._urgency(v), v) for v in range(len(self.names))]
        heapify(heap)
        pruned = False
        while heap:
            urgency, v = heappop(heap)
            if not self.alive[v] or urgency != self._urgency(v):
                continue  # a newer entry of v is, or was, in the heap
            if urgency > 2 and not pruned:
                pruned = True
                self._drop_dominated()
                heap = [(self._urgency(u), u) for u, alive in enumerate(self.alive) if alive]
                heapify(heap)
                continue
            neighbours = list(self.near[v])
            self._remove(v)
            for u in neighbours:
                heappush(heap, (self._urgency(u), u))

    def labels(self) -> list[tuple[int, ...]]:
        """Return the best label of each variable, of each case, after `run`."""
        case = np.arange(self.total.size)
        best: list[Labels] = [np.zeros(case.size, np.intp)] * len(self.names)
        for step in reversed(self.steps):
            if isinstance(step, _Restriction):
                best[step.variable] = step.kept[best[step.variable]]
                continue
            costs = step.unary.T
            for u, table in step.pairs:
                costs = costs + table[best[u], :, case]
            for scope, table in step.joints:
                own = np.moveaxis(table, -2, -1)  # (labels of the others, cases, own labels)
                costs = costs + own[(*[best[u] for u in scope], case)]
            best[step.variable] = costs.argmin(axis=1)
        return list(zip(*(b.tolist() for b in best), strict=True)) if best else [()] * case.size

    def first_forbidden(self, case: int) -> Scope:
        """Return the variables of a case's first joined table that was all inf.

        If there is none, the first variable whose only remaining label is forbidden.
        """
        for step in self.steps:
            if isinstance(step, _Removal):
                scope = _neighbours(step)
                if np.isinf(self._least(step, scope)[..., case]).all():
                    return (step.variable, *scope)
        assert self.stuck[case] >= 0, "the total is inf but no table is"
        return (self.stuck[case],)

    def _urgency(self, v: int) -> int:
        """Return the priority of a variable's removal; lower is sooner.

        0 with one label left, the neighbours up to two, then the entries of the joined table.
        """
        labels, near = len(self.unary[v]), self.near[v]
        if labels == 1:
            return 0
        if len(near) <= 2:
            return len(near)
        if len(near) > HUB:
            return self.limit + len(near)
        return 2 + labels * prod([len(self.unary[u]) for u in near])

    def _remove(self, v: int) -> None:
        """Minimise v out and record the step."""
        near, unary = self.near[v], self.unary[v]
        self.alive[v] = False
        for u in near:
            del self.near[u][v]
        pairs = [(u, table) for u, table in near.items() if table is not None]
        if len(unary) == 1:
            self._remove_fixed(v, pairs)
            return
        step = _Removal(v, unary, pairs, [])
        self.steps.append(step)
        degree = len(near)
        if degree > self.width:
            self.width = degree
        if degree > 2 or self.scopes[v]:
            self._remove_joint(step, tuple(sorted(near)))
        elif degree == 2:
            (a, at_a), (b, at_b) = pairs
            entries = at_a.shape[0] * at_a.shape[1] * at_b.shape[0]
            self.largest_table = max(self.largest_table, entries)
            self._add_pair(a, b, self.shared(least_between, at_a, unary, at_b))
        elif degree == 1:
            u, table = pairs[0]
            self.unary[u] = self.shared(add_least, self.unary[u], table, unary)
        else:
            self.total = self.total + np.minimum.reduce(unary)

    def _remove_fixed(self, v: int, pairs: list[tuple[int, Costs]]) -> None:
        """Remove a variable with one label left: its tables become costs of its neighbours."""
        assert not self.scopes[v], "labels are dropped before any table of three variables is built"
        (costs,) = self.unary[v]
        for case in np.flatnonzero(costs == inf).tolist():
            if self.stuck[case] < 0:
                self.stuck[case] = v
        self.total = self.total + costs
        for u, table in pairs:
            self.unary[u] = self.shared(add_first, self.unary[u], table)

    def _remove_joint(self, step: _Removal, scope: Scope) -> None:
        """Remove a variable of many neighbours (`scope`), or in a table of three or more."""
        v = step.variable
        entries = prod([len(self.unary[u]) for u in scope]) * len(step.unary)
        self.largest_table = max(self.largest_table, entries)
        if entries > self.limit:
            raise self._too_wide(v, scope, entries)
        for key in self.scopes[v]:
            others = tuple([u for u in key if u != v])
            joint = self.shared(move_last, self.joints.pop(key), how=key.index(v))
            step.joints.append((others, joint))
            for u in others:
                del self.scopes[u][key]
        step.pairs.sort()
        self._add_joint(scope, self._least(step, scope))

    def _least(self, step: _Removal, scope: Scope) -> Costs:
        """Return the least cost over the removed variable's labels, an axis for each of `scope`."""
        axis = {u: i for i, u in enumerate(scope)}
        parts: list[tuple[Scope, Costs]] = [((u,), table) for u, table in step.pairs]
        parts += step.joints
        axes = tuple([tuple([axis[u] for u in others]) for others, _ in parts])
        tables = [table for _, table in parts]
        least: Costs = self.shared(joined_least, step.unary, *tables, how=axes)
        return least

    def _add_joint(self, scope: Scope, table: Costs) -> None:
        """Add a table of any number of variables; they become neighbours of one another."""
        if len(scope) == 2:
            self._add_pair(*scope, table)
        elif len(scope) == 1:
            self.unary[scope[0]] = self.shared(np.add, self.unary[scope[0]], table)
        else:
            known = self.joints.get(scope)
            self.joints[scope] = table if known is None else self.shared(np.add, known, table)
            for u in scope:
                self.scopes[u][scope] = None
                for w in scope:
                    if w != u:
                        self.near[u].setdefault(w)

    def _add_pair(self, a: int, b: int, table: Costs) -> None:
        """Add an edge, or its costs to the edge that is there."""
        known = self.near[b].get(a)
        if known is not None:
            table = self.shared(np.add, known, table)
        self.near[b][a] = table
        self.near[a][b] = self.shared(flipped, table)

    def _drop_dominated(self) -> None:
        """Drop the labels that no best solution needs, until none is left to drop."""
        waiting = {v: None for v, alive in enumerate(self.alive) if alive and self.near[v]}
        with np.errstate(invalid="ignore"):  # inf - inf; _undominated ignores it
            while waiting:
                v = next(iter(waiting))
                del waiting[v]
                tables = [self._edge(u, v) for u in self.near[v]]
                kept = self.shared(undominated, self.unary[v], *tables)
                if kept.size < len(self.unary[v]):
                    self._restrict(v, kept)
                    waiting.update(dict.fromkeys(self.near[v]))

    def _edge(self, u: int, v: int) -> Costs:
        """Return near[u][v], shape (labels of v, labels of u)."""
        table = self.near[u][v]
        assert table is not None, "labels are dropped before any table of three variables is built"
        return table

    def _restrict(self, v: int, kept: Labels) -> None:
        self.steps.append(_Restriction(v, kept))
        self.unary[v] = self.shared(take, self.unary[v], kept)
        for u in self.near[v]:
            table = self.shared(take, self._edge(u, v), kept)
            self.near[u][v], self.near[v][u] = table, self.shared(flipped, table)

    def _too_wide(self, v: int, scope: Scope, entries: int) -> WideError:
        shown = ", ".join(self.names[u] for u in scope)
        most = max(scope, key=lambda u: len(self.near[u]))
        steps = [s for s in self.steps if isinstance(s, _Restriction) and s.variable == most]
        labels = np.arange(len(self.unary[most]))
        for step in reversed(steps):
            labels = step.kept[labels]
        error = WideError(
            f"the splits of {self.names[v]} and of the {len(scope)} values that it shares readers "
            f"with ({shown}) have to be chosen together: got {entries:.3g} combinations; expected "
            f"at most {self.limit:.3g}; compile with sp=1, which splits nothing, and report this "
            "with the model: it is a limit of dcpc's placement"
        )
        error.variable, error.labels = most, labels.tolist()
        return error


def _neighbours(step: _Removal) -> Scope:
    """Return the variables that shared a table with a removed one, ascending."""
    return tuple(sorted({u for u, _ in step.pairs}.union(*(scope for scope, _ in step.joints))))
