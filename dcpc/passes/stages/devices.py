"""The states of the searches: how many devices of each kind are used, whatever their order."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Taken:
    """All ways to have taken some of the devices.

    Attributes:
        counts: devices of each kind.
        strides: what taking one of a kind adds to a state's number.
        levels: of each number of devices the states that took so many, `[states]` each.
    """

    counts: tuple[int, ...]
    strides: tuple[int, ...]
    levels: tuple[Integers, ...]

    @staticmethod
    def of(counts: Sequence[int]) -> Taken:
        """Returns the states of so many devices of each kind."""
        sizes = [n + 1 for n in counts]
        strides = [*itertools.accumulate(sizes[:0:-1], lambda a, b: a * b, initial=1)][::-1]
        used = np.indices(sizes).reshape(len(sizes), -1).sum(axis=0)
        order = np.argsort(used, kind="stable")
        cuts = np.searchsorted(used[order], np.arange(1, sum(counts) + 1))
        return Taken(tuple(counts), tuple(strides), tuple(np.split(order, cuts)))

    @property
    def states(self) -> int:
        """How many there are."""
        return sum(map(len, self.levels))

    def used(self, kind: int, states: Integers) -> Integers:
        """Returns how many devices of a kind each state took."""
        return states // self.strides[kind] % (self.counts[kind] + 1)
