"""Corrects strides and dtypes of results where torch's fake kernels differ from its real ones.

A fake kernel is often a decomposition into other ops, whose operands are in another order. A later
view in the traced graph then assumes wrong strides, and fails when it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import compute_elementwise_output_strides, suggest_memory_format

from dcpc.fx.gpu_ops import is_asked

aten = torch.ops.aten


def _in_order(value: Tensor, args: Sequence[Any]) -> Tensor:
    """Lays the result out elementwise from its operands, the first one before the others."""
    operands = [x for x in args if isinstance(x, Tensor)]
    return _laid(value, compute_elementwise_output_strides(*operands))


def _dense(value: Tensor, args: Sequence[Any]) -> Tensor:
    return _laid(value, torch._prims_common.make_contiguous_strides_for(value.shape))


def _like(position: int) -> Callable[[Tensor, Sequence[Any]], Tensor]:
    """Returns a function that lays the result out like an operand; a scalar stays as it is."""

    def laid(value: Tensor, args: Sequence[Any]) -> Tensor:
        return torch.empty_like(args[position]) if value.ndim else value

    return laid


def _first_dense(value: Any, args: Sequence[Any]) -> Any:
    first, *rest = value
    return value if first is None else type(value)((_dense(first, args), *rest))


def _both_dense(value: Any, args: Sequence[Any]) -> Any:
    return type(value)(_dense(x, args) for x in value)


def _format_of(position: int) -> Callable[[Any, Sequence[Any]], Any]:
    """Returns a function that lays the first result out in the memory format of an operand."""

    def laid(value: Any, args: Sequence[Any]) -> Any:
        first, *rest = value
        if first is None:
            return value
        wanted = suggest_memory_format(args[position])
        if first.is_contiguous(memory_format=wanted):
            return value
        return type(value)((torch.empty_like(first, memory_format=wanted), *rest))

    return laid


def _laid(value: Tensor, strides: Sequence[Any]) -> Tensor:
    if tuple(value.stride()) == tuple(strides):
        return value
    return torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device)


# op -> function that gives the fake kernel's result the strides of the CPU kernel's (torch 2.13).
_LAID: Mapping[Any, Callable[[Any, Sequence[Any]], Any]] = {
    aten.elu_backward.default: _in_order,
    aten.hardsigmoid_backward.default: _in_order,
    aten.hardswish_backward.default: _in_order,
    aten.hardtanh_backward.default: _in_order,
    aten.softplus_backward.default: _in_order,
    aten.logit_backward.default: _in_order,
    aten._log_softmax_backward_data.default: _dense,
    aten.huber_loss_backward.default: _dense,
    aten.mse_loss_backward.default: _dense,
    aten.smooth_l1_loss_backward.default: _dense,
    aten.binary_cross_entropy.default: _like(0),
    aten.binary_cross_entropy_backward.default: _like(1),
    aten.copysign.Tensor: _in_order,
    aten.xlogy.Tensor: _in_order,
    aten.log_sigmoid_forward.default: _both_dense,
    aten.native_layer_norm_backward.default: _first_dense,
    aten._native_batch_norm_legit.no_stats: _format_of(0),
    aten.native_batch_norm_backward.default: _format_of(1),
}


def _wide_statistics(value: Any) -> Any:
    """Returns a norm's results with row statistics in float32 or better, as a GPU's kernel does."""
    first, *rows = value
    wide = torch.promote_types(first.dtype, torch.float32)
    return type(value)((first, *(x.to(wide) for x in rows)))


def as_laid(func: Any, args: Sequence[Any], value: Any) -> Any:
    """Returns the fake result of a call as the device's kernel makes it.

    It has the strides of the CPU's kernel and, if the call is captured for a GPU, also the dtypes
    of the GPU's kernel.
    """
    # Meta tensors stand for the CPU's; a GPU's kernels are not looked at.
    if func is aten.native_layer_norm.default and is_asked():
        value = _wide_statistics(value)
    if func not in _LAID or any(isinstance(x, Tensor) and x.is_cuda for x in args):
        return value
    return _LAID[func](value, args)
