"""What a group of ranks costs: one interface, and the table of a plan's rows (`TableCost`).

A *key* is what a cost knows a sequence by: its bucket (table), or its length in tokens (a formula).
A *setting* is a choice a group makes once for its work in a micro-step: which recompute row.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dcpc.errors import PlanError
from dcpc.ir import PlanRow

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


class GroupCost(Protocol):
    """Seconds and memory of a group of ranks, additive over the sequences that it is given.

    Attributes:
        ranks: how many ranks there are.
        node_ranks: ranks of a node; a group of at most so many is never spread over two.
        degrees: allowed group sizes, ascending.
        settings: names of the rows a group chooses between.
        fixed_s: seconds of a micro-step before the first sequence.
    """

    @property
    def ranks(self) -> int:
        """How many ranks there are."""

    @property
    def node_ranks(self) -> int:
        """Ranks of a node."""

    @property
    def degrees(self) -> tuple[int, ...]:
        """Allowed group sizes, ascending."""

    @property
    def settings(self) -> tuple[str, ...]:
        """Names of the rows a group chooses between."""

    @property
    def fixed_s(self) -> float:
        """Seconds of a micro-step before the first sequence."""

    def seconds(self, keys: IntArray) -> FloatArray:
        """Seconds that one sequence adds, [setting, degree, key]; inf: not at all."""

    def weights(self, keys: IntArray) -> FloatArray:
        """What one sequence takes of its group's capacity, [key]."""

    def capacities(self) -> FloatArray:
        """What a group holds at once, in the unit of `weights`, [setting, degree]."""


@dataclass(frozen=True, slots=True)
class TableCost:
    """Rows of each bucket; a group runs its micro-batches one after another, one bucket in each.

    Memory bounds a run, not the sum of a group's runs, so rows that fit are all there are, and a
    group holds any number of samples. A run short of samples costs what lies on the line between
    its row and the next smaller one (or nothing for no samples).
    """

    ranks: int
    rows: Mapping[int, tuple[PlanRow, ...]]
    fixed_s: float = 0.0
    node_ranks: int = 8
    degrees: tuple[int, ...] = field(default=(), init=False)
    _by_cell: dict[tuple[int, int], tuple[PlanRow, ...]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        """Groups the rows by bucket and degree."""
        cells: dict[tuple[int, int], list[PlanRow]] = {}
        for bucket, rows in self.rows.items():
            for row in (row for row in rows if row.sp <= self.ranks):
                cells.setdefault((bucket, row.sp), []).append(row)
        self._by_cell.update({cell: tuple(rows) for cell, rows in cells.items()})
        object.__setattr__(self, "degrees", tuple(sorted({degree for _, degree in cells})))
        check_degrees(self.degrees, self.ranks)

    @property
    def settings(self) -> tuple[str, ...]:
        """One: each run chooses its own row."""
        return ("table",)

    def seconds(self, keys: IntArray) -> FloatArray:
        """Seconds a sample at the best full micro-batch, [1, degree, key]."""
        out = np.full((1, len(self.degrees), len(keys)), inf)
        for j, degree in enumerate(self.degrees):
            for k, bucket in enumerate(keys.tolist()):
                rows = self._by_cell.get((bucket, degree), ())
                out[0, j, k] = min((r.seconds_s / r.micro_batch for r in rows), default=inf)
        return out

    def weights(self, keys: IntArray) -> FloatArray:
        """Nothing: memory does not add up over runs."""
        return np.zeros(len(keys))

    def capacities(self) -> FloatArray:
        """Any number, [1, degree]."""
        return np.ones((1, len(self.degrees)))


def check_degrees(degrees: tuple[int, ...], ranks: int) -> None:
    """Refuses degrees that are not ascending, or not within 1 and `ranks`.

    Raises:
        PlanError: they are not.
    """
    if not degrees or list(degrees) != sorted(set(degrees)) or not 1 <= degrees[0] <= ranks:
        raise PlanError(
            f"degrees: got {degrees}, expected ascending group sizes from 1 to {ranks} ranks; "
            "give at least one that fits"
        )
    if degrees[-1] > ranks:
        raise PlanError(
            f"degrees: got {degrees[-1]}, but there are {ranks} ranks; leave out larger groups"
        )
