"""`dcpc::swap`: rows against heads among the ranks that stand at one position of a ring.

An all-to-all of `across` consecutive ranks, over the whole group with nothing for the others.
Before a ring it gives each of them some heads of all their rows; after it, all heads of its own
rows again. Each is the other's transpose.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dcpc.codegen.collectives.collectives import group_named, on_wire, wire_log
from dcpc.codegen.collectives.ring_route import RowSplit
from dcpc.ops.attention import RunOfRows


@torch.library.custom_op("dcpc::swap", mutates_args=())
def swap(
    x: Tensor,
    to_heads: bool,
    rows_size: int,
    rows_parent: int,
    rows_shift: int,
    zigzag: bool,
    rows_length: int,
    heads: int,
    across: int,
    group: str,
    rows_each: int = 1,
    rows_dim: int = 2,
    heads_dim: int = 1,
) -> Tensor:
    """Returns some heads of the rows of `across` ranks, or all heads of this rank's rows.

    Args:
        x: all heads of this rank's rows; if not `to_heads` its heads of all their rows, these in
            order of position.
        to_heads: whether the result has some of the heads.
        rows_size: length of the whole dim of rows.
        rows_parent: length that is split evenly, see `pieces.py`.
        rows_shift: position of the first row in it.
        zigzag: whether a rank has a chunk of the rows from either end.
        rows_length: how many rows the result has.
        heads: how many heads there are in all, a multiple of `across`.
        across: how many consecutive ranks change among themselves.
        group: name of the process group.
        rows_each: rows of each of the rows_size, as of the outer of a dim's several factors.
        rows_dim: dim of the rows.
        heads_dim: dim of the heads.
    """
    pg = group_named(group)
    p, rank = pg.size(), pg.rank()
    split = RowSplit(rows_size, rows_parent, rows_shift, zigzag, rows_each)
    first = rank - rank % across
    pieces = [split.runs(p, 1, r) for r in range(first, first + across)]
    dims = rows_dim, heads_dim
    if to_heads:
        sends = x.split(heads // across, heads_dim)
        lengths = [sum(run.length for run in mine) for mine in pieces]
    else:
        sends = rows_of(x, pieces, rows_dim)
        lengths = [rows_length] * across
    parts = _exchanged(sends, lengths, heads // across, dims, first, pg)
    if not to_heads:
        return torch.cat(parts, heads_dim)
    return in_order(parts, pieces, rows_dim)


@swap.register_fake
def _(
    x: Tensor,
    to_heads: bool,
    rows_size: int,
    rows_parent: int,
    rows_shift: int,
    zigzag: bool,
    rows_length: int,
    heads: int,
    across: int,
    group: str,
    rows_each: int = 1,
    rows_dim: int = 2,
    heads_dim: int = 1,
) -> Tensor:
    shape = list(x.shape)
    shape[rows_dim] = rows_length
    shape[heads_dim] = heads // across if to_heads else heads
    return x.new_empty(shape)


def _placed(pieces: list[tuple[RunOfRows, ...]]) -> list[tuple[RunOfRows, int]]:
    """Returns all runs in order of position, each with whose it is."""
    every = [(run, i) for i, mine in enumerate(pieces) for run in mine]
    return sorted(every, key=lambda item: item[0].position)


def rows_of(x: Tensor, pieces: list[tuple[RunOfRows, ...]], dim: int) -> list[Tensor]:
    """Returns each rank's rows of all their rows."""
    taken: list[list[Tensor]] = [[] for _ in pieces]
    start = 0
    for run, i in _placed(pieces):
        taken[i].append(x.narrow(dim, start, run.length))
        start += run.length
    nothing = x.narrow(dim, 0, 0)
    return [torch.cat(mine or [nothing], dim) if len(mine) != 1 else mine[0] for mine in taken]


def in_order(parts: list[Tensor], pieces: list[tuple[RunOfRows, ...]], dim: int) -> Tensor:
    """Returns the rows of several ranks, in order of position."""
    found = [parts[i].narrow(dim, run.at, run.length) for run, i in _placed(pieces)]
    return torch.cat(found or parts, dim)


def _exchanged(
    sends: Any,
    lengths: list[int],
    heads: int,
    dims: tuple[int, int],
    first: int,
    pg: dist.ProcessGroup,
) -> list[Tensor]:
    """Sends one part to each of some consecutive ranks; returns what each of them sent here."""
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
    x, ctx.to_heads, *ctx.rows = inputs[:6]
    ctx.rest = inputs[7:]
    ctx.length = x.shape[ctx.rest[4]]


def _backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
    back = torch.ops.dcpc.swap(g, not ctx.to_heads, *ctx.rows, ctx.length, *ctx.rest)
    return (back, *(None,) * 12)


swap.register_autograd(_backward, setup_context=_context)
