"""The route of the keys round a ring of ranks, and the bytes that are sent.

A ring has p / across positions: `across` consecutive ranks stand at one position, with one piece of
the rows between them (each has other heads), and rank r passes on what it has to rank r + across.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from dcpc.ops.attention import RunOfRows, sees
from dcpc.ops.pieces import runs

DIRECTIONS = (1, -1)


@dataclass(frozen=True, slots=True)
class RowSplit:
    """The split of a dim of rows, see `pieces.py`.

    Attributes:
        size: length of the whole dim.
        parent: length that is split evenly over the ranks.
        shift: position of the dim's first element in the parent.
        zigzag: whether a rank has two chunks, one from either end.
        rows: number of rows in each element (inner factors of the dim).
    """

    size: int
    parent: int
    shift: int
    zigzag: bool
    rows: int = 1

    def runs(self, p: int, across: int, position: int) -> tuple[RunOfRows, ...]:
        """Returns the runs of rows at one ring position: those of its ranks together, in order."""
        ranks = range(position * across, (position + 1) * across)
        every = (runs(self.size, self.parent, self.shift, p, r, self.zigzag) for r in ranks)
        found: list[RunOfRows] = []
        elements = sorted(run for mine in every for run in mine if run[1])
        for start, length in ((s * self.rows, n * self.rows) for s, n in elements):
            if found and found[-1].position + found[-1].length == start:
                found[-1] = found[-1]._replace(length=found[-1].length + length)
            else:
                at = sum(run.length for run in found)
                found.append(RunOfRows(at, length, start))
        return tuple(found)


@dataclass(frozen=True, slots=True)
class Route:
    """The route of each ring position's keys.

    Attributes:
        p: number of ranks in the group.
        across: number of ranks at a position.
        queries: runs of queries, by position.
        keys: runs of keys, by position.
        forth: number of steps that each position's keys are passed forward: up to the last position
            with a query that may see one of them.
        back: number of steps that they are passed backward. Keys that all see go forward alone.
    """

    p: int
    across: int
    queries: tuple[tuple[RunOfRows, ...], ...]
    keys: tuple[tuple[RunOfRows, ...], ...]
    forth: tuple[int, ...]
    back: tuple[int, ...]

    @property
    def positions(self) -> int:
        """The number of positions of the ring."""
        return self.p // self.across

    def hops(self, direction: int) -> tuple[int, ...]:
        """Returns how many steps each position's keys go: direction 1 forward, -1 backward."""
        return self.forth if direction > 0 else self.back

    def held(self, position: int, step: int, direction: int = 1) -> int | None:
        """Returns the position whose keys are here after some steps, or None."""
        owner = (position - direction * step) % self.positions
        return owner if step <= self.hops(direction)[owner] else None

    def rows(self, owner: int) -> int:
        """Returns the number of keys of a position."""
        return sum(run.length for run in self.keys[owner])


@lru_cache(maxsize=256)  # every layer asks for the same, and pairs of positions are looked at
def route(
    queries: RowSplit,
    keys: RowSplit,
    p: int,
    across: int = 1,
    before: int | None = None,
    after: int | None = None,
    everywhere: bool = False,
) -> Route:
    """Returns the route of the keys, the same on all ranks.

    Args:
        queries: split of the queries.
        keys: split of the keys.
        p: number of ranks in the group.
        across: number of ranks at a position.
        before: number of keys before its own position that a query sees; None: all.
        after: number of keys after its own position that a query sees; None: all.
        everywhere: whether all keys must pass all positions, as where a query without keys gets the
            mean of all values.
    """
    positions = p // across
    assert positions * across == p, f"a ring of {p} ranks, {across} at a position"
    asked, held = (
        tuple(split.runs(p, across, c) for c in range(positions)) for split in (queries, keys)
    )

    def needed(owner: int, hop: int) -> bool:
        there = asked[(owner + hop) % positions]
        return any(sees(q, k, before, after) for q in there for k in held[owner])

    def reach(owner: int) -> tuple[int, int]:
        """How far forward and how far back, together as few as reach all."""
        hops = range(1, positions)
        wanted = [hop for hop in hops if everywhere or needed(owner, hop)] if held[owner] else []
        ways = [
            (wanted[i - 1] if i else 0, positions - wanted[i] if i < len(wanted) else 0)
            for i in range(len(wanted) + 1)
        ]
        return min(ways, key=lambda way: (sum(way), way[1]))

    forth, back = zip(*map(reach, range(positions)), strict=True)
    return Route(p, across, asked, held, forth, back)


def sent_bytes(way: Route, rank: int, row_bytes: int, gradient_row_bytes: int) -> tuple[int, int]:
    """Returns the bytes that a rank sends in forward, and in backward.

    Forward: a row of keys and values for each key that it passes on. Backward: the same, and a row
    of their gradients for each key that it passes on (back, not those of its own keys), or that it
    is the last to have and whose gradients it sends home. With n keys in even pieces that all go
    round, m = p / across positions:

        forward    (m - 1) * n / m * row_bytes
        backward   (m - 1) * n / m * row_bytes + m * n / m * gradient_row_bytes

    Args:
        way: route of the keys.
        rank: index of the rank in the group.
        row_bytes: bytes of one key and one value, all samples and heads of the rank: for keys `[b,
            g, t, d]` and values `[b, g, t, e]`, b * g * (d + e) elements.
        gradient_row_bytes: bytes of their gradients, in float32 or better.
    """
    position = rank // way.across
    passed = gradients = 0
    for direction, step in product(DIRECTIONS, range(way.positions)):
        owner = way.held(position, step, direction)
        if owner is None:
            continue
        on = step < way.hops(direction)[owner]
        passed += way.rows(owner) * on
        gradients += way.rows(owner) * (step > 0 or (on and direction > 0))
    return passed * row_bytes, passed * row_bytes + gradients * gradient_row_bytes
