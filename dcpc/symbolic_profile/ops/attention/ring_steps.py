"""Memory of a ring's rank step by step, at given sizes.

Follows `codegen/collectives/ring_passing.py` line by line: which buffers of keys, values and their
gradients its variables and its messages have, and beside them what the largest rectangle of a step
takes (`shapes.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

from dcpc.ops.attention import RunOfRows, Sight
from dcpc.ops.attention.rectangles import QueryCutter, Rectangle
from dcpc.ops.ring_route import DIRECTIONS, Route, RowSplit, route
from dcpc.symbolic_profile.ops.attention.shapes import (
    HeadSizes,
    Part,
    backward_bytes,
    forward_bytes,
)
from dcpc.symbolic_profile.polynomials import FUNCTIONS, OfIntegers, each_point

MOST_POSITIONS = 8  # of a ring that are all followed


class RingSizes(NamedTuple):
    """Sizes of a ring besides `HeadSizes`.

    Attributes:
        query_split: split of all queries.
        key_split: split of all keys.
        backward: whether gradients are sent round.
        ranks: ranks of the group.
        across: ranks at a position.
        causal: whether a query sees no key after it.
        averages: whether a query that sees nothing gets the mean of all values.
        queries: rows of queries of this rank.
        keys: rows of keys of this rank.
    """

    query_split: RowSplit
    key_split: RowSplit
    backward: int
    ranks: int
    across: int
    causal: int
    averages: int
    queries: int
    keys: int

    @property
    def sight(self) -> Sight:
        """Returns the attention mask spec: causal, or all keys."""
        return Sight(1.0, after=0 if self.causal else None)

    def route(self) -> tuple[Route, bool]:
        """Returns where keys go, and whether queries may get the mean of all values."""
        queries, keys = self.query_split, self.key_split
        missed = self.sight.misses(queries.size * queries.rows, keys.size * keys.rows)
        everywhere = bool(self.averages) and missed
        after = self.sight.after
        return route(queries, keys, self.ranks, self.across, None, after, everywhere), everywhere


class RingBytes(OfIntegers):
    """Bytes that a ring's op holds beyond inputs and outputs.

    Of the integers of `RingSizes`, those of its splits, and `HeadSizes`.

    Where ranks with as many rows differ, of the one that holds most.
    """

    def _sympystr(self, printer: Any) -> str:
        kind = "backward" if self.args[0] == 1 else "forward"
        return f"ring_{kind}({printer.doprint(self.args[7])})"


@functools.lru_cache(maxsize=1 << 14)
def ring_bytes(*sizes: int) -> int:
    """Returns the bytes of `RingBytes`."""
    ring = RingSizes(_split(*sizes[7:12]), _split(*sizes[12:17]), *sizes[:7])
    heads = HeadSizes(*sizes[17:])
    if 0 in (heads.batch, heads.heads, heads.key_heads, heads.width, ring.key_split.size):
        return 0
    way, everywhere = ring.route()
    here = (ring.queries, ring.keys)
    rows = [(sum(run.length for run in way.queries[i]), way.rows(i)) for i in range(way.positions)]
    like = [i for i, found in enumerate(rows) if found == here] or [*range(way.positions)]
    if len(like) > MOST_POSITIONS:
        middle, end = len(like) // 2, MOST_POSITIONS // 4
        like = [*like[:end], *like[middle - end : middle + end], *like[-end:]]
    return max(_RingPosition(ring, heads, way, everywhere, i).held() for i in like)


def _split(size: int, parent: int, shift: int, zigzag: int, rows: int) -> RowSplit:
    return RowSplit(size, parent, shift, bool(zigzag), rows)


class _Buffer:
    """Memory of so many bytes."""

    __slots__ = ("size_bytes",)

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes


class _RingPosition:
    """One position of a ring, and its peak of live bytes so far.

    Args:
        ring: sizes of the ring.
        heads: sizes of the attention.
        way: route of the keys.
        everywhere: whether queries may get the mean of all values.
        at: number of the position.
    """

    def __init__(
        self, ring: RingSizes, heads: HeadSizes, way: Route, everywhere: bool, at: int
    ) -> None:
        self._ring, self._heads, self._way, self._at = ring, heads, way, at
        self._averages = everywhere
        self._cutter = QueryCutter(way.queries[at], ring.sight, None)
        self._rows = sum(run.length for run in way.queries[at])
        self._most = 0

    def held(self) -> int:
        """Returns the bytes that it holds beyond inputs and outputs."""
        return self._backward() if self._ring.backward else self._forward()

    def _note(self, fixed: int, *buffers: _Buffer | None) -> None:
        """Raises the peak to the live bytes: fixed ones, and buffers, some under several names."""
        alive = sum(b.size_bytes for b in set(buffers) if b is not None)
        self._most = max(self._most, fixed + alive)

    def _buffer(self, owner: int | None, item_bytes: int) -> _Buffer | None:
        """Returns memory for some position's keys and values, or for their gradients."""
        if owner is None:
            return None
        s, rows = self._heads, self._way.rows(owner)
        return _Buffer(2 * s.key_bytes(rows) // s.item_bytes * item_bytes)

    def _owner(self, step: int, direction: int) -> int | None:
        return self._way.held(self._at, step, direction)

    def _passes_on(self, step: int, direction: int) -> bool:
        owner = self._owner(step, direction)
        return owner is not None and step < self._way.hops(direction)[owner]

    def _chains(self) -> Iterator[tuple[int, int, _Buffer | None]]:
        """Yields each direction, its last step, and the buffer that this position sends first."""
        for direction in DIRECTIONS:
            last = max(self._way.hops(direction))
            if direction > 0 or last:
                sends = self._passes_on(0, direction)
                own = self._buffer(self._at, self._heads.item_bytes) if sends else None
                yield direction, last, own

    # ------------------------------------------------------------------------------------ forward

    def _forward(self) -> int:
        s, rows = self._heads, self._rows
        out, lse = s.query_bytes(rows), s.sum_bytes(rows)
        wide = out // s.item_bytes * s.wide_bytes
        sums = wide + lse + s.batch * s.key_heads * s.width * s.wide_bytes
        self._note(sums + out)
        for direction, last, packed in self._chains():
            held = packed
            for step in range(last + 1):
                coming = self._buffer(self._owner(step + 1, direction), s.item_bytes)
                self._note(sums + self._added(step, direction), held, coming)
                held = coming
        none = s.batch * s.heads * rows
        mean = s.batch * s.heads * s.width * s.wide_bytes + wide if self._averages else 0
        half = out + lse if s.item_bytes < 4 else 0
        self._note(sums + none + max(mean, half))
        return self._most - out - lse

    def _added(self, step: int, direction: int) -> int:
        """Returns the transient bytes of attention to the keys of a step."""
        owner = self._owner(step, direction)
        if owner is None or (step == 0 and direction < 0):
            return 0
        fresh = step == 0
        parts = self._cutter.against(self._way.keys[owner])
        return max(
            (forward_bytes(self._heads, _part(r), fresh and r.first, own=step == 0) for r in parts),
            default=0,
        )

    # ----------------------------------------------------------------------------------- backward

    def _backward(self) -> int:
        s, rows = self._heads, self._rows
        outputs = s.query_bytes(rows) + 2 * s.key_bytes(self._way.rows(self._at))
        wide = s.query_bytes(rows) // s.item_bytes * s.wide_bytes
        sums = wide + s.batch * s.heads * rows
        self._note(sums)
        found: _Buffer | None = None
        for direction, last, packed in self._chains():
            more = self._gradients(sums, direction, last, packed, found)
            found = found or more
        ended = outputs if s.item_bytes < 4 else outputs - s.query_bytes(rows)
        self._note(sums + ended, found)
        return self._most - outputs

    def _gradients(
        self, sums: int, way: int, last: int, packed: _Buffer | None, before_it: _Buffer | None
    ) -> _Buffer | None:
        """Follows `_gradients` of `ring_passing.py`; the names are those there."""
        item_bytes, wide_bytes = self._heads.item_bytes, self._heads.wide_bytes
        hops = self._way.hops(way)[self._at]
        held, more = packed, None
        found: _Buffer | None = None
        before: _Buffer | None = None
        home: _Buffer | None = None
        behind: tuple[_Buffer | None, ...] = ()
        for step in range(last + 1):
            coming = self._buffer(self._owner(step + 1, way), item_bytes)
            owner = None if step == 0 and way < 0 else self._owner(step, way)
            made = self._buffer(owner, wide_bytes)
            keys = () if owner is None else self._way.keys[owner]
            self._note(
                sums + self._gradients_of(keys, own=step == 0),
                before_it, held, coming, made, more, found, before, home, *behind,
            )  # fmt: skip
            more, held = made, coming
            home = self._buffer(self._at, wide_bytes) if 0 < step == hops else None
            if step == hops:
                found = home or more
            following = self._owner(step + 1, way) if step or way > 0 else None
            before = self._buffer(following, wide_bytes)
            sends = more is not None and (step > 0 or self._passes_on(step, way))
            behind = (more if sends else None, before, home)
            self._note(sums, before_it, held, more, found, before, home)
        return found

    def _gradients_of(self, keys: tuple[RunOfRows, ...], own: bool) -> int:
        """Returns the transient bytes of backward for some keys."""
        parts = self._cutter.against(keys)
        return max((backward_bytes(self._heads, _part(r), own) for r in parts), default=0)


def _part(r: Rectangle) -> Part:
    return r.queries.length, r.keys.length, r.sight


FUNCTIONS[RingBytes.__name__] = each_point(ring_bytes)
