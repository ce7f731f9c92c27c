"""`dcpc::ring_attention`: queries, keys, values and output all split along the sequence.

    dcpc::ring_attention(q, k, v, mask, keep, segment, ...) -> out
        dcpc::ring_attention_forward  -> out, logsumexp
        dcpc::ring_attention_backward(grad, q, k, v, mask, keep, segment, out, logsumexp, ...)
            -> dq, dk, dv

Keys and values go round the ring in one buffer, the next step's while this one computes, so two are
alive; attention to each is merged by the logsumexp. Backward sends them round again, and their
gradients a step behind; these go home from the last rank that has added to them.

Source of the idea: Li et al., "Sequence Parallelism: Long Sequence Training from System
Perspective" (ring self-attention), with online softmax.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dcpc.codegen.collectives.collectives import group_named
from dcpc.codegen.collectives.ring_passing import RingPlace, pass_backward, pass_forward
from dcpc.codegen.collectives.ring_route import Route, RowSplit, route
from dcpc.errors import CodegenError
from dcpc.ops.attention import (
    Backward,
    Forward,
    Operands,
    Sight,
    empty_gradient,
    empty_outputs,
)

# ------------------------------------------------------------------------------------- the op


@torch.library.custom_op("dcpc::ring_attention_forward", mutates_args=())
def ring_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    keep: Tensor | None,
    segment: Tensor | None,
    scale: float,
    before: int | None,
    after: int | None,
    empty: str,
    query_size: int,
    query_parent: int,
    query_shift: int,
    key_size: int,
    key_parent: int,
    key_shift: int,
    query_zigzag: bool,
    key_zigzag: bool,
    query_rows: int,
    key_rows: int,
    across: int,
    group: str,
) -> tuple[Tensor, Tensor]:
    """Returns this rank's out `[b, h, s, e]` and its logsumexp in float32 or better.

    That is `[b, h, s]`; `[2, b, h, s]`, the largest score and the logarithm of the sum of
    exp(score - it), if the mask is numbers.

    Args:
        query: this rank's `[b, h, s, d]`.
        key: its `[b, g, t, d]`.
        value: its `[b, g, t, e]`.
        mask: of its queries and all keys, broadcast to `[b, h, s, key_size]`.
        keep: `[b or 1, key_size]`, which keys anybody sees.
        segment: `[b or 1, key_size]`, what sequence each position belongs to.
        scale: of the products of queries and keys.
        before: how many keys before its own position a query sees, None: all.
        after: how many after it, None: all.
        empty: what a query gets that sees no key, see `dcpc.attention`.
        query_size: how many queries there are in all.
        query_parent: length that is split evenly, see `pieces.py`.
        query_shift: position of the first query in it.
        key_size: how many keys there are in all.
        key_parent: as of the queries.
        key_shift: as of the queries.
        query_zigzag: whether a rank has a chunk of the queries from either end.
        key_zigzag: whether it has so of the keys.
        query_rows: rows of each of the query_size, as of the outer of a dim's several factors.
        key_rows: as of the queries.
        across: consecutive ranks that have one piece of rows between them, each other heads.
        group: name of the process group.
    """
    splits = _splits(
        (query_size, query_parent, query_shift, query_zigzag, query_rows),
        (key_size, key_parent, key_shift, key_zigzag, key_rows),
    )
    sight = Sight(scale, before, after, 0, empty)
    if nothing(query, key, value) or not key_size:
        out, lse = empty_results(query, value, mask)
        return out.zero_(), lse.zero_()
    tensors, hiding = (query, key, value), (mask, keep, segment)
    ring, given = _setup(tensors, hiding, sight, splits, across, group)
    state = Forward(given, query, value)
    pass_forward(ring, state)
    ring.log()
    return state.finish()


@ring_attention_forward.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor]:
    return empty_results(query, value, mask)


def empty_results(q: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns memory for out and its logsumexp, of queries `[b, h, s, d]` and values like these."""
    out, lse = empty_outputs(q, v)
    if mask is not None and mask.dtype != torch.bool:
        lse = lse.new_empty((2, *lse.shape))
    return out, lse


def _splits(*given: tuple[int, int, int, bool, int]) -> tuple[RowSplit, RowSplit]:
    queries, keys = (RowSplit(*split) for split in given)
    return queries, keys


