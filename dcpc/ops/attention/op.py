"""`dcpc::attention`: scaled dot-product attention as one op with explicit saved tensors.

q `[b, h, s, d]`, k `[b, g, t, d]`, v `[b, g, t, e]`: h is a multiple of g, and query head i uses
key head i // (h / g). `mask` `[m, h or 1, s or 1, t or 1]` is of truth values (true: seen) or of
numbers that are added to the scores, and may have a gradient. b is a multiple of m, and sample i
uses row i // (b / m) of the mask: samples that follow each other share a row, which nothing
repeats. `keep` `[b or 1, t]` says which keys anybody sees. `segment` `[b or 1, t]`, integers, says
which of several packed sequences each position is of: a query sees keys of its own alone. For the
rest see `spec.Sight`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dcpc.ops.attention import blocks, whole
from dcpc.ops.attention.calls import (
    backward_by,
    backward_schema,
    define_output,
    empty_backward,
    empty_mask_backward,
    forward_schema,
    of_backward,
    save_call,
)
from dcpc.ops.attention.kernels import check_sizes
from dcpc.ops.attention.spec import EMPTY, Sight, empty_outputs

__all__ = ["DIRECT", "EMPTY"]


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    keep: Tensor | None,
    segment: Tensor | None,
    *sight: Any,
) -> tuple[Tensor, Tensor]:
    """Returns out `[b, h, s, e]` and logsumexp `[b, h, s]` in float32 or better."""
    check_sizes(query, key, value, mask)
    if not (query.numel() and key.numel() and value.numel()):
        out, lse = empty_outputs(query, value)
        return out.zero_(), lse.zero_()
    return whole.forward(query, key, value, mask, keep, segment, Sight(*sight))


attention_forward = torch.library.custom_op(
    "dcpc::attention_forward", _forward, mutates_args=(), schema=forward_schema(Sight)
)


@attention_forward.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return empty_outputs(query, value)


def _backward(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of q, k and v."""
    attended, hiding, sight = of_backward(given)
    if not attended.anything:
        return attended.zeros()
    return whole.backward(attended, *hiding, Sight(*sight))


attention_backward = torch.library.custom_op(
    "dcpc::attention_backward", _backward, mutates_args=(), schema=backward_schema(Sight)
)


attention_backward.register_fake(empty_backward)

# Op -> function of tensors without a gradient: torch's way to it takes as long as short rows do.
DIRECT = {
    torch.ops.dcpc.attention_forward.default: _forward,
    torch.ops.dcpc.attention_backward.default: _backward,
}


@torch.library.custom_op(
    "dcpc::attention_mask_backward", mutates_args=(), schema=backward_schema(Sight, of_mask=True)
)
def attention_mask_backward(*given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the gradients of q, k, v and the mask."""
    attended, (mask, keep, segment), rest = of_backward(given)
    assert mask is not None, "a mask that has a gradient"
    if not attended.anything:
        return *attended.zeros(), mask.new_zeros(mask.shape)
    sight = Sight(*rest)
    ids = whole.ids_of(segment, attended.q, sight)
    dq, dk, dv, dmask = blocks.backward(attended, mask, keep, sight, ids, mask_gradient=True)
    assert dmask is not None
    return dq, dk, dv, dmask


attention_mask_backward.register_fake(empty_mask_backward)


attention_forward.register_autograd(backward_by("attention"), setup_context=save_call)
define_output("attention", Sight)
