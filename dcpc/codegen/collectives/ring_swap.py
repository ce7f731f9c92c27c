"""`dcpc::swap`: exchanges rows for heads among the ranks at one position of a ring.

It is an all-to-all of `across` consecutive ranks, over the whole group with empty messages to the
others. Before a ring it gives each of them some heads of all their rows; after the ring, all heads
of its own rows again. Each direction is the transpose of the other.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dcpc.codegen.collectives.collectives import (
    group_named,
    joined,
    on_wire,
    transposed,
    wire_log,
)
from dcpc.ops.arguments import arguments
from dcpc.ops.attention import RunOfRows
from dcpc.ops.ring_route import RowSplit


class SwapCall(NamedTuple):
    """The arguments of the op after its tensor, in this order.

    Attributes:
        to_heads: whether the result has all rows and some heads.
        rows_size: whole length of the dim of rows.
        rows_parent: length that is split evenly, see `pieces.py`.
        rows_shift: position of the first row in the parent.
        zigzag: whether a rank has two chunks of the rows, one from either end.
        rows_length: number of rows in the result.
        heads: number of all heads, a multiple of `across`.
        across: number of consecutive ranks that exchange with each other.
        group: name of the process group.
        rows_each: number of rows in each of the rows_size elements, where the dim has several
            factors.
        rows_dim: index of the dim of rows.
        heads_dim: index of the dim of heads.
    """

    to_heads: bool
    rows_size: int
    rows_parent: int
    rows_shift: int
    zigzag: bool
    rows_length: int
    heads: int
    across: int
    group: str
    rows_each: int = 1
    rows_dim: int = 2
    heads_dim: int = 1

    @classmethod
    def of(
        cls, to_heads: bool, rows: RowSplit, length: int, heads: int, across: int, group: str
    ) -> SwapCall:
        """Returns the call for rows split as given, with `length` rows in the result."""
        where = rows.size, rows.parent, rows.shift, rows.zigzag
        return cls(to_heads, *where, length, heads, across, group, rows.rows)

    @property
    def split(self) -> RowSplit:
        """The split of the rows."""
        where = self.rows_size, self.rows_parent, self.rows_shift
        return RowSplit(*where, self.zigzag, self.rows_each)


@torch.library.custom_op(
    "dcpc::swap",
    mutates_args=(),
    schema=f"(Tensor x, {arguments(SwapCall, defaults=True)}) -> Tensor",
)
def swap(x: Tensor, *packed: Any) -> Tensor:
    """Returns some heads of the rows of `across` ranks, or all heads of this rank's rows.

    Args:
        x: all heads of this rank's rows; if not `to_heads`, this rank's heads of the rows of all
            `across` ranks, in order of position.
        packed: fields of a `SwapCall`.
    """
    call = SwapCall(*packed)
    pg = group_named(call.group)
    p, rank = pg.size(), pg.rank()
    first = rank - rank % call.across
    pieces = [call.split.runs(p, 1, r) for r in range(first, first + call.across)]
    dims, heads = (call.rows_dim, call.heads_dim), call.heads // call.across
    if call.to_heads:
        sends = x.split(heads, call.heads_dim)
        lengths = [sum(run.length for run in mine) for mine in pieces]
    else:
        sends = rows_of(x, pieces, call.rows_dim)
        lengths = [call.rows_length] * call.across
    parts = _exchanged(sends, lengths, heads, dims, first, pg)
    if not call.to_heads:
        return joined(parts, call.heads_dim)
    return in_order(parts, pieces, call.rows_dim)


@swap.register_fake
def _(x: Tensor, *packed: Any) -> Tensor:
    call, shape = SwapCall(*packed), list(x.shape)
    shape[call.rows_dim] = call.rows_length
    shape[call.heads_dim] = call.heads // call.across if call.to_heads else call.heads
    return x.new_empty(shape)


def _placed(pieces: list[tuple[RunOfRows, ...]]) -> list[tuple[RunOfRows, int]]:
    """Returns all runs in order of position, each with the index of its rank."""
    every = [(run, i) for i, mine in enumerate(pieces) for run in mine]
    return sorted(every, key=lambda item: item[0].position)


def rows_of(x: Tensor, pieces: list[tuple[RunOfRows, ...]], dim: int) -> list[Tensor]:
    """Splits the rows of several ranks, in order of position, into each rank's rows."""
    taken: list[list[Tensor]] = [[] for _ in pieces]
    start = 0
    for run, i in _placed(pieces):
        taken[i].append(x.narrow(dim, start, run.length))
        start += run.length
    nothing = x.narrow(dim, 0, 0)
    return [torch.cat(mine or [nothing], dim) if len(mine) != 1 else mine[0] for mine in taken]


def in_order(parts: list[Tensor], pieces: list[tuple[RunOfRows, ...]], dim: int) -> Tensor:
    """Joins the rows of several ranks in order of position."""
    found = [parts[i].narrow(dim, run.at, run.length) for run, i in _placed(pieces)]
    return joined(found or parts, dim)


def _exchanged(
    sends: Any,
    lengths: list[int],
    heads: int,
    dims: tuple[int, int],
    first: int,
    pg: dist.ProcessGroup,
) -> list[Tensor]:
    """Sends one part to each of some consecutive ranks, and returns the parts they sent here."""
    p, rank = pg.size(), pg.rank()
    shapes = []
    for length in lengths:
        shape = list(sends[0].shape)
        shape[dims[0]], shape[dims[1]] = length, heads
        shapes.append(shape)
    given, taken = [0] * p, [0] * p
    for i, (x, shape) in enumerate(zip(sends, shapes, strict=True)):
        given[first + i], taken[first + i] = x.numel(), torch.Size(shape).numel()
    packed = torch.cat([x.reshape(-1) for x in sends])
    received = packed.new_empty(sum(taken))
    dist.all_to_all_single(on_wire(received), on_wire(packed), taken, given, group=pg)
    wire_log.add("swap", (sum(given) - given[rank]) * packed.element_size())
    mine = taken[first : first + len(shapes)]
    return [x.view(shape) for x, shape in zip(received.split(mine), shapes, strict=True)]


def _context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, call = inputs[0], SwapCall(*inputs[1:])
    ctx.back = call._replace(to_heads=not call.to_heads, rows_length=x.shape[call.rows_dim])


swap.register_autograd(transposed("swap"), setup_context=_context)
