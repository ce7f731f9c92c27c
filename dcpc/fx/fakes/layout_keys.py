"""Computes the layout of a fake tensor, a key that is equal for equal tensors."""

from __future__ import annotations

import functools
from typing import Any, TypeAlias

import sympy
from torch import Tensor

from dcpc.fx.leaves import size_key

# Dtype, device, dims, then sizes, strides, offset, bytes.
Layout: TypeAlias = tuple[Any, ...]


def layout_of(tensor: Tensor) -> Layout:
    """Returns the key of tensors with equal dtype, device, shape, strides, offset and storage size.

    It has no conj and neg bits: a node of a lowered graph with such a bit is replaced by a value
    without (`writes.PLAIN`).
    """
    sizes = (*tensor.shape, *tensor.stride(), tensor.storage_offset())
    size_bytes = size_key(tensor.untyped_storage().nbytes())
    if isinstance(size_bytes, sympy.Add):
        size_bytes = _expanded(size_bytes)
    return tensor.dtype, tensor.device, tensor.ndim, *map(size_key, sizes), size_bytes


@functools.lru_cache(maxsize=4096)
def _expanded(size: sympy.Expr) -> sympy.Expr:
    """Returns a size multiplied out, as torch also writes dense memory's as n * (m - 1) + n."""
    return sympy.expand(size)


def fills_its_memory(layout: Layout) -> bool:
    """Whether a layout is contiguous and fills its storage, decided from expressions."""
    dtype, _, dims, *sizes = layout
    shape, strides, (offset, size_bytes) = sizes[:dims], sizes[dims : 2 * dims], sizes[2 * dims :]
    expected = sympy.Integer(1)
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if stride != expected:
            return False
        expected = expected * size
    return bool(offset == 0 and size_bytes == expected * dtype.itemsize)
