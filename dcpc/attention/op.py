"""`dcpc::attention`: scaled dot-product attention as one op with explicit saved tensors.

    dcpc::attention(q, k, v, mask, keep, scale, before, after, start, empty) -> out
        dcpc::attention_forward  -> out, logsumexp
        dcpc::attention_backward(grad, q, k, v, mask, keep, out, logsumexp, ...) -> dq, dk, dv

q `[b, h, s, d]`, k `[b, g, t, d]`, v `[b, g, t, e]`: h is a multiple of g, and query head i uses
key head i // (h / g). `mask` is broadcast to `[b, h, s, t]`: truth values (true: seen) or numbers
that are added to the scores, and may have a gradient. `keep` `[b or 1, t]` says which keys anybody
sees. For the rest see `spec.Sight`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dcpc.attention import blocks, cuda, flash
from dcpc.attention.spec import EMPTY, Sight, empty_gradient, empty_outputs

__all__ = ["EMPTY", "kernel_name"]


def kernel_name(
    device: str,
    same_widths: bool,
    mask: torch.dtype | None,
    has_keep: bool,
    before: int | None,
    after: int | None,
    empty: str,
) -> str:
    """Returns "flash", "cuda" or "blocks": what computes attention, told without any size.

    "flash" is the CPU's; "cuda" falls back to blocks where `cuda.able` says no.

    Args:
        device: type of the tensors' device.
        same_widths: whether keys and values are equally wide.
        mask: dtype of the mask, None without one.
        has_keep: whether some keys are hidden from all queries.
        before: as in `Sight`.
        after: as in `Sight`.
        empty: as in `Sight`.
    """
    if device == "cuda" and mask is None and not has_keep and same_widths:
        return "cuda"
    if device != "cpu" or not same_widths or before is not None or after not in (None, 0):
        return "blocks"
    if mask is not None and has_keep:
        return "blocks"
    native = empty == "zero" or (mask is None and not has_keep)
    return "flash" if native else "blocks"


def _kernel(
    q: Tensor, v: Tensor, mask: Tensor | None, keep: Tensor | None, sight: Sight
) -> str:
    return kernel_name(
        q.device.type, q.shape[-1] == v.shape[-1], None if mask is None else mask.dtype,
        keep is not None, sight.before, sight.after, sight.empty,
    )  # fmt: skip


@torch.library.custom_op("dcpc::attention_forward", mutates_args=())
def attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    keep: Tensor | None,
    scale: float,
    before: int | None,
    after: int | None,
    start: int,
    empty: str,
) -> tuple[Tensor, Tensor]:
    """Returns out `[b, h, s, e]` and logsumexp `[b, h, s]` in float32 or better."""
    sight = Sight(scale, before, after, start, empty)
    if not (query.numel() and key.numel() and value.numel()):
        out, lse = empty_outputs(query, value)
        return out.zero_(), lse.zero_()
    kernel = _kernel(query, value, mask, keep, sight)
    if kernel == "cuda" and cuda.able(query, key, sight):
        return cuda.forward(query, key, value, sight)
    run = flash.forward if kernel == "flash" else blocks.forward
    return run(query, key, value, mask, keep, sight)


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
    out: Tensor,
    logsumexp: Tensor,
    scale: float,
    before: int | None,
    after: int | None,
    start: int,
    empty: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of q, k and v."""
    sight = Sight(scale, before, after, start, empty)
    if not (query.numel() and key.numel() and value.numel()):
        dq, dk, dv = (empty_gradient(x).zero_() for x in (query, key, value))
        return dq, dk, dv
    given = (grad_out, query, key, value, mask, keep, out, logsumexp, sight)
    kernel = _kernel(query, value, mask, keep, sight)
    if kernel == "cuda" and cuda.able(query, key, sight):
        return cuda.backward(grad_out, query, key, value, out, logsumexp, sight)
    return flash.backward(*given) if kernel == "flash" else blocks.backward(*given)[:3]


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
    out: Tensor,
    logsumexp: Tensor,
    scale: float,
    before: int | None,
    after: int | None,
    start: int,
    empty: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the gradients of q, k, v and the mask."""
    sight = Sight(scale, before, after, start, empty)
    if not (query.numel() and key.numel() and value.numel()):
        dq, dk, dv = (empty_gradient(x).zero_() for x in (query, key, value))
        return dq, dk, dv, mask.new_zeros(mask.shape)
    given = (grad_out, query, key, value, mask, keep, out, logsumexp, sight)
    dq, dk, dv, dmask = blocks.backward(*given, mask_gradient=True)
    assert dmask is not None
    return dq, dk, dv, dmask


@attention_mask_backward.register_fake
def _(grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, *rest: Any) -> Any:
    gradients = (empty_gradient(query), empty_gradient(key), empty_gradient(value))
    return (*gradients, mask.new_empty(mask.shape))


def _context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale, ctx.before, ctx.after, ctx.start, ctx.empty = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
    rest = (ctx.scale, ctx.before, ctx.after, ctx.start, ctx.empty)
    wanted = ctx.needs_input_grad[3]
    ops = torch.ops.dcpc
    op = ops.attention_mask_backward if wanted else ops.attention_backward
    found = op(grad, *ctx.saved_tensors, *rest)
    dmask = found[3] if wanted else None
    return (*found[:3], dmask, *(None,) * 6)


attention_forward.register_autograd(_backward, setup_context=_context)

_library = torch.library.Library("dcpc", "FRAGMENT")
_library.define(
    "attention(Tensor query, Tensor key, Tensor value, Tensor? mask=None, Tensor? keep=None, *, "
    "float scale, SymInt? before=None, SymInt? after=None, SymInt start=0, str empty='zero')"
    " -> Tensor"
)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    keep: Tensor | None = None,
    *,
    scale: float,
    before: int | None = None,
    after: int | None = None,
    start: int = 0,
    empty: str = "zero",
) -> Tensor:
    rest = (scale, before, after, start, empty)
    found = torch.ops.dcpc.attention_forward(query, key, value, mask, keep, *rest)
    return found[0]  # type: ignore[no-any-return]


_library.impl("attention", _attention, "CompositeImplicitAutograd")
