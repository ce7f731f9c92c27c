"""Rows of parameters as ops: all ranks' rows to whole parameters, and gradients to a rank's rows.

A parameter of s rows over p ranks: each has ceil(s / p) of them, those at the end with rows of
zeros behind the last one. So all ranks' rows, one after the other, are the parameter with some zero
rows at its end: it is gathered where it will lie, and no copy is made of it.

    7 rows, 3 ranks     0 1 2 | 3 4 5 | 6 - -     gathered: 0 1 2 3 4 5 6 - -

All ranks of the group must make these calls in the same order, whatever else they run: each takes a
token of the one before it, so no backend can change their order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from dcpc.codegen.collectives.collectives import group_named, on_wire, wire_log
from dcpc.errors import GroupError

ROWS_GROUP = "rows"  # what graphs call the group of ranks that share out parameters


def rows_count(length: int, ranks: int) -> int:
    """Returns the rows that each rank has of so many, zeros at the end included."""
    return -(-length // ranks)


def rows_shape(shape: Sequence[int], ranks: int) -> list[int]:
    """Returns the shape of a rank's rows of a parameter, zeros at the end included."""
    return [rows_count(shape[0], ranks), *shape[1:]] if shape else []


def _token(like: Tensor) -> Tensor:
    return like.new_zeros(1, dtype=torch.uint8)


@contextmanager
def _named(pg: dist.ProcessGroup, what: str) -> Iterator[None]:
    """Says which collective it was that did not come about.

    Raises:
        GroupError: a rank did not live.
    """
    try:
        yield
    except RuntimeError as e:
        raise GroupError(
            f"{what} on rank {dist.get_rank()}: got {str(e).splitlines()[0]}; expected all of "
            f"{pg.size()} ranks to live; look at the log of the rank that ended first and start "
            "the job again"
        ) from e


@torch.library.custom_op("dcpc::gather_rows", mutates_args=())
def gather_rows(
    rows: Sequence[Tensor], ranks: int, group: str, token: Tensor | None = None
) -> list[Tensor]:
    """Returns whole parameters, zero rows at their end included, and a token.

    Args:
        rows: of this rank, all of each parameter's `rows_shape`; of a scalar the scalar, which all
            ranks have.
        ranks: of the group.
        group: its name.
        token: of the call before this one.
    """
    pg = group_named(group)
    found, work = [], list[dist.Work]()
    for mine in rows:
        if not mine.dim():
            found.append(mine.clone())
            continue
        whole = mine.new_empty((ranks * mine.shape[0], *mine.shape[1:]))
        found.append(whole)
        if mine.numel():
            wire_log.add("gather_rows", (ranks - 1) * mine.nbytes)
            into, own = on_wire(whole.view(-1)), on_wire(mine.detach().view(-1))
            with _named(pg, "gather of parameters"):
                work.append(dist.all_gather_into_tensor(into, own, group=pg, async_op=True))
    with _named(pg, "gather of parameters"):
        for each in work:
            each.wait()
    return [*found, _token(rows[0])]


@gather_rows.register_fake
def _(rows: Sequence[Tensor], ranks: int, group: str, token: Tensor | None = None) -> list[Tensor]:
    whole = [x.new_empty([ranks * n for n in x.shape[:1]] + [*x.shape[1:]]) for x in rows]
    return [*whole, _token(rows[0])]


@torch.library.custom_op("dcpc::sum_rows", mutates_args=())
def sum_rows(
    gradients: Sequence[Tensor], ranks: int, group: str, token: Tensor | None = None
) -> list[Tensor]:
    """Returns this rank's rows of the sum of all ranks' gradients, and a token.

    The sums are in the order of the ranks.

    Args:
        gradients: of whole parameters.
        ranks: of the group.
        group: its name.
        token: of the call before this one.
    """
    pg = group_named(group)
    found = [x.new_empty(rows_shape(x.shape, ranks)) for x in gradients]
    # All at once: each wait for the other ranks costs more than the memory of what comes.
    coming: list[tuple[dist.Work, Tensor, Tensor, Tensor]] = []
    for x, out in zip(gradients, found, strict=True):
        if not x.numel():
            continue
        sent = x.expand(ranks) if not x.dim() else x
        if x.dim() and x.shape[0] != ranks * out.shape[0]:
            sent = x.new_zeros((ranks * out.shape[0], *x.shape[1:]))
            sent[: x.shape[0]].copy_(x)
        sent = sent.contiguous()
        arrived = torch.empty_like(sent)
        wire_log.add("sum_rows", (ranks - 1) * out.nbytes)
        into, own = on_wire(arrived.view(-1)), on_wire(sent.view(-1))
        with _named(pg, "sum of gradients"):
            work = dist.all_to_all_single(into, own, group=pg, async_op=True)
        coming.append((work, sent, arrived, out))
    while coming:
        work, sent, arrived, out = coming.pop(0)
        with _named(pg, "sum of gradients"):
            work.wait()
        torch.sum(arrived.view(ranks, *out.shape), 0, out=out)
    return [*found, _token(gradients[0])]


@sum_rows.register_fake
def _(
    gradients: Sequence[Tensor], ranks: int, group: str, token: Tensor | None = None
) -> list[Tensor]:
    return [*(x.new_empty(rows_shape(x.shape, ranks)) for x in gradients), _token(gradients[0])]
