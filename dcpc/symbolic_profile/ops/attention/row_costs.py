"""Transient memory of `dcpc::attention_of_rows`."""

from __future__ import annotations

import sympy

from dcpc.ops.attention import ROWS
from dcpc.symbolic_profile.ops.attention.scratch import ZERO, accumulator, kernel, kernel_backward
from dcpc.symbolic_profile.ops.facts import CallFacts
from dcpc.symbolic_profile.polynomials import larger


def rows_forward(call: CallFacts) -> sympy.Expr:
    """Returns the bytes that attention of valid rows holds beyond inputs and outputs, at the most.

    As if a sample had all positions: one sample's results, its part of the mask, and what `forward`
    holds for it.
    """
    query, value = call.tensor("query"), call.tensor("value")
    length, heads, size = _positions(call), query.shape[1], accumulator(query)
    results = heads * length * (value.shape[3] * query.dtype.itemsize + size)
    given = length * (heads + call.tensor("key").shape[1]) * query.shape[3] * query.dtype.itemsize
    given += length * value.shape[1] * value.shape[3] * query.dtype.itemsize
    kernels = larger(kernel(call, length, length), _rows_block(call))
    return results + given + kernels + 2 * _rows_mask(call, query.dtype.itemsize)


def rows_backward(call: CallFacts) -> sympy.Expr:
    """Returns the bytes that its backward holds beyond inputs and outputs, at the most."""
    query, key, value = (call.tensor(name) for name in ("query", "key", "value"))
    length, heads, size = _positions(call), query.shape[1], accumulator(query)
    widths = heads * query.shape[3] + key.shape[1] * (query.shape[3] + value.shape[3])
    gradients = length * widths * (2 * query.dtype.itemsize + size)
    gradients += length * heads * value.shape[3] * (query.dtype.itemsize + size)
    kernels = larger(kernel_backward(call, length, length), 2 * _rows_block(call))
    held = gradients + kernels + 2 * _rows_mask(call, query.dtype.itemsize)
    if call.node.target._opname.endswith("_mask_backward"):  # type: ignore[union-attr]
        mask = call.tensor("mask")
        wide = size * mask.numel if mask.dtype.itemsize < size else ZERO
        held += wide + 2 * _rows_mask(call, size)
    return held


def _positions(call: CallFacts) -> sympy.Expr:
    """Returns the number of positions of a sample, valid ones and padding."""
    return call.tensor("mask").shape[3]


def _rows_block(call: CallFacts) -> sympy.Expr:
    """Scores of a block of one sample's queries, and its copies of queries, keys and values."""
    query, value = call.tensor("query"), call.tensor("value")
    length, size = _positions(call), accumulator(query)
    rows, heads = sympy.Min(ROWS, length), query.shape[1]
    scores = heads * rows * (2 * length + query.shape[3] + value.shape[3] + 4) * size
    return scores + heads * length * (query.shape[3] + value.shape[3]) * size


def _rows_mask(call: CallFacts, size: int) -> sympy.Expr:
    """One sample's part of a mask, in numbers of so many bytes."""
    _, heads, queries, keys = call.tensor("mask").shape
    return heads * queries * keys * size
