"""Transient memory of ops on the CPU, beyond their outputs: one line an op.

Measured on the CPU with torch.profiler's allocator events, torch 2.13, float32; a line holds for
the layouts named in it. Losses, order, indices, pads, pools and transforms have theirs in
`kernel_transients.py`. An op without a line was measured to need none, or at most tens of bytes
(Python scalars become tensors of 8 + 4 bytes): matmuls of dense operands, pointwise ops and sums
whose operands are of one dtype (`_promoted` has the others), softmax, `cat`, `clone`,
`constant_pad_nd`, `slice_backward`, `nll_loss`, `embedding`. Not
modelled: the scratch of oneDNN for bfloat16 matmuls on the CPU (0.1 to 0.6 of an operand, chosen
by the processor).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch import fx
from torch.utils._sympy.functions import CeilDiv

from dcpc.fx.own_ops import is_own
from dcpc.fx.torch_api.tags import is_pointwise
from dcpc.ops.attention import Capability
from dcpc.symbolic_profile.ops import attention
from dcpc.symbolic_profile.ops.convolutions import convolution, convolution_backward
from dcpc.symbolic_profile.ops.facts import CallFacts, Facts, argument, op_name, ranks_of, total
from dcpc.symbolic_profile.ops.flops import ZERO, halo_bytes, own_counts, row_messages
from dcpc.symbolic_profile.ops.gpu_transients import GPU_TRANSIENTS
from dcpc.symbolic_profile.ops.kernel_transients import KERNELS, copies, half
from dcpc.symbolic_profile.ops.tile_costs import tile_bytes
from dcpc.symbolic_profile.polynomials import larger


def _matmul(*names: str) -> Callable[[CallFacts], sympy.Expr]:
    """A dense copy of each matrix with neither rows nor columns dense, of a batch one at a time."""

    def formula(call: CallFacts) -> sympy.Expr:
        found = [t for t in map(call.tensor, names) if not t.matrix]
        return sympy.Add(*(t.size_bytes / sympy.Mul(*t.shape[:-2]) for t in found))

    return formula


def _layer_norm_backward(call: CallFacts) -> sympy.Expr:
    """A thread: one row of the weight's and of the bias' gradient; copies of strided operands."""
    x = call.tensor("input")
    normalized = argument(call.node, "normalized_shape")
    width = sympy.Mul(*map(call.facts.size, normalized))
    rows = 2 * call.threads * width * x.dtype.itemsize if argument(call.node, "weight") else 0
    return rows + copies("grad_out", "input")(call)


def _group_norm_backward(call: CallFacts) -> sympy.Expr:
    """Two sums for each sample and channel, in float32 at least; copies of strided operands."""
    n, c = (call.facts.size(argument(call.node, name)) for name in ("N", "C"))
    item_bytes = max(4, call.tensor("input").dtype.itemsize)
    return 2 * n * c * item_bytes + copies("grad_out", "input")(call)


def _safe_softmax(call: CallFacts) -> sympy.Expr:
    """Returns the bytes of a softmax's copy, or of flags of scores and rows that are -inf."""
    x = call.tensor("self")
    hidden = x.numel + x.numel / x.shape[argument(call.node, "dim")]
    return larger(copies("self")(call), hidden)


def _halo(call: CallFacts) -> sympy.Expr:
    """Returns the bytes of neighbours' rows that are sent and received."""
    return 2 * halo_bytes(call.node, call.facts)


def _triangle(call: CallFacts) -> sympy.Expr:
    """A dense copy of an input whose matrices are not dense, by rows or by columns."""
    x = call.tensor("self")
    *batch, rows, columns = range(len(x.shape))
    dense = x.contiguous() or x.contiguous((*batch, columns, rows))
    return sympy.Integer(0) if dense else x.size_bytes


def _half_mean(call: CallFacts) -> sympy.Expr:
    """In half precision: the input and the sum in float32."""
    x = call.tensor("self")
    if not half(x):
        return sympy.Integer(0)
    return 4 * x.numel + 4 * call.facts.of(call.node)[0].numel


