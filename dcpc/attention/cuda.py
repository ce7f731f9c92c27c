"""Attention by a GPU's fused kernels: flash-attn where it is installed, else torch's own flash.

Half precision, causal or not, windows with flash-attn. Not run by the tests: they have no GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dcpc.attention.spec import Sight, empty_gradient, empty_outputs

try:
    from flash_attn import flash_attn_interface as installed
except ImportError:
    installed = None

aten = torch.ops.aten

WIDEST = 256  # of a head, for both


def able(q: Tensor, k: Tensor, sight: Sight) -> bool:
    """Returns whether a fused kernel computes this attention without a mask."""
    half = q.dtype in (torch.float16, torch.bfloat16)
    if not half or q.shape[-1] > WIDEST or q.shape[-1] % 8:
        return False
    if installed is not None:
        return True
    plain = sight.before is None and (sight.after is None or _square(q, k, sight))
    return plain and q.shape[1] == k.shape[1]


def _square(q: Tensor, k: Tensor, sight: Sight) -> bool:
    return sight.after == 0 and sight.start == 0 and q.shape[2] == k.shape[2]


def _window(q: Tensor, k: Tensor, sight: Sight) -> tuple[int, int]:
    """flash-attn counts from the last query and key: shifts of the band, -1 without a limit."""
    ahead = k.shape[2] - q.shape[2] - sight.start
    left = -1 if sight.before is None else sight.before + ahead
    right = -1 if sight.after is None else sight.after - ahead
    return left, right


def forward(q: Tensor, k: Tensor, v: Tensor, sight: Sight) -> tuple[Tensor, Tensor]:
    """Returns out `[b, h, s, d]` and logsumexp `[b, h, s]`."""
    if installed is not None:
        left, right = _window(q, k, sight)
        tensors = [x.transpose(1, 2) for x in (q, k, v)]
        result: Any = installed._flash_attn_forward(
            *tensors, 0.0, sight.scale, False, left, right, 0.0, None, False
        )
        return _laid_out(result[0].transpose(1, 2), result[1], (q, v))
    result = aten._scaled_dot_product_flash_attention.default(
        q, k, v, 0.0, sight.after is not None, False, scale=sight.scale
    )
    return _laid_out(result[0], result[1], (q, v))


def _laid_out(out: Tensor, lse: Tensor, given: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Returns the outputs in the layout that the op's fake values promise."""
    wanted, _ = empty_outputs(*given)
    return out if out.stride() == wanted.stride() else wanted.copy_(out), lse.contiguous()


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, sight: Sight
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of q, k and v."""
    if installed is not None:
        left, right = _window(q, k, sight)
        tensors = [x.transpose(1, 2) for x in (grad, q, k, v, out)]
        found = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in tensors[1:4]]
        installed._flash_attn_backward(
            *tensors, lse, *found, 0.0, sight.scale, False, left, right, 0.0, None, False
        )
        dq, dk, dv = (x.transpose(1, 2) for x in found)
        return dq, dk, dv
    unused = torch.empty((), dtype=torch.uint64, device=q.device)
    dq, dk, dv = aten._scaled_dot_product_flash_attention_backward.default(
        grad, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0,
        sight.after is not None, unused, unused, scale=sight.scale,
    )  # fmt: skip
    pairs = ((q, dq), (k, dk), (v, dv))
    dq, dk, dv = (
        g if g.stride() == empty_gradient(x).stride() else empty_gradient(x).copy_(g)
        for x, g in pairs
    )
    return dq, dk, dv
