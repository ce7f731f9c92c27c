"""Kernels that cannot take every tensor, made safe for them: without elements, or lying otherwise.

A rank has an empty piece where a factor is shorter than the group. ATen's ops take that, except the
CPU's flash attention, which divides by the number of its blocks (SIGFPE, torch 2.13). What its
operands have to look like besides is in `ops/attention/kernels.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dcpc.ops.attention import laid

aten = torch.ops.aten


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


SAFE: dict[Any, Callable[..., Any]] = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: _flash_forward,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _flash_backward,
}
