"""Ops that gather whole parameters from all ranks' rows, and sum gradients into a rank's rows.

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
from dcpc.codegen.collectives.resident import fetched
from dcpc.errors import GroupError
from dcpc.fx.torch_api.torch_collectives import all_gather_single
from dcpc.ops.bundles import messages

ROWS_GROUP = "rows"  # name in graphs of the group of ranks that shard parameters


def rows_count(length: int, ranks: int) -> int:
    """Returns the number of rows that each rank has of `length`, padding rows included."""
    return -(-length // ranks)


def rows_shape(shape: Sequence[int], ranks: int) -> list[int]:
    """Returns the shape of a rank's rows of a parameter, padding rows included."""
    return [rows_count(shape[0], ranks), *shape[1:]] if shape else []


def _whole_shape(rows: Tensor, ranks: int) -> list[int]:
    return [ranks * n for n in rows.shape[:1]] + [*rows.shape[1:]]


def _token(like: Tensor) -> Tensor:
    return like.new_zeros(1, dtype=torch.uint8)


@contextmanager
def _named(pg: dist.ProcessGroup, what: str) -> Iterator[None]:
    """Names the collective in the error if it fails.

    Raises:
        GroupError: the collective failed, as when another rank died.
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
    rows: Sequence[Tensor],
    ranks: int,
    group: str,
    token: Tensor | None = None,
    to: torch.device | None = None,
) -> list[Tensor]:
    """Returns whole parameters, with zero rows at their ends, and a token.

    Args:
        rows: rows of each parameter on this rank, of its `rows_shape`. A scalar is whole on all
            ranks.
        ranks: number of ranks in the group.
        group: name of the group.
        token: token of the previous call.
        to: device of the whole ones, where the rows wait in the host's memory or on a disk.
    """
    if to is not None:
        return fetched.of(rows, lambda: _gathered_to(rows, ranks, group, to))
    return _gathered(rows, ranks, group)


def _gathered_to(rows: Sequence[Tensor], ranks: int, group: str, to: torch.device) -> list[Tensor]:
    """Returns whole parameters and a token, of rows that come to a device first."""
    own = [x.detach().to(to, non_blocking=True, copy=ranks == 1) for x in rows]
    return [*own, _token(own[0])] if ranks == 1 else _gathered(own, ranks, group)


def _gathered(rows: Sequence[Tensor], ranks: int, group: str) -> list[Tensor]:
    pg = group_named(group)
    found = [x.new_empty(_whole_shape(x, ranks)) if x.dim() else x.clone() for x in rows]
    sizes = {i: (x.dtype, ranks * x.nbytes) for i, x in enumerate(rows) if x.dim() and x.numel()}
    coming: list[tuple[list[dist.Work], list[int], Tensor, Tensor]] = []
    for number, together in enumerate(messages(sizes)):
        if len(together) == 1:
            into, own = found[together[0]].view(-1), rows[together[0]].detach().view(-1)
        else:
            own = torch.cat([rows[i].detach().view(-1) for i in together])
            into = own.new_empty(ranks * own.numel())
        wire_log.add("gather_rows", (ranks - 1) * own.nbytes)
        with _named(pg, "gather of parameters"):
            works = _gather_into(on_wire(into), on_wire(own), pg, number)
        coming.append((works, together, own, into))
    for works, together, _, into in coming:
        with _named(pg, "gather of parameters"):
            for work in works:
                work.wait()
        if len(together) > 1:
            for i, part in zip(together, _parts(into, rows, together, ranks), strict=True):
                found[i].view(ranks, -1).copy_(part)
    return [*found, _token(rows[0])]


def _gather_into(into: Tensor, own: Tensor, pg: dist.ProcessGroup, number: int) -> list[dist.Work]:
    """Starts to gather all ranks' parts, and returns the work handles to wait for.

    On the CPU ranks send to each other directly: gloo's all-gather takes memory for the result a
    second time, and copies (docs/results/parameters.md).

    Args:
        into: memory for all ranks' parts, one after the other.
        own: part of this rank.
        pg: process group.
        number: tag of the message among those in flight.
    """
    if own.device.type != "cpu":
        work = all_gather_single(into, own, group=pg, async_op=True)
        return [] if work is None else [work]
    ranks, rank = pg.size(), pg.rank()
    parts = into.view(ranks, -1)
    works = [
        dist.irecv(parts[r], group=pg, tag=number, group_src=r) for r in range(ranks) if r != rank
    ]
    for further in range(1, ranks):
        to = (rank + further) % ranks
        works.append(dist.isend(own, group=pg, tag=number, group_dst=to))
    parts[rank].copy_(own)
    return [work for work in works if work is not None]


@gather_rows.register_fake
def _(
    rows: Sequence[Tensor],
    ranks: int,
    group: str,
    token: Tensor | None = None,
    to: torch.device | None = None,
) -> list[Tensor]:
    device = to or rows[0].device
    return [
        *(x.new_empty(_whole_shape(x, ranks), device=device) for x in rows),
        _token(rows[0]).to(device),
    ]


@torch.library.custom_op("dcpc::sum_rows", mutates_args=())
def sum_rows(
    gradients: Sequence[Tensor],
    ranks: int,
    group: str,
    token: Tensor | None = None,
    to: torch.device | None = None,
) -> list[Tensor]:
    """Returns this rank's rows of the sum of all ranks' gradients, and a token.

    The sums are added in rank order; `to` says where they go then, None: they stay.
    """
    pg = group_named(group)
    found = [x.new_empty(rows_shape(x.shape, ranks)) for x in gradients]
    sizes = {i: (x.dtype, ranks * x.nbytes) for i, x in enumerate(found) if x.numel()}
    # All messages at once: each wait for the other ranks costs more than the memory received into.
    coming: list[tuple[dist.Work, list[int], Tensor, Tensor]] = []
    for together in messages(sizes):
        sent = _sent([gradients[i] for i in together], [found[i] for i in together], ranks)
        arrived = torch.empty_like(sent)
        wire_log.add("sum_rows", (ranks - 1) * sum(found[i].nbytes for i in together))
        into, own = on_wire(arrived.view(-1)), on_wire(sent.view(-1))
        with _named(pg, "sum of gradients"):
            work = dist.all_to_all_single(into, own, group=pg, async_op=True)
        coming.append((work, together, sent, arrived))
    while coming:
        work, together, sent, arrived = coming.pop(0)
        with _named(pg, "sum of gradients"):
            work.wait()
        for i, part in zip(together, _parts(arrived, found, together, ranks), strict=True):
            torch.sum(part, 0, out=found[i].view(-1))
    return [*(x if to is None else x.to(to) for x in found), _token(gradients[0])]


def _sent(gradients: Sequence[Tensor], rows: Sequence[Tensor], ranks: int) -> Tensor:
    """Returns all ranks' rows of all gradients, rank by rank, with zeros as padding."""
    if len(gradients) == 1:
        (x,), (own,) = gradients, rows
        if not x.dim():
            return x.expand(ranks).contiguous()
        if x.shape[0] == ranks * own.shape[0]:
            return x.contiguous()
    sent = gradients[0].new_zeros(ranks * sum(own.numel() for own in rows))
    for x, part in zip(gradients, _parts(sent, rows, range(len(rows)), ranks), strict=True):
        if not x.dim():
            part.copy_(x)
            continue
        full, rest = divmod(x.numel(), part.shape[1])  # ranks that have all their rows
        lies = x.contiguous().view(-1)
        part[:full].copy_(lies[: x.numel() - rest].view(full, -1))
        if rest:
            part[full, :rest].copy_(lies[x.numel() - rest :])
    return sent


def _parts(
    message: Tensor, rows: Sequence[Tensor], together: Sequence[int], ranks: int
) -> Sequence[Tensor]:
    """Returns each tensor's part of a message, `[ranks, elements]`."""
    parts: tuple[Tensor, ...] = message.view(ranks, -1).split(
        [rows[i].numel() for i in together], 1
    )
    return parts


@sum_rows.register_fake
def _(
    gradients: Sequence[Tensor],
    ranks: int,
    group: str,
    token: Tensor | None = None,
    to: torch.device | None = None,
) -> list[Tensor]:
    device = to or gradients[0].device
    found = (x.new_empty(rows_shape(x.shape, ranks), device=device) for x in gradients)
    return [*found, _token(gradients[0])]
