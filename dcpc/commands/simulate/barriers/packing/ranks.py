"""Consecutive ranks for groups: small groups inside a node, large ones from one end."""

import heapq
from dataclasses import dataclass, field


@dataclass(slots=True)
class FreeRanks:
    """The free ranks of one micro-step, an interval a node.

    Attributes:
        node_ranks: ranks of a node.
        low: first free rank, by node.
        high: one past the last free rank, by node.
    """

    node_ranks: int
    low: list[int]
    high: list[int]
    _by_room: dict[int, list[tuple[int, int]]] = field(default_factory=dict, init=False, repr=False)

    @staticmethod
    def all(ranks: int, node_ranks: int) -> "FreeRanks":
        """Every rank free; a node of more ranks than there are is one of all of them."""
        node_ranks = max(1, min(node_ranks, ranks))
        low = list(range(0, ranks, node_ranks))
        return FreeRanks(node_ranks, low, [min(x + node_ranks, ranks) for x in low])

    def count(self) -> int:
        """How many are free."""
        return sum(self.high) - sum(self.low)

    def take(self, degree: int) -> int | None:
        """Takes `degree` ranks; returns the first of them, None if there is no such interval."""
        if not self._by_room:
            for node in range(len(self.low)):
                self._set_low(node, self.low[node])
        if degree > self.node_ranks:
            return self._take_across(degree)
        for room in range(degree, self.node_ranks + 1):
            if (found := self._node_with(room)) is not None:
                first = self.low[found]
                self._set_low(found, first + degree)
                return first
        return None

    def _node_with(self, room: int) -> int | None:
        """The last node with so many free ranks; heaps of (-low, node) whose stale entries go."""
        heap = self._by_room.get(room, [])
        while heap:
            low, node = -heap[0][0], heap[0][1]
            if self.low[node] == low and self.high[node] - low == room:
                return node
            heapq.heappop(heap)
        return None

    def _set_low(self, node: int, low: int) -> None:
        self.low[node] = low
        entry = (-low, node)
        heapq.heappush(self._by_room.setdefault(self.high[node] - low, []), entry)

    def _take_across(self, degree: int) -> int | None:
        start = 0
        while start < len(self.low):
            end = start
            while self.high[end] - self.low[start] < degree:
                end += 1
                if end == len(self.low) or self.low[end] != self.high[end - 1]:
                    break
            if (
                end < len(self.low)
                and self.high[end] - self.low[start] >= degree
                and all(self.low[i] == self.high[i - 1] for i in range(start + 1, end + 1))
            ):
                return self._occupy(start, end, degree)
            start = max(end, start + 1)
        return None

    def _occupy(self, start: int, end: int, degree: int) -> int:
        first = self.low[start]
        for node in range(start, end):
            self._set_low(node, self.high[node])
        self._set_low(end, max(self.low[end], first + degree))
        return first
