"""First fit in logarithmic time: the first of many bins that still has room."""

from collections.abc import Callable
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
