"""Transient memory of the flash kernel for some queries and some keys, at given sizes.

Follows `dcpc/ops/attention/flash.py` and `partial.py` for attention without mask, `keep` or
segment: causal, or of all keys.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import sympy
import torch

from dcpc.ops.attention import Capability, Sight
from dcpc.symbolic_profile.ops.attention.scratch import backward_buffers, kernel, lies_badly
from dcpc.symbolic_profile.ops.facts import CallFacts, TensorFacts

Part = tuple[int, int, Sight]  # queries, keys, who sees whom
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
QUERY, KEY, VALUE, OUT = 1, 2, 4, 8  # bits of `HeadSizes.copied`


class HeadSizes(NamedTuple):
    """Sizes that all rectangles of an attention share, each an integer.

    Attributes:
        batch: samples.
        heads: heads of the queries.
        key_heads: heads of keys and values.
        width: elements of a head.
        dtype: number of the dtype in `DTYPES`.
        threads: threads that the kernel runs on.
        copied: bits of the tensors whose layout the kernel cannot read.
        batch_stride: elements between samples of the gradient of the output.
        head_stride: elements between its heads.
        row_stride: elements between its rows.
        width_stride: elements between those of a head.
    """

    batch: int
    heads: int
    key_heads: int
    width: int
    dtype: int
    threads: int
    copied: int
    batch_stride: int
    head_stride: int
    row_stride: int
    width_stride: int

    @property
    def item_bytes(self) -> int:
        """Bytes of an element."""
        return DTYPES[self.dtype].itemsize

    @property
    def wide_bytes(self) -> int:
        """Returns the bytes of an element of the dtype that sums are kept in."""
        return max(self.item_bytes, 4)

    @property
    def groups(self) -> int:
        """Queries of a key head."""
        return self.heads // self.key_heads

    def query_bytes(self, rows: int) -> int:
        """Returns the bytes of so many rows of queries, or of outputs."""
        return self.batch * self.heads * rows * self.width * self.item_bytes

    def sum_bytes(self, rows: int) -> int:
        """Returns the bytes of the logsumexp of so many rows."""
        return self.batch * self.heads * rows * self.wide_bytes

    def key_bytes(self, rows: int) -> int:
        """Returns the bytes of so many rows of keys, or of values."""
        return self.batch * self.key_heads * rows * self.width * self.item_bytes

    def grad_copied(self, rows: int) -> bool:
        """Returns whether the kernel copies the output's gradient: of some rows, one call's."""
        heads = self.heads // self.groups
        strides = self.batch_stride, self.row_stride, self.head_stride * self.groups
        expected = 1
        for size, stride in zip(
            (self.width, heads, rows, self.batch), (self.width_stride, *strides[::-1]), strict=True
        ):
            if size != 1 and stride != expected:
                return True
            expected *= size
        return False


def head_sizes(call: CallFacts, backward: bool) -> tuple[sympy.Expr, ...]:
    """Returns the fields of `HeadSizes` of a call, as expressions."""
    query, key = call.tensor("query"), call.tensor("key")
    names = {"query": QUERY, "key": KEY, "value": VALUE, **({"out": OUT} if backward else {})}
    copied = sum(bit for name, bit in names.items() if lies_badly(call.tensor(name)))
    strides = call.tensor("grad_out").strides if backward else (0, 0, 0, 0)
    batch, heads, _, width = query.shape
    numbers = DTYPES.index(query.dtype), call.threads, copied
    found = (batch, heads, key.shape[1], width, *numbers, *strides)
    return tuple(map(sympy.sympify, found))


@dataclass(frozen=True, slots=True)
class _PartCall:
    """A kernel's call with known sizes, as the formulas of `scratch.py` read it."""

    query: TensorFacts
    key: TensorFacts
    threads: int
    gpu: Capability | None = None

    def tensor(self, name: str) -> TensorFacts:
        return self.query if name == "query" else self.key


@functools.lru_cache(maxsize=1 << 14)
def _kernel_bytes(s: HeadSizes, rows: int, keys: int, backward: bool) -> int:
    """Bytes of one call of the kernel for one query of each group, a gradient's copy excepted."""
    heads = s.heads // s.groups

    def facts(length: int) -> TensorFacts:
        shape = tuple(map(sympy.Integer, (s.batch, heads, length, s.width)))
        return TensorFacts(0, sympy.Integer(0), shape, shape, DTYPES[s.dtype])

    call = _PartCall(facts(rows), facts(keys), s.threads)
    return int((backward_buffers if backward else kernel)(call))


def forward_bytes(s: HeadSizes, at: Part, fresh: bool, own: bool) -> int:
    """Returns the most that adding a part to a forward holds, beyond the sums so far.

    Args:
        s: sizes of the attention.
        at: the part.
        fresh: whether its queries have nothing to be merged with.
        own: whether the keys lie as they were given, not in a buffer of their own.
    """
    rows, keys, sight = at
    out, lse = s.query_bytes(rows), s.sum_bytes(rows)
    copies = _copies(s, rows, keys, own, QUERY)
    first = _before(sight, keys)
    found = (out + lse) // s.groups
    most = found + _kernel_bytes(s, rows, first or keys, False)
    if 0 < first < keys:  # two parts, merged
        merged = lse // s.groups + s.batch * s.heads // s.groups * rows
        most = max(most, 2 * found + max(_kernel_bytes(s, rows, keys - first, False), merged))
    if s.groups > 1:
        most += out + lse
    elif s.copied & QUERY:  # the result, brought to the layout of the queries
        most = max(most, 2 * (out + lse))
    if fresh:
        return copies + most
    wider = s.batch * s.heads * rows * s.width * s.wide_bytes if s.item_bytes < 4 else 0
    merging = 2 * lse + max(s.batch * s.heads * rows, lse + wider)
    return max(copies + most, out + lse + merging)


def backward_bytes(s: HeadSizes, at: Part, own: bool) -> int:
    """Returns the most that adding a part's gradients holds, beyond the sums so far.

    Args:
        s: sizes of the attention.
        at: the part.
        own: whether the keys lie as they were given, not in a buffer of their own.
    """
    rows, keys, sight = at
    of_queries, of_keys = s.query_bytes(rows), s.key_bytes(keys)
    one = of_queries // s.groups
    grad = one if s.grad_copied(rows) else 0
    first = _before(sight, keys)
    most = grad + _kernel_bytes(s, rows, first or keys, True) + one + 2 * s.key_bytes(first or keys)
    if first:
        if first < keys:
            later = _kernel_bytes(s, rows, keys - first, True) + 2 * s.key_bytes(keys - first)
            most = max(most, grad + later + 2 * one)
        most += 2 * of_keys
    if s.groups > 1:
        most += of_queries + 2 * of_keys
    wider = 0
    if s.item_bytes < 4:  # a gradient as it is added to its sum
        wider = max(of_queries, of_keys) // s.item_bytes * s.wide_bytes
    return max(_copies(s, rows, keys, own, QUERY | OUT) + most, of_queries + 2 * of_keys + wider)


def _copies(s: HeadSizes, rows: int, keys: int, own: bool, of_queries: int) -> int:
    """Returns the bytes of the copies of tensors whose layout the kernel cannot read."""
    held = sum(s.query_bytes(rows) for bit in (QUERY, OUT) if s.copied & of_queries & bit)
    if own:
        held += sum(s.key_bytes(keys) for bit in (KEY, VALUE) if s.copied & bit)
    return held


def _before(sight: Sight, keys: int) -> int:
    """Returns the number of keys before the first query of causal attention."""
    return 0 if sight.after is None else min(sight.start, keys)
