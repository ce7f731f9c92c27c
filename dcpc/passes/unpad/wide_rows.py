"""Finds regions of a program that can run a few rows at a time, as their widest value is wide.

    hidden [batch, seq, width] ─► linear ─► cast ─► cross-entropy ─► losses [batch * seq]
                                  └─ [batch, seq, classes]: far wider than what enters and leaves

A row is a (sample, position). Every call of a region is row by row, so any rows alone give the same
numbers; wide values are read within the region alone. The sharding rules say what is row by row, so
no op is named.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import sympy
import torch
from torch import fx

from dcpc.ir import Factor, Program, TileRegion, tensor_operands
from dcpc.passes.sharding.sharding import Sharding
from dcpc.passes.unpad.row_dims import RESIZED, RowDims, RowKind

MOST_ROW_DIMS = 2
LEAST_PART = 3.0


def tile_regions(program: Program, sharding: Sharding, wider: float) -> tuple[TileRegion, ...]:
    """Returns the regions that tiles make smaller, none of which shares a call with another.

    Args:
        program: the traced model.
        sharding: factors and alternatives of the program.
        wider: least bytes of a row's widest value, as a multiple of those that enter and leave.
    """
    found: list[TileRegion] = []
    taken: set[str] = set()
    nodes = [n for n in program.gm.graph.nodes if n.name in program.info and n.op != "placeholder"]
    widths = {n.name: _width(program, sharding, n.name) for n in nodes}
    for node in sorted(nodes, key=lambda n: -widths[n.name]):
        rows = _rows(sharding, node.name)
        if node.name in taken or not rows or not program.info[node.name].requires_grad:
            continue
        region = _Region(program, sharding, rows, node, widths, wider).found()
        if region is not None and not taken & {*region.calls}:
            found.append(region)
            taken |= {*region.calls}
    return tuple(found)


def _rows(sharding: Sharding, name: str) -> tuple[Factor, ...]:
    """Returns a value's dims of varying length if they may be those of rows, else none."""
    factors = [f for dim in sharding.factors[name] for f in dim]
    varying = tuple(f for f in factors if f.size.free_symbols)
    distinct = len({f.key for f in varying}) == len(varying)
    return varying if distinct and 1 <= len(varying) <= MOST_ROW_DIMS else ()


def _width(program: Program, sharding: Sharding, name: str) -> int:
    """Returns the bytes of one row of a value: those of its dims of fixed size."""
    sizes = (f.size for dim in sharding.factors[name] for f in dim)
    fixed = [int(size) for size in sizes if size.is_Integer]
    return int(sympy.Mul(*fixed)) * program.info[name].dtype.itemsize


class _Region:
    """The region around one wide value."""

    def __init__(
        self,
        program: Program,
        sharding: Sharding,
        rows: tuple[Factor, ...],
        widest: fx.Node,
        widths: dict[str, int],
        wider: float,
    ) -> None:
        self.program, self.sharding, self.widest = program, sharding, widest
        self.dims = RowDims(program, sharding, rows[0], rows[-1])
        self.rows, self.widths, self.wider = rows, widths, wider
        # Values of at least so many bytes a row stay within the region: casts, flags of elements.
        self.least = widths[widest.name] / max(wider, LEAST_PART)

    def found(self) -> TileRegion | None:
        """Returns the region; None: a wide value has another reader, or there is no gain."""
        calls = self._grown()
        if not calls:
            return None
        ordered = [n for n in self.program.gm.graph.nodes if n in calls]
        operands = [*dict.fromkeys(self._entering(ordered, calls))]
        exits = [n for n in ordered if {*self._readers(n)} - calls]
        if not operands or not exits or any(self._is_wide(n) for n in exits):
            return None
        kinds = {n.name: self.dims.kind(n.name) for n in operands}
        rowed = [n for n in operands if kinds[n.name] is RowKind.ROWS]
        if not rowed or not {*kinds.values()} <= {RowKind.ROWS, RowKind.NONE}:
            return None
        at_ends = sum(self._bytes(n) for n in (*rowed, *exits))
        if self.widths[self.widest.name] < self.wider * at_ends or not self._is_fixed(
            ordered, operands
        ):
            return None
        return TileRegion(
            calls=tuple(n.name for n in ordered),
            operands=tuple(n.name for n in operands),
            exits=tuple(n.name for n in exits),
            rows=tuple(f.key for f in self.rows),
            factors=self.sharding.factors,
            learns=tuple(i for i, n in enumerate(operands) if self._learns(n)),
        )

    def _grown(self) -> set[fx.Node]:
        """Returns the wide values connected to the widest one and all their readers, or nothing."""
        found: set[fx.Node] = set()
        todo = [self.widest]
        while todo:
            node = todo.pop()
            if node in found:
                continue
            if node.op != "call_function" or not self._runs_by_rows(node):
                return set()
            found.add(node)
            todo += [n for n in tensor_operands(node, self.program.info) if self._is_wide(n)]
            todo += self._readers(node) if self._is_wide(node) else ()
        return found

    def _readers(self, node: fx.Node) -> list[fx.Node]:
        return [n for n in node.users if n.name not in self.program.scalars]

    def _runs_by_rows(self, node: fx.Node) -> bool:
        op = node.target
        if not isinstance(op, torch._ops.OpOverload) or op.namespace != "aten":
            return False  # a getitem, an op that draws, a region
        return self.dims.is_row_wise(node)

    def _is_wide(self, node: fx.Node) -> bool:
        """Whether a value has rows that are about as wide as the widest value's."""
        if node.name not in self.program.info or self.dims.kind(node.name) is RowKind.NONE:
            return False
        return self._bytes(node) >= self.least

    def _bytes(self, node: fx.Node) -> int:
        if node.name not in self.widths:
            self.widths[node.name] = _width(self.program, self.sharding, node.name)
        return self.widths[node.name]

    def _entering(self, calls: list[fx.Node], inside: Collection[fx.Node]) -> Iterator[fx.Node]:
        for node in calls:
            for given in tensor_operands(node, self.program.info):
                if given not in inside:
                    yield given

    def _learns(self, node: fx.Node) -> bool:
        info = self.program.info[node.name]
        return info.requires_grad and info.dtype.is_floating_point

    def _is_fixed(self, calls: list[fx.Node], operands: list[fx.Node]) -> bool:
        """Whether no size in the region varies but the number of rows."""
        keys = {f.key for f in self.rows}
        each = (
            f for n in (*calls, *operands) for dim in self.sharding.factors[n.name] for f in dim
        )
        if any(f.key not in keys and not f.size.is_Integer for f in each):
            return False
        found: list[fx.Node] = []
        for node in calls:
            if node.target not in RESIZED:
                fx.node.map_arg((node.args, node.kwargs), found.append)
        sizes = [self.program.scalars[n.name] for n in found if n.name in self.program.scalars]
        return all(size.is_Integer for size in sizes)