def _of_complex(call: CallFacts) -> sympy.Expr:
    """Of a complex operand a complex result, whose real part is taken."""
    x = call.tensor("self")
    return x.size_bytes if x.dtype.is_complex else ZERO


def _fused_rms_norm(call: CallFacts) -> sympy.Expr:
    """The square of the input; in half precision five times the input (copies in float32)."""
    x = call.tensor("input")
    return x.size_bytes * (1 if x.dtype.itemsize >= 4 else 5)


def _all_gather(call: CallFacts) -> sympy.Expr:
    """Every rank's piece, each as large as the largest."""
    out, dim = call.facts.of(call.node)[0], argument(call.node, "dim")
    row_bytes = sympy.Mul(out.dtype.itemsize, *out.shape[:dim], *out.shape[dim + 1 :])
    parent = call.facts.size(argument(call.node, "parent"))
    ranks = ranks_of(argument(call.node, "group"))
    return row_bytes * ranks * CeilDiv(parent, ranks)


def _reduce_scatter(call: CallFacts) -> sympy.Expr:
    """Returns the bytes sent, packed, and those received, a piece from every rank.

    The result is made after the sent bytes are freed; zigzag pieces are copied to be sent.
    """
    x, ranks = call.tensor("x"), ranks_of(argument(call.node, "group"))
    copies = 2 if argument(call.node, "zigzag") else 1
    return copies * x.size_bytes + (ranks - 1) * call.output_bytes


def _all_to_all(call: CallFacts) -> sympy.Expr:
    """Returns the bytes sent, packed, beside those received, which then lie beside the result."""
    held = larger(call.inputs_bytes, call.output_bytes)
    return held + call.inputs_bytes if argument(call.node, "scatter_zigzag") else held


def _gather_rows(call: CallFacts) -> sympy.Expr:
    """Of parameters that travel together: this rank's rows as they go, all ranks' as they come."""
    ranks = argument(call.node, "ranks")
    own = [call.facts.of(n)[0] for n in argument(call.node, "rows")]
    bundles = (m for m in row_messages(own, ranks, scalars=False) if len(m) > 1)
    return total(tuple(own[i].size_bytes for m in bundles for i in m), ranks + 1)


def _sum_rows(call: CallFacts) -> sympy.Expr:
    """Returns the bytes of the received gradients, and of the sent ones where these are copied."""
    ranks = argument(call.node, "ranks")
    rows = call.facts.of(call.node)[:-1]
    given = [call.facts.of(n)[0] for n in argument(call.node, "gradients")]
    found = sympy.Integer(0)
    for together in row_messages(rows, ranks, scalars=True):
        arrived = total(tuple(rows[i].size_bytes for i in together), ranks)
        first = given[together[0]]
        as_it_lies = len(together) == 1 and arrived == first.size_bytes and first.contiguous()
        found += arrived if as_it_lies else 2 * arrived
    return found


# op -> bytes allocated while it runs and freed before it returns.
TRANSIENTS: dict[str, Callable[[CallFacts], sympy.Expr]] = {
    **KERNELS,
    "aten::_scaled_dot_product_flash_attention_for_cpu": attention.kernel,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": attention.kernel_backward,
    "dcpc::attention_forward": attention.forward,
    "dcpc::attention_backward": attention.backward,
    "dcpc::attention_mask_backward": attention.backward,
    "dcpc::attention_of_rows_forward": attention.rows_forward,
    "dcpc::attention_of_rows_backward": attention.rows_backward,
    "dcpc::attention_of_rows_mask_backward": attention.rows_backward,
    "dcpc::ring_attention_forward": attention.ring_forward,
    "dcpc::ring_attention_backward": attention.ring_backward,
    "dcpc::swap": attention.swap,
    "dcpc::halo": _halo,
    "dcpc::halo_sum": _halo,
    "aten::native_layer_norm": copies("input"),
    "aten::native_layer_norm_backward": _layer_norm_backward,
    "aten::native_group_norm_backward": _group_norm_backward,
    "aten::_fused_rms_norm": _fused_rms_norm,
    "aten::_safe_softmax": _safe_softmax,
    "aten::_softmax": copies("self"),
    "aten::_log_softmax": copies("self"),
    "aten::_softmax_backward_data": copies("grad_output", "output"),
    "aten::_log_softmax_backward_data": copies("grad_output", "output"),
    "aten::embedding_dense_backward": copies("grad_output"),
    "aten::tril": _triangle,
    "aten::triu": _triangle,
    "aten::mm": _matmul("self", "mat2"),
    "aten::addmm": _matmul("mat1", "mat2"),
    "aten::bmm": _matmul("self", "mat2"),
    "aten::baddbmm": _matmul("batch1", "batch2"),
    "aten::mv": _matmul("self"),
    "aten::convolution": convolution,
    "aten::convolution_backward": convolution_backward,
    "aten::mean": _half_mean,
    "aten::logsumexp": lambda call: call.tensor("self").size_bytes + call.output_bytes,
    "aten::abs": _of_complex,
    "aten::angle": _of_complex,
    "aten::native_dropout": lambda call: call.tensor("input").size_bytes,
    "dcpc::all_to_all": _all_to_all,
    "dcpc::all_gather": _all_gather,
    "dcpc::reduce_scatter": _reduce_scatter,
    "dcpc::all_reduce": lambda call: sympy.Integer(0),
    "dcpc::gather_rows": _gather_rows,
    "dcpc::sum_rows": _sum_rows,
}


