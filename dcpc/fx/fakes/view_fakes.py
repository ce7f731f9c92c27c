"""Computes views of fake tensors from the expressions of their sizes and strides.

torch evaluates each size and stride in turn. The results computed here hold at any sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor

from dcpc.fx.fakes.made import is_told, strided
from dcpc.fx.leaves import size_key

aten = torch.ops.aten

_Sizes = list[Any]
_Viewed = tuple[_Sizes, _Sizes, Any]  # shape, strides, offset


def view_result(func: torch._ops.OpOverload, args: tuple[Any, ...]) -> Tensor | None:
    """Returns the view that a call makes, or None where torch must compute it."""
    source = args[0]
    if not is_told(source) or source.dtype.is_complex:
        return None
    found = VIEW_OPS[func](*args)
    return None if found is None else strided(source, *found)


def _same(source: Tensor) -> _Viewed:
    return [*source.shape], [*source.stride()], source.storage_offset()


def _permute(source: Tensor, dims: Sequence[int]) -> _Viewed:
    shape, strides, offset = _same(source)
    order = [d % source.ndim for d in dims]
    return [shape[d] for d in order], [strides[d] for d in order], offset


def _transpose(source: Tensor, one: int, other: int) -> _Viewed:
    order = [*range(source.ndim)]
    if order:
        order[one], order[other] = order[other], order[one]
    return _permute(source, order)


def _t(source: Tensor) -> _Viewed:
    return _permute(source, [*reversed(range(source.ndim))])


def _unsqueeze(source: Tensor, dim: int) -> _Viewed:
    shape, strides, offset = _same(source)
    at = dim % (source.ndim + 1)
    stride = shape[at] * strides[at] if at < source.ndim else 1
    return [*shape[:at], 1, *shape[at:]], [*strides[:at], stride, *strides[at:]], offset


def _squeeze(source: Tensor, dim: int) -> _Viewed | None:
    if not source.ndim or isinstance(source.shape[dim], torch.SymInt):
        return None
    shape, strides, offset = _same(source)
    if shape[dim] == 1:
        del shape[dim], strides[dim]
    return shape, strides, offset


def _select(source: Tensor, dim: int, index: Any) -> _Viewed | None:
    shape, strides, offset = _same(source)
    size, stride = shape.pop(dim), strides.pop(dim)
    if not isinstance(size, int) or not isinstance(index, int) or not -size <= index < size:
        return None
    return shape, strides, offset + index % size * stride


def _slice(
    source: Tensor, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> _Viewed | None:
    shape, strides, offset = _same(source)
    if any(isinstance(n, torch.SymInt) for n in (shape[dim], start, end, step)):
        return None
    kept = range(shape[dim])[slice(start, end, step)]
    shape[dim], offset = len(kept), offset + (kept.start if kept else 0) * strides[dim]
    strides[dim] = strides[dim] * step
    return (shape, strides, offset) if kept else None


def _expand(source: Tensor, sizes: Sequence[Any]) -> _Viewed | None:
    shape, strides, offset = _same(source)
    added = len(sizes) - source.ndim
    found: _Sizes = [*sizes[:added]]
    made: _Sizes = [0] * added
    if added and not all(isinstance(n, torch.SymInt) or n > 1 for n in found):
        return None
    for own, stride, wanted in zip(shape, strides, sizes[added:], strict=True):
        keeps = size_key(wanted) in (-1, size_key(own))
        if not keeps and size_key(own) != 1:
            return None
        found.append(own if keeps else wanted)
        made.append(stride if keeps else 0)
    return found, made, offset


def _view(source: Tensor, sizes: Sequence[Any]) -> _Viewed | None:
    """Returns a view in another shape: each run of dims without gaps is split on its own.

    Source: torch's `computeStride`.
    """
    if not source.ndim or any(size_key(n) in (-1, 0) for n in sizes):
        return None
    left, strides = [*sizes], []
    for size, stride in reversed(_runs(source)):
        length = sympy.Integer(1)
        while length != size or (left and size_key(left[-1]) == 1):
            if not left:
                return None
            strides.append(stride)
            length = length * size_key(left[-1])
            stride = stride * left.pop()
    return None if left else ([*sizes], strides[::-1], source.storage_offset())


def _runs(source: Tensor) -> list[tuple[sympy.Expr, Any]]:
    """Returns (length, smallest stride) of each run of dims without gaps, outermost first."""
    found: list[tuple[sympy.Expr, Any]] = []
    for own, stride in zip(reversed(source.shape), reversed(source.stride()), strict=True):
        size = size_key(own)
        if found and (size == 1 or size_key(stride) == found[-1][0] * size_key(found[-1][1])):
            found[-1] = found[-1][0] * size, found[-1][1]
        else:
            found.append((sympy.Integer(1) * size, stride))
    return found[::-1]


VIEW_OPS: Mapping[Any, Callable[..., _Viewed | None]] = {
    aten.alias.default: _same,
    aten.detach.default: _same,
    aten.permute.default: _permute,
    aten.transpose.int: _transpose,
    aten.t.default: _t,
    aten.unsqueeze.default: _unsqueeze,
    aten.squeeze.dim: _squeeze,
    aten.select.int: _select,
    aten.slice.Tensor: _slice,
    aten.expand.default: _expand,
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
}
