"""Attention by a GPU's fused kernels: flash attention, and the memory-efficient one of torch.

`kernels.GPU_KERNELS` says which computes what. Flash attention is cuDNN's where torch itself
prefers that and it can, else flash-attn's if that is installed, else torch's copy of it. cuDNN
makes a plan for each batch and length, once: 0.07 s each way on an H200. The tests have no GPU:
they run this with plain functions that do as the kernels' documentation says, and not the kernels.

A window is counted from the last query and the last key, and a limit below 0 is none at all. So
keys that no query sees are left out first: then the last query's limit is a key that is there.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
from torch import Tensor

from dcpc.ops.attention.kernels import Capability, OnGpu, check_sizes, gpu_kernel, laid
from dcpc.ops.attention.spec import Attended, Sight, accumulated, empty_gradient, empty_outputs

try:
    from flash_attn import flash_attn_interface as installed
except ImportError:
    installed = None

aten = torch.ops.aten

# Masks of the efficient kernel: none, and causal where the last query sees the last key.
_ALL, _CAUSAL_FROM_LAST = 0, 2
ROWS = 32  # its logsumexp has so many rows or a multiple

# Source: torch's sdp_utils.cpp, `check_prefer_cudnn_attention` and `check_cudnn_tensor_shapes`.
CUDNN_SINCE = 91501
CUDNN_ON = ((9, 0), (10, 0), (10, 3))
CUDNN_WIDEST = 128
CUDNN_SAMPLES = 65535


def able(q: Tensor, k: Tensor, sight: Sight) -> bool:
    """Returns whether a fused kernel computes this attention without a mask.

    It is not used where positions hide all keys from a query, as kernels differ in the result.
    """
    return kernel_of(q, k, sight) != "blocks"


def kernel_of(q: Tensor, k: Tensor, sight: Sight) -> str:
    """Returns the name of the kernel for an attention without a mask: see `gpu_kernel`."""
    if sight.misses(sight.start + q.shape[2], k.shape[2]):
        return "blocks"
    name = gpu_kernel(OnGpu(q.dtype, q.shape[3], sight, capability(q.device)))
    beyond = sight.after is not None and sight.start + q.shape[2] > k.shape[2]
    return "blocks" if name == "efficient" and beyond else name


@functools.cache
def capability(device: torch.device) -> Capability:
    """Returns the capability of a GPU."""
    return torch.cuda.get_device_capability(device)


@functools.cache
def has_cudnn(device: torch.device) -> bool:
    """Returns whether torch prefers cuDNN's attention on a device, unless the user disabled it."""
    if device.type != "cuda" or os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") == "1":
        return False
    return (torch.backends.cudnn.version() or 0) >= CUDNN_SINCE and capability(device) in CUDNN_ON


def _repeats(x: Tensor) -> bool:
    """Returns whether several indices of a tensor share memory, as after `expand`."""
    return any(n > 1 and not step for n, step in zip(x.shape, x.stride(), strict=True))


def by_cudnn(q: Tensor, k: Tensor, v: Tensor, sight: Sight) -> bool:
    """Returns whether cuDNN can replace flash attention for these queries and visible keys."""
    if not has_cudnn(q.device) or not torch.backends.cuda.cudnn_sdp_enabled():
        return False
    exact = torch.are_deterministic_algorithms_enabled()
    if exact and not torch.is_deterministic_algorithms_warn_only_enabled():
        return False
    square = sight.start == 0 and q.shape[2] == k.shape[2]
    seen = sight.before is None and (sight.after is None or (sight.after == 0 and square))
    fits = k.shape[2] > 1 and q.shape[3] <= CUDNN_WIDEST and q.shape[0] <= CUDNN_SAMPLES
    return seen and fits and not any(map(_repeats, (q, k, v)))


def _seen(q: Tensor, k: Tensor, sight: Sight) -> tuple[Tensor, Sight]:
    """Returns the keys (or values) that any query sees, and the limits relative to them."""
    low, high = sight.keys(0, q.shape[2], k.shape[2])
    if (low, high) == (0, k.shape[2]):
        return k, sight
    return k[:, :, low:high], sight._replace(start=sight.start - low)