# Operands that an op reads as they are, whatever the others' dtype is.
_AS_THEY_ARE = ("condition", "mask")
# These first cast their operand to the dtype of what they return.
_ADDING = ("aten::sum", "aten::cumsum", "aten::prod", "aten::linalg_vector_norm")


def _promoted(call: CallFacts) -> sympy.Expr:
    """Operands in the dtype that an op computes in, where they have another.

    A GPU's kernels cast each element as they read it.
    """
    node, target = call.node, call.node.target
    assert isinstance(target, torch._ops.OpOverload), f"{node}: {target} has no schema"
    adding = target._schema.name in _ADDING
    if not adding and not is_pointwise(target):
        return ZERO
    names = [a.name for a in target._schema.arguments if a.name not in _AS_THEY_ARE]
    given = [argument(node, name) for name in names]
    found = [call.facts.of(x)[0] for x in given if isinstance(x, fx.Node) and call.facts.of(x)]
    dtype = call.facts.of(node)[0].dtype
    if dtype == torch.bool:
        dtype = _compared(given)
    casts = [
        x.numel
        for x in found
        if x.shape and x.dtype != dtype == torch.promote_types(x.dtype, dtype)
    ]
    return sympy.Add(*casts) * dtype.itemsize if casts else ZERO


def _compared(given: Sequence[Any]) -> torch.dtype:
    """Returns the dtype in which two operands of a comparison are compared; bool for one alone."""
    values = [x.meta["val"] if isinstance(x, fx.Node) else x for x in given[:2]]
    known = len(values) == 2 and all(isinstance(x, torch.Tensor | float | int) for x in values)
    return torch.result_type(*values) if known else torch.bool


def transient_bytes(
    node: fx.Node, facts: Facts, threads: int, gpu: Capability | None = None
) -> sympy.Expr:
    """Returns the bytes a call holds beyond its inputs and outputs while it runs.

    Those of a collective may hold `ranks_of` its group, see `at_ranks`.

    Args:
        node: an ATen or collective call.
        facts: reader of its values.
        threads: threads an op runs on.
        gpu: capability of the GPU whose kernels ops run; None: they run the CPU's.
    """
    tiles = tile_bytes(node, facts)
    if tiles is not None:
        return tiles
    name = op_name(node)
    formula = (GPU_TRANSIENTS.get(name) if gpu is not None else None) or TRANSIENTS.get(name)
    if formula is not None:
        # What stands for a GPU's kernels must not depend on the machine that plans.
        return formula(CallFacts(node, facts, threads if gpu is None else 1, gpu))
    if is_own(node.target):
        counts = own_counts(node, facts)
        return ZERO if counts is None else larger(ZERO, *counts[2])
    if gpu is not None or not isinstance(node.target, torch._ops.OpOverload):
        return ZERO
    return _promoted(CallFacts(node, facts, threads))
