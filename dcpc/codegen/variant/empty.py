"""Makes kernels safe for tensors that they cannot take: empty ones, or with unusual strides.

A rank has an empty piece where a factor is shorter than the group. ATen's ops take that, except
convolutions, which refuse to make nothing, and the CPU's flash attention, which divides by the
number of its blocks (SIGFPE, torch 2.13). What its operands have to look like besides is in
`ops/attention/kernels.py`.

The CPU's backward of a batch norm asks each operand for its memory format twice, and the answers
differ where a dim of size 1 has an unusual stride: it then reads memory in the wrong order, or
beyond its end (torch 2.11 to 2.15). Where the channels are last, it reads weights and statistics
that have strides as if they had none. The backward of a convolution of several groups makes other
gradients of the weight where such a dim is in its input or gradient and channels are last in one
of its operands (torch 2.13). `tests/codegen/variant/test_strides.py` tries all kernels that look
at strides; these two alone are wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dcpc.ops.attention import laid

aten = torch.ops.aten

# Number of dims -> the memory formats in which a tensor may be dense; 0: any other number.
_FORMATS = {
    0: (torch.contiguous_format,),
    4: (torch.contiguous_format, torch.channels_last),
    5: (torch.contiguous_format, torch.channels_last_3d),
}


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Any:
    if q.numel() and k.numel():
        op = aten._scaled_dot_product_flash_attention_for_cpu.default
        return op(*(laid("flash", x) for x in (q, k, v)), *args, **kwargs)
    out = q.new_zeros((*q.shape[:-1], v.shape[-1])).transpose(1, 2).contiguous().transpose(1, 2)
    return out, q.new_zeros(q.shape[:-1], dtype=_accumulated(q.dtype))


def _flash_backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, ...]:
    if q.numel() and k.numel():
        op = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        return op(g, *(laid("flash", x) for x in (q, k, v, out)), *args, **kwargs)  # type: ignore[no-any-return]
    return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)


def _accumulated(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _convolution(x: Tensor, weight: Tensor, bias: Tensor | None, *args: Any) -> Tensor:
    stride, padding, dilation, transposed, *_ = args
    if not _is_empty(x, weight, stride, padding, dilation, transposed):
        return aten.convolution.default(x, weight, bias, *args)  # type: ignore[no-any-return]
    count = weight.dim() - 2
    sizes = _made(list(x.shape[-count:]), list(weight.shape[2:]), stride, padding, dilation)
    return x.new_empty((*x.shape[: -count - 1], weight.shape[0], *(max(0, n) for n in sizes)))


def _convolution_backward(
    g: Tensor, x: Tensor, weight: Tensor, bias_sizes: list[int] | None, *args: Any
) -> tuple[Tensor | None, ...]:
    if g.numel():
        op = aten.convolution_backward.default
        return op(plain_strides(g), plain_strides(x), weight, bias_sizes, *args)  # type: ignore[no-any-return]
    bias = None if bias_sizes is None else g.new_zeros(bias_sizes)
    wanted = args[-1]
    found = (torch.zeros_like(x), torch.zeros_like(weight), bias)
    return tuple(y if want else None for y, want in zip(found, wanted, strict=True))


def _batch_norm_backward(g: Tensor, x: Tensor, *args: Any) -> Any:
    op = aten.native_batch_norm_backward.default
    return op(plain_strides(g), plain_strides(x), *map(dense, args))


def dense(x: Any) -> Any:
    """Returns a tensor as contiguous, and anything else as it is."""
    return x.contiguous() if isinstance(x, Tensor) else x


def plain_strides(x: Tensor) -> Tensor:
    """Returns a view of the same elements whose dims of size 1 have the strides of a new tensor.

    Args:
        x: tensor of any shape. One that is dense in no memory format is returned as it is.
    """
    if 1 not in x.shape or x.device.type != "cpu":
        return x
    for layout in _FORMATS.get(x.ndim, _FORMATS[0]):
        if x.is_contiguous(memory_format=layout):
            strides = torch.empty(x.shape, device="meta", memory_format=layout).stride()
            return x if strides == x.stride() else x.as_strided(x.shape, strides)
    return x


def _is_empty(
    x: Tensor, weight: Tensor, stride: Any, padding: Any, dilation: Any, transposed: bool
) -> bool:
    """Whether a convolution's result is empty, as for windows of which a rank has none."""
    count = weight.dim() - 2
    kernel, before = list(weight.shape[2:]), list(x.shape[-count:])
    return not transposed and min(_made(before, kernel, stride, padding, dilation)) <= 0


def _made(before: list[int], kernel: list[int], *numbers: Any) -> list[int]:
    """Returns the sizes of a convolution's result."""
    every = [[*n] * (len(kernel) if len(n) == 1 else 1) for n in numbers]
    return [
        (n + 2 * pad - (k - 1) * apart - 1) // step + 1
        for n, k, step, pad, apart in zip(before, kernel, *every, strict=True)
    ]


def _has_groups(g: Tensor, x: Tensor, weight: Tensor, bias_sizes: Any, *args: Any) -> bool:
    """Whether a convolution's channels are in several groups, and a dim of size 1 is there."""
    return args[-2] > 1 and 1 in (*g.shape, *x.shape)


# Op whose CPU kernel misreads operands that torch's autograd may hand it, too -> which calls of it.
MISREAD: dict[Any, Callable[..., bool]] = {
    aten.convolution_backward.default: _has_groups,
    aten.native_batch_norm_backward.default: lambda *args: True,
}

SAFE: dict[Any, Callable[..., Any]] = {
    aten.native_batch_norm_backward.default: _batch_norm_backward,
    aten.convolution.default: _convolution,
    aten.convolution_backward.default: _convolution_backward,
    aten._scaled_dot_product_flash_attention_for_cpu.default: _flash_forward,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _flash_backward,
}
