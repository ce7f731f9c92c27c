"""`dcpc::attention`: scaled dot-product attention as one op with explicit saved tensors.

    dcpc::attention(q, k, v, mask, keep, segment, scale, before, after, start, turn, second, empty)
        dcpc::attention_forward  -> out, logsumexp
        dcpc::attention_backward(grad, q, k, v, mask, keep, segment, out, logsumexp, ...)
            -> dq, dk, dv

q `[b, h, s, d]`, k `[b, g, t, d]`, v `[b, g, t, e]`: h is a multiple of g, and query head i uses
key head i // (h / g). `mask` is broadcast to `[b, h, s, t]`: truth values (true: seen) or numbers
that are added to the scores, and may have a gradient. `keep` `[b or 1, t]` says which keys anybody
sees. `segment` `[b or 1, t]`, integers, says which of several packed sequences each position is
of: a query sees keys of its own alone. For the rest see `spec.Sight`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dcpc.ops.attention import blocks, whole
from dcpc.ops.attention.kernels import check_sizes
from dcpc.ops.attention.spec import EMPTY, Attended, Sight, empty_gradient, empty_outputs

__all__ = ["EMPTY"]


@torch.library.custom_op("dcpc::attention_forward", mutates_args=())
def attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    keep: Tensor | None,
    segment: Tensor | None,
    scale: float,
    before: int | None,
    after: int | None,
    start: int,
    turn: int | None,
    second: int,
    empty: str,
) -> tuple[Tensor, Tensor]:
    """Returns out `[b, h, s, e]` and logsumexp `[b, h, s]` in float32 or better."""
    check_sizes(query, key, value)
    sight = Sight(scale, before, after, start, empty, turn, second)
    if not (query.numel() and key.numel() and value.numel()):
        out, lse = empty_outputs(query, value)
        return out.zero_(), lse.zero_()
    return whole.forward(query, key, value, mask, keep, segment, sight)


@attention_forward.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return empty_outputs(query, value)


@torch.library.custom_op("dcpc::attention_backward", mutates_args=())
def attention_backward(
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
    start: int,
    turn: int | None,
    second: int,
    empty: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of q, k and v."""
    sight = Sight(scale, before, after, start, empty, turn, second)
    if not (query.numel() and key.numel() and value.numel()):
        dq, dk, dv = (empty_gradient(x).zero_() for x in (query, key, value))
        return dq, dk, dv
    given = Attended(grad_out, query, key, value, out, logsumexp)
    return whole.backward(given, mask, keep, segment, sight)


@attention_backward.register_fake
def _(grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Any:
    return empty_gradient(query), empty_gradient(key), empty_gradient(value)


@torch.library.custom_op("dcpc::attention_mask_backward", mutates_args=())
def attention_mask_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    keep: Tensor | None,
    segment: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
    scale: float,
    before: int | None,
    after: int | None,
    start: int,
    turn: int | None,
    second: int,
    empty: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the gradients of q, k, v and the mask."""
    sight = Sight(scale, before, after, start, empty, turn, second)
    if not (query.numel() and key.numel() and value.numel()):
        dq, dk, dv = (empty_gradient(x).zero_() for x in (query, key, value))
        return dq, dk, dv, mask.new_zeros(mask.shape)
    given = Attended(grad_out, query, key, value, out, logsumexp)
    ids = whole.ids_of(segment, query, sight)
    dq, dk, dv, dmask = blocks.backward(given, mask, keep, sight, ids, mask_gradient=True)
    assert dmask is not None
    return dq, dk, dv, dmask


@attention_mask_backward.register_fake
def _(grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, *rest: Any) -> Any:
    gradients = (empty_gradient(query), empty_gradient(key), empty_gradient(value))
    return (*gradients, mask.new_empty(mask.shape))


def _context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    tensors, ctx.rest = inputs[:6], inputs[6:]
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
    wanted = ctx.needs_input_grad[3]
    ops = torch.ops.dcpc
    op = ops.attention_mask_backward if wanted else ops.attention_backward
    found = op(grad, *ctx.saved_tensors, *ctx.rest)
    dmask = found[3] if wanted else None
    return (*found[:3], dmask, *(None,) * 9)


attention_forward.register_autograd(_backward, setup_context=_context)

_library = torch.library.Library("dcpc", "FRAGMENT")
_library.define(
    "attention(Tensor query, Tensor key, Tensor value, Tensor? mask=None, Tensor? keep=None, "
    "Tensor? segment=None, *, float scale, SymInt? before=None, SymInt? after=None, "
    "SymInt start=0, SymInt? turn=None, SymInt second=0, str empty='zero') -> Tensor"
)


def _attention(
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
    start: int = 0,
    turn: int | None = None,
    second: int = 0,
    empty: str = "zero",
) -> Tensor:
    rest = (scale, before, after, start, turn, second, empty)
    found = torch.ops.dcpc.attention_forward(query, key, value, mask, keep, segment, *rest)
    return found[0]  # type: ignore[no-any-return]


_library.impl("attention", _attention, "CompositeImplicitAutograd")
