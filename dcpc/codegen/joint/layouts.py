"""Strides and dtypes of results for which torch's fake kernels tell others than its kernels make.

A fake kernel is often a decomposition into other ops, whose operands come in another order; the
graph that is traced then views a result as it does not lie, and fails when it runs.
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
    """As the operands lie, the first one before the others."""
    operands = [x for x in args if isinstance(x, Tensor)]
    return _laid(value, compute_elementwise_output_strides(*operands))


def _dense(value: Tensor, args: Sequence[Any]) -> Tensor:
    return _laid(value, torch._prims_common.make_contiguous_strides_for(value.shape))


def _like(position: int) -> Callable[[Tensor, Sequence[Any]], Tensor]:
    """As this operand lies, dense; of a reduced loss one number."""

    def laid(value: Tensor, args: Sequence[Any]) -> Tensor:
        return torch.empty_like(args[position]) if value.ndim else value

    return laid


def _first_dense(value: Any, args: Sequence[Any]) -> Any:
    first, *rest = value
    return value if first is None else type(value)((_dense(first, args), *rest))


def _both_dense(value: Any, args: Sequence[Any]) -> Any:
    return type(value)(_dense(x, args) for x in value)


def _format_of(position: int) -> Callable[[Any, Sequence[Any]], Any]:
    """Dense, with the channels last if they are in this operand; the first of several results."""

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
    """A fake result of these strides."""
    if tuple(value.stride()) == tuple(strides):
        return value
    return torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device)


# op -> gives what its fake kernel returned the strides of its CPU kernel (torch 2.13).
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
    """A norm's result, and its statistics of rows in float32 at least, as a GPU's kernel has it."""
    first, *rows = value
    wide = torch.promote_types(first.dtype, torch.float32)
    return type(value)((first, *(x.to(wide) for x in rows)))


def as_laid(func: Any, args: Sequence[Any], value: Any) -> Any:
    """Returns what a call made on fake tensors, as the device's kernel makes it.

    That is with the strides that the CPU's kernel gives it; of one that is captured for a GPU, with
    the dtypes of a GPU's.

    Args:
        func: the op.
        args: its arguments, the tensors fake.
        value: what the fake kernel returned.
    """
    # Meta tensors stand for the CPU's; a GPU's kernels are not looked at.
    if func is aten.native_layer_norm.default and is_asked():
        value = _wide_statistics(value)
    if func not in _LAID or any(isinstance(x, Tensor) and x.is_cuda for x in args):
        return value
    return _LAID[func](value, args)
