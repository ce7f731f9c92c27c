"""Attention by a GPU's fused kernels: flash-attn where it is installed, else torch's own flash.

Half precision, causal or not, windows with flash-attn. The tests have no GPU: they run this with a
plain function that does as flash-attn's documentation says of windows, and not the kernels.

A window is counted from the last query and the last key, and a limit below 0 is none at all. So
keys that no query sees are left out first: then the last query's limit is a key that is there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dcpc.ops.attention.kernels import check_sizes, laid, takes
from dcpc.ops.attention.spec import Attended, Sight, empty_gradient, empty_outputs

try:
    from flash_attn import flash_attn_interface as installed
except ImportError:
    installed = None

aten = torch.ops.aten


def able(q: Tensor, k: Tensor, sight: Sight) -> bool:
    """Returns whether a fused kernel computes this attention without a mask.

    Not where positions hide all keys from a query: kernels differ in what they give it.
    """
    if not takes("cuda", q) or not recent(q.device):
        return False
    if sight.misses(sight.start + q.shape[2], k.shape[2]):
        return False
    if installed is not None:
        return True
    if sight.before is not None:
        return False
    return sight.after is None or _square(q, *_seen(q, k, sight))


def recent(device: torch.device) -> bool:
    """Returns whether flash attention has kernels for a GPU: Ampere's generation or a later one."""
    return torch.cuda.get_device_capability(device) >= (8, 0)


def _square(q: Tensor, k: Tensor, sight: Sight) -> bool:
    return sight.after == 0 and sight.start == 0 and q.shape[2] == k.shape[2]


def _seen(q: Tensor, k: Tensor, sight: Sight) -> tuple[Tensor, Sight]:
    """Returns the keys (or values) that any query sees, and who sees whom of these."""
    low, high = sight.keys(0, q.shape[2], k.shape[2])
    if (low, high) == (0, k.shape[2]):
        return k, sight
    return k[:, :, low:high], sight._replace(start=sight.start - low)


def _window(q: Tensor, k: Tensor, sight: Sight) -> tuple[int, int]:
    """flash-attn counts from the last query and key: shifts of the band, -1 without a limit."""
    ahead = k.shape[2] - q.shape[2] - sight.start
    left = -1 if sight.before is None else sight.before + ahead
    right = -1 if sight.after is None else sight.after - ahead
    assert min(left, right) >= -1, f"a query sees no key: {sight}, {q.shape[2]} of {k.shape[2]}"
    return left, right


def forward(q: Tensor, k: Tensor, v: Tensor, sight: Sight) -> tuple[Tensor, Tensor]:
    """Returns out `[b, h, s, d]` and logsumexp `[b, h, s]`."""
    check_sizes(q, k, v)
    given = q
    q, k, v = laid("cuda", q), laid("cuda", k), laid("cuda", v)
    v, _ = _seen(q, v, sight)
    k, sight = _seen(q, k, sight)
    if installed is not None:
        left, right = _window(q, k, sight)
        tensors = [x.transpose(1, 2) for x in (q, k, v)]
        result: Any = installed._flash_attn_forward(
            *tensors, 0.0, sight.scale, False, left, right, 0.0, None, False
        )
        return _laid_out(result[0].transpose(1, 2), result[1], (given, v))
    result = aten._scaled_dot_product_flash_attention.default(
        q, k, v, 0.0, sight.after is not None, False, scale=sight.scale
    )
    return _laid_out(result[0], result[1], (given, v))


def _laid_out(out: Tensor, lse: Tensor, given: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Returns the outputs in the layout that the op's fake values promise."""
    wanted, _ = empty_outputs(*given)
    return out if out.stride() == wanted.stride() else wanted.copy_(out), lse.contiguous()


def backward(given: Attended, sight: Sight) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of q, k and v, laid out (b, s, h, d)."""
    check_sizes(given.q, given.k, given.v)
    grad, q, k, v, out = (laid("cuda", x) for x in given[:5])
    given = Attended(grad, q, k, v, out, given.lse.contiguous())
    low, high = sight.keys(0, q.shape[2], k.shape[2])
    if (low, high) == (0, k.shape[2]):
        return _backward(given, sight)
    seen_v, _ = _seen(q, v, sight)
    seen_k, sight = _seen(q, k, sight)
    dq, *of_seen = _backward(given._replace(k=seen_k, v=seen_v), sight)
    dk, dv = (empty_gradient(x).zero_() for x in (k, v))
    for whole, part in zip((dk, dv), of_seen, strict=True):
        whole[:, :, low:high].copy_(part)
    return dq, dk, dv


def _backward(given: Attended, sight: Sight) -> tuple[Tensor, Tensor, Tensor]:
    grad, q, k, v, out, lse = given
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