def _ahead(q: Tensor, k: Tensor, sight: Sight) -> int:
    """Returns the number of keys after the last query."""
    return k.shape[2] - q.shape[2] - sight.start


def window(sight: Sight, ahead: int) -> tuple[int, int]:
    """Returns the window sizes of flash-attn, (left, right), -1 without a limit.

    Args:
        sight: limits by position.
        ahead: number of keys after the last query, from which flash-attn counts.
    """
    left = -1 if sight.before is None else sight.before + ahead
    right = -1 if sight.after is None else sight.after - ahead
    assert min(left, right) >= -1, f"a query sees no key: {sight}, {ahead} keys after the last"
    return left, right


def forward(q: Tensor, k: Tensor, v: Tensor, sight: Sight) -> tuple[Tensor, Tensor]:
    """Returns out `[b, h, s, d]` and logsumexp `[b, h, s]`."""
    check_sizes(q, k, v)
    given, name = q, kernel_of(q, k, sight)
    q, k, v = laid("cuda", q), laid("cuda", k), laid("cuda", v)
    v, _ = _seen(q, v, sight)
    k, sight = _seen(q, k, sight)
    if name == "efficient":
        return _efficient(q, k, v, sight, (given, v))
    if by_cudnn(q, k, v, sight):
        out, lse, *_ = aten._scaled_dot_product_cudnn_attention.default(
            q, k, v, None, True, 0.0, sight.after is not None, scale=sight.scale
        )
        return laid_out(out, lse.squeeze(3), (given, v))
    left, right = window(sight, _ahead(q, k, sight))
    tensors = [x.transpose(1, 2) for x in (q, k, v)]
    result: Any
    if installed is not None:
        result = installed._flash_attn_forward(
            *tensors, 0.0, sight.scale, False, left, right, 0.0, None, False
        )
    else:
        result = aten._flash_attention_forward.default(
            *tensors, None, None, q.shape[2], k.shape[2], 0.0, False, False,
            scale=sight.scale, window_size_left=left, window_size_right=right,
        )  # fmt: skip
    return laid_out(result[0].transpose(1, 2), result[1], (given, v))