def nothing(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether there is nothing to compute on any rank."""
    return 0 in (*q.shape[:2], *k.shape[:2], q.shape[3], v.shape[3])


def placed(
    tensors: tuple[Tensor, Tensor, Tensor],
    hiding: tuple[Tensor | None, Tensor | None, Tensor | None],
    sight: Sight,
    splits: tuple[RowSplit, RowSplit],
    across: int,
    p: int,
    rank: int,
) -> tuple[Route, Operands]:
    """Returns where keys go, and what one rank's attention to all of them is given.

    Args:
        tensors: the rank's queries, keys and values.
        hiding: mask, keep and segment.
        sight: limits by position.
        splits: of queries and of keys.
        across: ranks at a position.
        p: ranks of the group.
        rank: which of them.
    """
    (mask, keep, segment), (queries, keys), (q, k, _) = hiding, splits, tensors
    misses = sight.misses(queries.size * queries.rows, keys.size * keys.rows)
    hides = mask is not None or keep is not None or misses
    everywhere = sight.empty in ("mean", "fixed") and hides
    way = route(queries, keys, p, across, sight.before, sight.after, everywhere)
    position = rank // across
    mine = way.queries[position]
    expected = sum(run.length for run in mine), way.rows(position)
    got = q.shape[2], k.shape[2]
    assert got == expected, f"rows of queries and keys here: got {got}, expected {expected}"
    size = keys.size * keys.rows
    return way, Operands(mask, keep, segment, sight, mine, size, everywhere)


def _setup(
    tensors: tuple[Tensor, Tensor, Tensor],
    hiding: tuple[Tensor | None, Tensor | None, Tensor | None],
    sight: Sight,
    splits: tuple[RowSplit, RowSplit],
    across: int,
    group: str,
) -> tuple[RingPlace, Operands]:
    pg = group_named(group)
    way, given = placed(tensors, hiding, sight, splits, across, pg.size(), pg.rank())
    return RingPlace(way, group, *tensors[1:]), given


@torch.library.custom_op("dcpc::ring_attention_backward", mutates_args=())
def ring_attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    keep: Tensor | None,
    segment: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
    scale: float,
    before: int | None,
    after: int | None,
    empty: str,
    query_size: int,
    query_parent: int,
    query_shift: int,
    key_size: int,
    key_parent: int,
    key_shift: int,
    query_zigzag: bool,
    key_zigzag: bool,
    query_rows: int,
    key_rows: int,
    across: int,
    group: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of this rank's queries, keys and values, laid out (b, s, h, d)."""
    splits = _splits(
        (query_size, query_parent, query_shift, query_zigzag, query_rows),
        (key_size, key_parent, key_shift, key_zigzag, key_rows),
    )
    sight = Sight(scale, before, after, 0, empty)
    if nothing(query, key, value) or not key_size:
        dq, dk, dv = (empty_gradient(x).zero_() for x in (query, key, value))
        return dq, dk, dv
    tensors, hiding = (query, key, value), (mask, keep, segment)
    ring, given = _setup(tensors, hiding, sight, splits, across, group)
    state = Backward(given, grad_out, query, out, logsumexp)
    mine = pass_backward(ring, state)
    ring.log()
    dk, dv = empty_gradient(key), empty_gradient(value)
    return state.finish(), dk.copy_(mine.k), dv.copy_(mine.v)


@ring_attention_backward.register_fake
def _(grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Any:
    return empty_gradient(query), empty_gradient(key), empty_gradient(value)


def _context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    tensors, ctx.rest = inputs[:6], inputs[6:]
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
    if ctx.needs_input_grad[3]:
        raise CodegenError(
            "ring attention: its mask needs a gradient, which no lowering to a ring gives; split "
            "this attention by heads or by queries"
        )
    found = torch.ops.dcpc.ring_attention_backward(grad, *ctx.saved_tensors, *ctx.rest)
    return (*found, *(None,) * (3 + len(ctx.rest)))


ring_attention_forward.register_autograd(_backward, setup_context=_context)

_library = torch.library.Library("dcpc", "FRAGMENT")
_library.define(
    "ring_attention(Tensor query, Tensor key, Tensor value, Tensor? mask=None, Tensor? keep=None, "
    "Tensor? segment=None, *, float scale, SymInt? before=None, SymInt? after=None, "
    "str empty='zero', SymInt query_size, SymInt query_parent, SymInt query_shift, "
    "SymInt key_size, SymInt key_parent, SymInt key_shift, bool query_zigzag, bool key_zigzag, "
    "SymInt query_rows=1, SymInt key_rows=1, int across, str group) -> Tensor"
)


def _ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    keep: Tensor | None = None,
    segment: Tensor | None = None,
    *,
    scale: float,
    before: int | None = None,
    after: int | None = None,
    empty: str = "zero",
    **split: Any,
) -> Tensor:
    names = (
        *("query_size", "query_parent", "query_shift", "key_size", "key_parent", "key_shift"),
        *("query_zigzag", "key_zigzag", "query_rows", "key_rows", "across", "group"),
    )
    split = {"query_rows": 1, "key_rows": 1, **split}
    rest = (scale, before, after, empty, *(split[name] for name in names))
    op = torch.ops.dcpc.ring_attention_forward
    return op(query, key, value, mask, keep, segment, *rest)[0]  # type: ignore[no-any-return]


_library.impl("ring_attention", _ring_attention, "CompositeImplicitAutograd")
