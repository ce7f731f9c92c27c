"""Consecutive ranks for groups: small groups inside a node, large ones from one end."""

from dataclasses import dataclass


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

    @staticmethod
    def all(ranks: int, node_ranks: int) -> "FreeRanks":
        """Every rank free."""
        low = list(range(0, ranks, node_ranks))
        return FreeRanks(node_ranks, low, [min(x + node_ranks, ranks) for x in low])

    def count(self) -> int:
        """How many are free."""
        return sum(self.high) - sum(self.low)

    def take(self, degree: int) -> int | None:
        """Takes `degree` ranks; returns the first of them, None if there is no such interval."""
        if degree <= self.node_ranks:
            fits = [(h - lo, -lo, i) for i, (lo, h) in enumerate(zip(self.low, self.high,
                                                                    strict=True))
                    if h - lo >= degree]  # fmt: skip
            if not fits:
                return None
            node = min(fits)[2]
            first = self.low[node]
            self.low[node] += degree
            return first
        return self._take_across(degree)

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
            self.low[node] = self.high[node]
        self.low[end] = max(self.low[end], first + degree)
        return first
