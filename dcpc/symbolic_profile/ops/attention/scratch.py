"""Transient memory of torch's CPU flash attention, for some queries and keys.

Measured as the lines of `transients.py` are.
"""

from __future__ import annotations

from typing import Protocol

import sympy
import torch
from torch.utils._sympy.functions import CeilDiv

from dcpc.ops.attention import Capability
from dcpc.symbolic_profile.ops.facts import TensorFacts
from dcpc.symbolic_profile.ops.onednn import multiplies, multiplies_tiles
from dcpc.symbolic_profile.polynomials import Packs, QueryBlock

BSHD = (0, 2, 1, 3)  # the order of dims in memory in which kernels take and give gradients
ZERO, ONE = sympy.Integer(0), sympy.Integer(1)


class KernelCall(Protocol):
    """Arguments of an attention kernel: the call of a graph's node, or a part of it."""

    @property
    def threads(self) -> int:
        """Returns the threads that it runs on."""

    @property
    def gpu(self) -> Capability | None:
        """Returns the capability of the GPU that is planned for; None: the CPU's kernels run."""

    def tensor(self, name: str) -> TensorFacts:
        """Returns the tensor argument of this name."""


def accumulator(x: TensorFacts) -> int:
    """Returns the bytes of a number of the dtype in which softmax is computed."""
    return max(x.dtype.itemsize, 4)


def _kernel_blocks(
    call: KernelCall, rows: sympy.Expr | None, keys: sympy.Expr | None
) -> tuple[sympy.Expr, sympy.Expr, sympy.Expr]:
    """Queries and keys of a block, and bytes of an element beside its float32 (0 in float32).

    Source: aten/src/ATen/native/cpu/FlashAttentionKernel.cpp.
    """
    query, key = call.tensor("query"), call.tensor("key")
    keys = sympy.Min(512, key.shape[2] if keys is None else keys)
    reduced = query.dtype.itemsize if query.dtype.itemsize < 4 else 0
    return QueryBlock(query.shape[2] if rows is None else rows), keys, sympy.Integer(reduced)


def lies_badly(x: TensorFacts) -> bool:
    """Returns whether a tensor `[b, h, s, d]` is copied, as the kernel cannot read it."""
    apart = x.shape[3] != 1 and x.strides[3] != 1
    overlap = x.shape[2] != 1 and x.strides[2] == 0
    return bool(apart or overlap)


def kernel(
    call: KernelCall,
    rows: sympy.Expr | None = None,
    keys: sympy.Expr | None = None,
    calls: sympy.Expr = ONE,
) -> sympy.Expr:
    """Returns the bytes of all threads' scores, row maxima, sums and output of a block.

    Args:
        call: call of the kernel, or of an op that calls it.
        rows: number of its queries; None: all.
        keys: number of its keys; None: all.
        calls: number of calls that the samples are divided among.
    """
    packed = _packed(call, rows, keys, calls)
    queries, keys, reduced = _kernel_blocks(call, rows, keys)
    width = call.tensor("query").shape[3]
    wide = accumulator(call.tensor("query"))
    buffer = queries * (keys + 2 + width) * wide + queries * keys * reduced
    return call.threads * buffer + packed


def _packed(
    call: KernelCall, rows: sympy.Expr | None, keys: sympy.Expr | None, calls: sympy.Expr
) -> sympy.Expr:
    """Bytes of keys and values as a processor with AMX multiplies them in bfloat16, else 0.

    A thread has a block's keys besides, and queries where an odd width is made even. Not followed:
    few queries of many keys are not packed.

    Source: torch 2.13, aten/src/ATen/native/cpu/FlashAttentionKernel.cpp (`need_pack`).
    """
    query, key = call.tensor("query"), call.tensor("key")
    if query.dtype != torch.bfloat16 or call.gpu is not None or not multiplies_tiles():
        return ZERO
    batch, heads, queries, width = query.shape
    queries, keys = queries if rows is None else rows, key.shape[2] if keys is None else keys
    block, even = sympy.Min(512, keys), _even(width)
    own = batch / calls * heads * (keys * even + _even(keys) * width)
    padded = QueryBlock(queries) * (_even(block) - block + even * (width % 2))
    each = block * width + padded
    return Packs(queries, keys) * 2 * (own + call.threads * each)


def _even(size: sympy.Expr) -> sympy.Expr:
    return 2 * CeilDiv(size, 2)


def kernel_backward(
    call: KernelCall,
    rows: sympy.Expr | None = None,
    keys: sympy.Expr | None = None,
    calls: sympy.Expr = ONE,
) -> sympy.Expr:
    """Returns the bytes of a thread's scores and their gradients, one row sum, grad_out's copy.

    That is made unless it lies (b, s, h, d); of some rows always. For arguments see `kernel`.
    """
    grad = call.tensor("grad_out")
    copy = grad.size_bytes if rows is None else grad.size_bytes * rows / grad.shape[2]
    if rows is None and grad.contiguous(BSHD):
        copy = ZERO
    return backward_buffers(call, rows, keys) + copy / calls


def backward_buffers(
    call: KernelCall, rows: sympy.Expr | None = None, keys: sympy.Expr | None = None
) -> sympy.Expr:
    """Returns the bytes of `kernel_backward` without the copy of the gradient."""
    queries, keys, reduced = _kernel_blocks(call, rows, keys)
    wide = accumulator(call.tensor("query"))
    buffer = 2 * queries * keys * (wide + reduced) + _gemm(call, queries, keys)
    return call.threads * buffer + queries * wide


def _gemm(call: KernelCall, queries: sympy.Expr, keys: sympy.Expr) -> sympy.Expr:
    """Returns an upper bound of oneDNN's bytes for a block's products in half precision.

    Measured with AVX-512 and with AMX. Where oneDNN has no instructions for a dtype, torch's own
    loops multiply without transient memory.
    """
    query = call.tensor("query")
    bfloat16 = query.dtype == torch.bfloat16
    if not (multiplies(query.dtype) if call.gpu is None else bfloat16):
        return ZERO
    if not bfloat16:
        return 4 * queries * keys + 256 * (queries + keys) + 17_540
    width = query.shape[3]
    packed = 2 * 64 * 64 * CeilDiv(keys, 64) * CeilDiv(width, 64)
    return 4 * (queries + keys) * width + 2 * queries * keys + packed + 5248