def _efficient(
    q: Tensor, k: Tensor, v: Tensor, sight: Sight, given: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Returns out and logsumexp; grouped heads take one call for each query head of a group."""
    groups = q.shape[1] // k.shape[1]
    if groups == 1:
        return laid_out(*_efficient_outputs(q, k, v, sight), given)
    made, of_rows = empty_outputs(*given)
    for mine in _of_groups(groups):
        out, lse = _efficient_outputs(q[:, mine], k, v, sight)
        made[:, mine].copy_(out)
        of_rows[:, mine].copy_(lse)
        del out, lse
    return made, of_rows


def _efficient_outputs(q: Tensor, k: Tensor, v: Tensor, sight: Sight) -> tuple[Tensor, Tensor]:
    tensors = (x.transpose(1, 2) for x in (q, k, v))
    out, lse, *_ = aten._efficient_attention_forward.default(
        *tensors, None, None, None, None, None, 0.0, _mask_type(sight), True, scale=sight.scale
    )
    return out.transpose(1, 2), lse[..., : q.shape[2]]


def _of_groups(groups: int) -> list[slice]:
    """Returns the query heads of each call: the first of every key head, the second, and so on."""
    return [slice(i, None, groups) for i in range(groups)]


def _mask_type(sight: Sight) -> int:
    return _ALL if sight.after is None else _CAUSAL_FROM_LAST


def laid_out(out: Tensor, lse: Tensor, given: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Returns the outputs with the strides of the op's fake values."""
    wanted, _ = empty_outputs(*given)
    return out if out.stride() == wanted.stride() else wanted.copy_(out), lse.contiguous()


def backward(given: Attended, sight: Sight) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of q, k and v, laid out (b, s, h, d)."""
    check_sizes(given.q, given.k, given.v)
    name = kernel_of(given.q, given.k, sight)
    differentiate = _efficient_backward if name == "efficient" else _flash_backward
    grad, q, k, v, out = (laid("cuda", x) for x in given[:5])
    given = Attended(grad, q, k, v, out, given.lse.contiguous())
    low, high = sight.keys(0, q.shape[2], k.shape[2])
    if (low, high) == (0, k.shape[2]):
        return differentiate(given, sight)
    seen_v, _ = _seen(q, v, sight)
    seen_k, sight = _seen(q, k, sight)
    dq, *of_seen = differentiate(given._replace(k=seen_k, v=seen_v), sight)
    dk, dv = (empty_gradient(x).zero_() for x in (k, v))
    for whole, part in zip((dk, dv), of_seen, strict=True):
        whole[:, :, low:high].copy_(part)
    return dq, dk, dv


def _flash_backward(given: Attended, sight: Sight) -> tuple[Tensor, Tensor, Tensor]:
    grad, q, k, v, out, lse = given
    if by_cudnn(q, k, v, sight):
        return _cudnn_backward(given, sight)
    left, right = window(sight, _ahead(q, k, sight))
    tensors = [x.transpose(1, 2) for x in (grad, q, k, v, out)]
    found: list[Tensor]
    if installed is not None:
        found = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in tensors[1:4]]
        installed._flash_attn_backward(
            *tensors, lse, *found, 0.0, sight.scale, False, left, right, 0.0, None, False
        )
    else:
        unused = torch.empty((), dtype=torch.uint64, device=q.device)  # nothing is dropped
        found = aten._flash_attention_backward.default(
            *tensors, lse, None, None, q.shape[2], k.shape[2], 0.0, False, unused, unused,
            scale=sight.scale, window_size_left=left, window_size_right=right,
        )  # fmt: skip
    dq, dk, dv = map(_as_gradient, (q, k, v), (x.transpose(1, 2) for x in found))
    return dq, dk, dv


def _cudnn_backward(given: Attended, sight: Sight) -> tuple[Tensor, Tensor, Tensor]:
    grad, q, k, v, out, lse = given
    grad = grad.contiguous() if _repeats(grad) else grad
    unused = torch.empty((), dtype=torch.int64, device=q.device)  # nothing is dropped
    found = aten._scaled_dot_product_cudnn_attention_backward.default(
        grad, q, k, v, out, lse.unsqueeze(3), unused, unused, None, None, None, q.shape[2],
        k.shape[2], 0.0, sight.after is not None, scale=sight.scale,
    )  # fmt: skip
    dq, dk, dv = map(_as_gradient, (q, k, v), found)
    return dq, dk, dv


def _as_gradient(x: Tensor, found: Tensor) -> Tensor:
    """Returns a gradient in its tensor's dtype, with the strides of the op's fake values."""
    wanted = empty_gradient(x)
    same = found.dtype == x.dtype and found.stride() == wanted.stride()
    return found if same else wanted.copy_(found)


def _efficient_backward(given: Attended, sight: Sight) -> tuple[Tensor, Tensor, Tensor]:
    _, q, k, v, _, _ = given
    groups = q.shape[1] // k.shape[1]
    if groups == 1:
        found = _efficient_gradients(given, sight)
    else:
        wide = (empty_gradient(x, accumulated(x.dtype)).zero_() for x in (k, v))
        found = [empty_gradient(q), *wide]
        for mine in _of_groups(groups):
            part = _efficient_gradients(given.heads(mine), sight)
            found[0][:, mine].copy_(part[0])
            found[1].add_(part[1])
            found[2].add_(part[2])
            del part
    dq, dk, dv = map(_as_gradient, (q, k, v), found)
    return dq, dk, dv


def _efficient_gradients(given: Attended, sight: Sight) -> list[Tensor]:
    grad, q, k, v, out, lse = given
    rows = q.shape[2]
    padded = lse.new_full((*lse.shape[:2], -(-rows // ROWS) * ROWS), torch.inf)
    padded[..., :rows] = lse
    grad, q, k, v, out = (x.transpose(1, 2) for x in (grad, q, k, v, out))
    unused = torch.empty((), dtype=torch.int64, device=q.device)  # nothing is dropped
    *found, _ = aten._efficient_attention_backward.default(
        grad, q, k, v, None, out, None, None, rows, k.shape[1], padded, 0.0, unused, unused,
        _mask_type(sight), False, scale=sight.scale,
    )  # fmt: skip
    return [x.transpose(1, 2) for x in found]
