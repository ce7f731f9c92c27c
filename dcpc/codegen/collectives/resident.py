"""Whole parameters that stay on the device from one micro-batch of a step to later ones.

A unit of parameters that waits in the host's memory is copied to the device for each use, unless it
is still there. Which ones stay is planned over all uses of a step, as each micro-batch leaves other
room:

    room   ███████████████│███ │███████████████
    uses   0 1 2 3  3 2 1 │0 1 2 3  3 2 1 0│0 1 2 3  3 2 1
           short            long             short
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor


def kept_after(uses: Sequence[int], room: Sequence[float], size_bytes: Sequence[int]) -> list[bool]:
    """Returns for each use whether its unit stays until its next one.

    Where not all have room, the unit whose next use is last goes: all that are there take room
    until now, and it would take it for longest (Belady's rule). With units of one size no choice
    copies less.

    Args:
        uses: number of the unit of each use, in order.
        room: bytes for units that stay beside the one in use, at each use.
        size_bytes: bytes of each unit.
    """
    following = [len(uses)] * len(uses)
    later: dict[int, int] = {}
    for i in reversed(range(len(uses))):
        following[i] = later.get(uses[i], len(uses))
        later[uses[i]] = i
    stays, held, held_bytes = [False] * len(uses), dict[int, int](), 0
    for i, unit in enumerate(uses):
        if held.pop(unit, None) is not None:
            held_bytes -= size_bytes[unit]
        while held_bytes > room[i]:
            goes = max(held, key=lambda u: following[held[u]])
            stays[held.pop(goes)] = False
            held_bytes -= size_bytes[goes]
        if following[i] < len(uses):
            held[unit], stays[i] = i, True
            held_bytes += size_bytes[unit]
    return stays


class Resident:
    """Units that stay over the uses of one step.

    Args:
        uses: number of the unit of each use, in order.
        stays: whether the unit of each use stays until its next one.
        numbers: address of the rows of a unit's first parameter -> number of the unit.
    """

    def __init__(
        self, uses: Sequence[int], stays: Sequence[bool], numbers: Mapping[int, int]
    ) -> None:
        self._numbers = numbers
        self._stays: dict[int, deque[bool]] = {n: deque() for n in numbers.values()}
        for unit, one in zip(uses, stays, strict=True):
            self._stays[unit].append(one)
        self._held: dict[int, list[Tensor]] = {}

    def of(self, rows: Sequence[Tensor], load: Callable[[], list[Tensor]]) -> list[Tensor]:
        """Returns a unit's whole parameters: those that stayed, or loaded ones."""
        unit = self._numbers.get(rows[0].data_ptr())
        if unit is None:
            return load()
        found = self._held.pop(unit, None) or load()
        if self._stays[unit] and self._stays[unit].popleft():
            self._held[unit] = found
        return found


class FetchedUnits:
    """Units as they are copied to the device, of whatever runs in this process.

    Attributes:
        resident: units that stay over the current step; None: none do.
        read_bytes: bytes of units that graphs have read.
        copied_bytes: bytes of units that were copied for it.
    """

    resident: Resident | None = None
    read_bytes: int = 0
    copied_bytes: int = 0

    def of(self, rows: Sequence[Tensor], load: Callable[[], list[Tensor]]) -> list[Tensor]:
        """Returns a unit's whole parameters."""

        def copied() -> list[Tensor]:
            found = load()
            self.copied_bytes += sum(t.nbytes for t in found)
            return found

        found = copied() if self.resident is None else self.resident.of(rows, copied)
        self.read_bytes += sum(t.nbytes for t in found)
        return found


fetched = FetchedUnits()
