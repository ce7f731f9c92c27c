"""What a group of ranks costs: the interface that planners with barriers ask.

A *key* is what a cost knows a sequence by: its length in tokens.
A *setting* is a choice a group makes once for its work in a micro-step: which recompute row.
"""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dcpc.errors import PlanError

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
