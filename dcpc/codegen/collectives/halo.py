"""`dcpc::halo`: fetches neighbours' rows for ops that read a window around each position of a dim.

Position i of the result reads `reach` rows of x, from row `i * stride - before` on. A rank that
computes a piece of the result asks for the rows that its windows cover: rows before and after the
whole dim are zeros, its own rows stay, other rows come from their owners, neighbours or not. So
pieces of x and of the result need not match, and a rank may have fewer rows than a window, or none.

The transpose is `dcpc::halo_sum`: gradients of rows go back to their owner, which adds them up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dcpc.codegen.collectives.collectives import exchange, group_named, transposed, wire_log
from dcpc.ops.arguments import arguments
from dcpc.ops.pieces import Run, piece


class HaloCall(NamedTuple):
    """The arguments of the op after its tensor, in this order.

    Attributes:
        dim: dim of x that is split.
        size: whole length of that dim of x.
        parent: length that is split evenly, see `pieces.py`.
        shift: position of x's first row in the parent.
        out_size: whole length of the result's dim.
        out_parent: `parent` of the result's dim.
        out_shift: `shift` of the result's dim.
        stride: number of rows from one window to the next.
        reach: number of rows from a window's first to its last.
        before: number of rows by which the first window starts before the first row.
        rows: length of the dim in this rank's result.
        group: name of the process group.
    """

    dim: int
    size: int
    parent: int
    shift: int
    out_size: int
    out_parent: int
    out_shift: int
    stride: int
    reach: int
    before: int
    rows: int
    group: str

    def owned(self, p: int) -> list[Run]:
        """Returns (start, length) of the rows of x that each of p ranks owns."""
        return [piece(self.size, self.parent, self.shift, p, r) for r in range(p)]

    def wanted(self, p: int) -> list[Run]:
        """Returns (start, length) of the rows that each rank's windows cover, padding included."""
        found = []
        for rank in range(p):
            start, count = piece(self.out_size, self.out_parent, self.out_shift, p, rank)
            length = (count - 1) * self.stride + self.reach if count else 0
            found.append((start * self.stride - self.before, length))
        return found


def _common(a: Run, b: Run) -> Run:
    """Returns (start, length) of the overlap of two runs."""
    start = max(a[0], b[0])
    return start, max(0, min(sum(a), sum(b)) - start)


def _parts(x: Tensor, dim: int, first: int, runs: Sequence[Run]) -> list[Tensor]:
    """Returns runs of x, whose first row is at position `first`."""
    return [x.narrow(dim, start - first if length else 0, length) for start, length in runs]


def placed(parts: Sequence[Tensor], runs: Sequence[Run], call: HaloCall, first: int) -> Tensor:
    """Returns `call.rows` rows from position `first` on: the sum of all parts, zeros elsewhere."""
    shape = list(parts[0].shape)
    shape[call.dim] = call.rows
    out = parts[0].new_zeros(shape)
    for part, (start, length) in zip(parts, runs, strict=True):
        if length:
            out.narrow(call.dim, start - first, length).add_(part)
    return out


def traffic(call: HaloCall, p: int, rank: int, back: bool) -> tuple[list[Run], list[Run]]:
    """Returns the runs of rows that a rank sends to each rank, and those it receives from each.

    Args:
        call: arguments of the op.
        p: number of ranks in the group.
        rank: index of the rank.
        back: whether gradients go back to the owners of the rows.
    """
    owned, wanted = call.owned(p), call.wanted(p)
    gives = [_common(owned[rank], other) for other in wanted]
    takes = [_common(wanted[rank], other) for other in owned]
    return (takes, gives) if back else (gives, takes)


def origins(call: HaloCall, p: int, rank: int, back: bool) -> tuple[int, int]:
    """Returns the positions of the first row of a rank's operand and of its result."""
    have, want = call.owned(p)[rank][0], call.wanted(p)[rank][0]
    return (want, have) if back else (have, want)


def given_parts(x: Tensor, call: HaloCall, p: int, rank: int, back: bool) -> list[Tensor]:
    """Returns the rows that a rank sends to each rank, itself included."""
    gives, _ = traffic(call, p, rank, back)
    return _parts(x, call.dim, origins(call, p, rank, back)[0], gives)


def _run(x: Tensor, call: HaloCall, name: str, back: bool) -> Tensor:
    pg = group_named(call.group)
    p, rank = pg.size(), pg.rank()
    gives = given_parts(x, call, p, rank, back)
    takes = traffic(call, p, rank, back)[1]
    own, gives[rank] = gives[rank], x.narrow(call.dim, 0, 0)
    shapes = [list(x.shape) for _ in range(p)]
    for r, (_, length) in enumerate(takes):
        shapes[r][call.dim] = 0 if r == rank else length
    wire_log.add(name, sum(part.numel() for part in gives) * x.element_size())
    received = exchange(gives, [math.prod(shape) for shape in shapes], x, pg)
    parts = [part.view(shape) for part, shape in zip(received, shapes, strict=True)]
    parts[rank] = own
    return placed(parts, takes, call, origins(call, p, rank, back)[1])


_SCHEMA = f"(Tensor x, {arguments(HaloCall)}) -> Tensor"


@torch.library.custom_op("dcpc::halo", mutates_args=(), schema=_SCHEMA)
def halo(x: Tensor, *packed: Any) -> Tensor:
    """Returns the rows that this rank's windows cover, from its piece of x and other ranks'."""
    return _run(x, HaloCall(*packed), "halo", back=False)


@torch.library.custom_op("dcpc::halo_sum", mutates_args=(), schema=_SCHEMA)
def halo_sum(x: Tensor, *packed: Any) -> Tensor:
    """Returns this rank's piece of the rows, summed over the windows of all ranks."""
    return _run(x, HaloCall(*packed), "halo_sum", back=True)


def _empty(x: Tensor, *packed: Any) -> Tensor:
    call, shape = HaloCall(*packed), list(x.shape)
    shape[call.dim] = call.rows
    return x.new_empty(shape)


def _context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, call = inputs[0], HaloCall(*inputs[1:])
    ctx.back = call._replace(rows=x.shape[call.dim])


for _op, _transpose in ((halo, "halo_sum"), (halo_sum, "halo")):
    _op.register_fake(_empty)
    _op.register_autograd(transposed(_transpose), setup_context=_context)
