"""Arithmetic on tables of costs, with a cache of results for the same tables.

A table has an axis for each variable, then one for the cases: networks of one shape and other
costs, which are minimised together.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import accumulate
from math import inf
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Costs: TypeAlias = npt.NDArray[np.float64]
Labels: TypeAlias = npt.NDArray[np.intp]


# Beyond this, making the bytes to compare would cost more than it can save.
MOST_COMPARED_BYTES = 1 << 16


class Shared:
    """Caches functions of arrays by the array *objects*, and shares equal results.

    Repeated layers share their tables, so nearly all work on them is found here. It keeps the
    arrays alive, so that an id cannot be reused. They must not be written to.
    """

    def __init__(self) -> None:
        """Creates an empty cache."""
        self._known: dict[tuple[object, ...], tuple[Any, tuple[object, ...]]] = {}
        self._equal: dict[tuple[object, ...], Any] = {}

    def __call__(self, function: Callable[..., Any], *arrays: Any, how: Any = None) -> Any:
        """Returns `function(*arrays)`, or `function(how, *arrays)` with the hashable `how`."""
        key = (function, how, *map(id, arrays))
        known = self._known.get(key)
        if known is None:
            result = function(*arrays) if how is None else function(how, *arrays)
            self._known[key] = known = (self.one(result), arrays)
        return known[0]

    def one(self, array: Any) -> Any:
        """Returns the first array seen that equals this one in shape and every bit."""
        if array.nbytes > MOST_COMPARED_BYTES:
            return array
        return self._equal.setdefault((array.shape, array.dtype.char, array.tobytes()), array)


def add_first(unary: Costs, table: Costs) -> Costs:
    """Returns unary + table[:, 0], shape (labels, cases)."""
    return unary + table[:, 0]


def add_least(unary: Costs, table: Costs, other: Costs) -> Costs:
    """Returns unary + the least of table + other over the table's second axis."""
    least: Costs = unary + np.minimum.reduce(table + other, axis=1)
    return least


def least_between(at_a: Costs, unary: Costs, at_b: Costs) -> Costs:
    """Returns the least of at_a[a, x] + unary[x] + at_b[b, x] over x, shape (a, b, cases)."""
    least: Costs = np.minimum.reduce((at_a + unary)[:, None, :] + at_b, axis=2)
    return least


def joined_least(axes: tuple[tuple[int, ...], ...], unary: Costs, *tables: Costs) -> Costs:
    """Returns the least cost over one variable's labels, with an axis for each other variable.

    That variable's axis comes first in the sum: a minimum over the first axis reads memory in
    order.

    Args:
        axes: for each table, the result's axes of its own axes, ascending, without the table's last
            two (the variable and the cases).
        unary: costs of the variable's labels, shape (labels, cases).
        tables: costs of the variable together with one or more of the others.
    """
    ndim = 1 + max((axis for at in axes for axis in at), default=-1)
    labels, cases = unary.shape
    joined = unary.reshape(labels, *[1] * ndim, cases)
    for at, table in sorted(zip(axes, tables, strict=True), key=lambda item: item[1].size):
        shape = [labels, *[1] * ndim, cases]
        for axis, size in zip(at, table.shape[: len(at)], strict=True):
            shape[1 + axis] = size
        joined = joined + np.moveaxis(table, -2, 0).reshape(shape)
    least: Costs = np.minimum.reduce(joined, axis=0)
    return least


def move_last(axis: int, table: Costs) -> Costs:
    """Returns the table with one axis moved to the end, before the cases."""
    return np.moveaxis(table, axis, -2)


def flipped(table: Costs) -> Costs:
    """Returns the table of two variables with the second one first."""
    return table.swapaxes(0, 1)


def take(table: Costs, kept: Labels) -> Costs:
    """Returns some rows of a table."""
    return table[kept]


def undominated(unary: Costs, *tables: Costs) -> Labels:
    """Returns the labels of a variable that are worth keeping, ascending, at least one.

    Replaces a by b wherever b costs no more than a for every label of every neighbour taken singly:
    unary[a] - unary[b] + sum over edges of min over x of (table[a, x] - table[b, x]) >= 0
    (Goldstein's dead-end elimination), in all cases. Of equals the lowest stays.

    Args:
        unary: costs of the labels, shape (labels, cases).
        tables: one for each neighbour, shape (labels, labels of the neighbour, cases).

    Source: R. F. Goldstein, Biophysical Journal 66 (1994) 1335, equation 2.
    """
    allowed = np.flatnonzero((unary < inf).any(axis=1))
    if allowed.size < 2:
        return allowed if allowed.size else np.arange(len(unary))
    rows, costs = np.concatenate(tables, axis=1), unary
    if allowed.size < len(unary):
        rows, costs = rows[allowed], unary[allowed]
    starts = [0, *accumulate([table.shape[1] for table in tables[:-1]])]
    # nan = inf - inf: the neighbour's label is forbidden next to either, so fmin passes over it.
    gaps = np.add.reduce(np.fmin.reduceat(rows[:, None] - rows, starts, axis=2), axis=2)
    own = costs[:, None] - costs
    own[np.isnan(own)] = inf  # both are forbidden: neither is needed
    worse = np.logical_and.reduce(gaps + own >= _least_gap(allowed.size)[..., None], axis=2)
    candidates = np.flatnonzero(np.logical_or.reduce(worse, axis=1))
    kept = list(range(allowed.size))
    for a in candidates[::-1].tolist():
        if worse[a, kept].any():  # by one that is still there: rounding could close a circle
            kept.remove(a)
    return allowed[kept]


@cache
def _least_gap(labels: int) -> Costs:
    """Return by how much label a must cost more than b to be dropped: any amount, or 0 if a > b."""
    return np.triu(np.full((labels, labels), 5e-324))
