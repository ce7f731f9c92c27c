"""What says which fake tensors are alike."""

from __future__ import annotations

import functools
from typing import Any, TypeAlias

import sympy
from torch import Tensor

from dcpc.fx.leaves import size_key

# Dtype, device, dims, then sizes, strides, offset, bytes.
Layout: TypeAlias = tuple[Any, ...]


def layout_of(tensor: Tensor) -> Layout:
    """Returns what tensors of one dtype, device, shape, strides and memory share.

    Their conj and neg bits are left out: a node of a lowered graph that has one stands for a value
    without (`writes.PLAIN`).
    """
    sizes = (*tensor.shape, *tensor.stride(), tensor.storage_offset())
    size_bytes = size_key(tensor.untyped_storage().nbytes())
    if isinstance(size_bytes, sympy.Add):
        size_bytes = _expanded(size_bytes)
    return tensor.dtype, tensor.device, tensor.ndim, *map(size_key, sizes), size_bytes


@functools.lru_cache(maxsize=4096)
def _expanded(size: sympy.Expr) -> sympy.Expr:
    """Returns a size multiplied out: torch writes that of dense memory as n * (m - 1) + n, too."""
    return sympy.expand(size)


def fills_its_memory(layout: Layout) -> bool:
    """Whether a tensor is contiguous and all there is in its memory, told from expressions."""
    dtype, _, dims, *sizes = layout
    shape, strides, (offset, size_bytes) = sizes[:dims], sizes[dims : 2 * dims], sizes[2 * dims :]
    expected = sympy.Integer(1)
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if stride != expected:
            return False
        expected = expected * size
    return bool(offset == 0 and size_bytes == expected * dtype.itemsize)
