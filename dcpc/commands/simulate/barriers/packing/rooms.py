"""First fit and best fit in logarithmic time for each item."""

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from math import inf


class Rooms:
    """Bins in order, each with its room, as a tree of maxima."""

    def __init__(self) -> None:
        self._size = 1
        self._most = [-inf, -inf]

    def set(self, bin_: int, room: float) -> None:
        """Changes the room of a bin, or adds one."""
        while bin_ >= self._size:
            leaves = [*self._most[self._size :], *[-inf] * self._size]
            self._size *= 2
            self._most = [-inf] * self._size + leaves
            for i in range(self._size - 1, 0, -1):
                self._most[i] = max(self._most[2 * i], self._most[2 * i + 1])
        i = self._size + bin_
        self._most[i] = room
        while i > 1:
            i //= 2
            self._most[i] = max(self._most[2 * i], self._most[2 * i + 1])

    def first(self, room: float, takes: Callable[[int], bool]) -> int | None:
        """Returns the first bin with at least this room that also takes the item; None: no bin."""
        stack = [1]
        while stack:
            i = stack.pop()
            if self._most[i] < room:
                continue
            if i >= self._size:
                if takes(i - self._size):
                    return i - self._size
                continue
            stack += [2 * i + 1, 2 * i]
        return None


def best_fit(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Returns the positions of sizes in bins, largest first into the fullest bin that has room."""
    rooms: list[tuple[int, int]] = []  # ascending (room, bin)
    bins: list[list[int]] = []
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        at = bisect_left(rooms, (sizes[i], -1))
        if at == len(rooms):
            bins.append([])
            room, chosen = capacity, len(bins) - 1
        else:
            room, chosen = rooms.pop(at)
        bins[chosen].append(i)
        insort(rooms, (room - sizes[i], chosen))
    return bins
