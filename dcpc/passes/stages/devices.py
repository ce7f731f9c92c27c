"""The states of the searches: the number of used devices of each kind, whatever their order."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Taken:
    """All possible numbers of used devices.

    Attributes:
        counts: number of devices of each kind.
        strides: difference of a state's index when one more device of a kind is used.
        levels: for each number of used devices, the indices of the states with as many.
    """

    counts: tuple[int, ...]
    strides: tuple[int, ...]
    levels: tuple[Integers, ...]

    @staticmethod
    def of(counts: Sequence[int]) -> Taken:
        """Returns the states for given numbers of devices of each kind."""
        sizes = [n + 1 for n in counts]
        strides = [*itertools.accumulate(sizes[:0:-1], lambda a, b: a * b, initial=1)][::-1]
        used = np.indices(sizes).reshape(len(sizes), -1).sum(axis=0)
        order = np.argsort(used, kind="stable")
        cuts = np.searchsorted(used[order], np.arange(1, sum(counts) + 1))
        return Taken(tuple(counts), tuple(strides), tuple(np.split(order, cuts)))

    @property
    def states(self) -> int:
        """The number of states."""
        return sum(map(len, self.levels))

    def used(self, kind: int, states: Integers) -> Integers:
        """Returns the number of devices of a kind that each state uses."""
        return states // self.strides[kind] % (self.counts[kind] + 1)
