"""What an op allocates and frees again on a GPU, where that is not what the CPU's does.

Read in the kernels' sources, not measured: the tests have no GPU; `benchmarks.gpu` compares. Flash
attention is taken for granted wherever `dcpc/ops/attention/cuda.py` can use it, flash-attn's or
torch's copy of it. The caching allocator's blocks are those of `allocator.py`. Not modelled:
workspaces of cuBLAS (a constant: 32 MiB on Hopper, 8 MiB before), of cuDNN's convolutions (its
choice; copies of all operands stand for it), and of sums over a whole tensor (small).
"""

from __future__ import annotations

from collections.abc import Callable

import sympy
from torch.utils._sympy.functions import CeilDiv

from dcpc.ops.attention import DEMANDS, kernel_name
from dcpc.symbolic_profile.ops import attention
from dcpc.symbolic_profile.ops.convolutions import gpu_convolution, gpu_convolution_backward
from dcpc.symbolic_profile.ops.facts import CallFacts, argument
from dcpc.symbolic_profile.ops.kernel_transients import (
    cross_entropy_with_logits,
    loss,
    scatter_mean,
)

ZERO = sympy.Integer(0)
WIDEST = DEMANDS["cuda"].widest or 0  # of a head
ROWS = 128  # queries are rounded up to a multiple of this


def _fused(call: CallFacts) -> bool:
    """Whether a fused kernel computes an attention, as `dcpc/ops/attention/cuda.py` decides."""
    query, value, mask = call.tensor("query"), call.tensor("value"), call.given("mask")
    width, asks = query.shape[3], DEMANDS["cuda"]
    if query.dtype not in asks.dtypes or not width.is_Integer:
        return False
    if width > WIDEST or width % asks.multiple:
        return False
    name = kernel_name(
        "cuda",
        width == value.shape[3],
        None if mask is None else mask.dtype,
        call.given("keep") is not None,
        attention.sight_of(call),
        call.given("segment") is not None,
    )
    return name == "cuda"


def _in_parts(call: CallFacts) -> bool:
    return call.given("segment") is not None or argument(call.node, "turn") is not None


def _forward(call: CallFacts) -> sympy.Expr:
    """A copy of the output, unless queries lie (b, s, h, d) as the kernel's output does.

    In parts as on the CPU, which is an upper bound.
    """
    if not _fused(call):
        return attention.blocks(call)
    if _in_parts(call):
        return attention.forward_bound(call)
    query = call.tensor("query")
    return ZERO if query.contiguous(attention.BSHD) else query.size_bytes


def _accumulators(call: CallFacts) -> sympy.Expr:
    """The queries' gradient and a number a row in float32, rounded up; each query head's dk and dv.

    Source: flash-attention, csrc/flash_attn/flash_api.cpp, mha_bwd (dq_accum, softmax_d,
    dk_expanded, dv_expanded), of which torch has a copy.
    """
    query, key, value = (call.tensor(name) for name in ("query", "key", "value"))
    batch, heads, rows, width = query.shape
    rounded = ROWS * CeilDiv(rows, ROWS)
    wide = WIDEST if width > 192 else 32 * (-(-int(width) // 32))
    held = batch * heads * rounded * (wide + 1) * 4
    groups = sympy.sympify(heads) / key.shape[1]
    return held if groups == 1 else held + groups * (key.size_bytes + value.size_bytes)


def _backward(call: CallFacts) -> sympy.Expr:
    if not _fused(call):
        return attention.blocks_backward(call)
    held = _accumulators(call)
    return held + attention.backward_bound(call) if _in_parts(call) else held


def _ring_backward(call: CallFacts) -> sympy.Expr:
    """As on the CPU, and the kernel's own: an upper bound."""
    held = attention.ring_backward_bound(call)
    return held + _accumulators(call) if _fused(call) else held


def _copies(*names: str) -> Callable[[CallFacts], sympy.Expr]:
    def formula(call: CallFacts) -> sympy.Expr:
        operands = (call.tensor(name) for name in names)
        return sympy.Add(*(t.size_bytes for t in operands if not t.contiguous()))

    return formula


def _batch(*names: str) -> Callable[[CallFacts], sympy.Expr]:
    """Returns the formula: a dense copy of each batch of matrices that cuBLAS cannot read.

    Source: `prepare_batch_matrix_for_cublas` of torch's cuda/Blas.cpp.
    """

    def formula(call: CallFacts) -> sympy.Expr:
        return sympy.Add(*(t.size_bytes for t in map(call.tensor, names) if not t.matrix))

    return formula


def _embedding_backward(call: CallFacts) -> sympy.Expr:
    """An upper bound: of each row that was looked up a sum in float32, and sorted indices.

    Source: aten/src/ATen/native/cuda/EmbeddingBackwardKernel.cu: partial sums of ten rows of one
    index at a time, as many as rows where all indices differ.
    """
    grad, indices = call.tensor("grad_output"), call.tensor("indices")
    return _copies("grad_output")(call) + 4 * grad.numel + 4 * 8 * indices.numel


# Not read in a source, as the rest is: what the CPU takes to widen half precision is left out.
_LOSSES = ("huber_loss", "mse_loss", "smooth_l1_loss")
_IN_PLACE = ("binary_cross_entropy", "gather", "scatter", "scatter_add", "soft_margin_loss")

# op -> bytes; those that are not here are as on the CPU.
GPU_TRANSIENTS: dict[str, Callable[[CallFacts], sympy.Expr]] = {
    "dcpc::attention_forward": _forward,
    "dcpc::attention_backward": _backward,
    "dcpc::attention_mask_backward": attention.mask_backward,
    "dcpc::ring_attention_forward": attention.ring_forward_bound,
    "dcpc::ring_attention_backward": _ring_backward,
    "aten::native_layer_norm_backward": _copies("grad_out", "input"),
    "aten::convolution": gpu_convolution,
    "aten::convolution_backward": gpu_convolution_backward,
    # Source: aten/src/ATen/native/cuda/layer_norm_kernel.cu (`_fused_rms_norm_cuda` and backward);
    # not modelled: of many narrow rows a 32nd of the input, for sums of the weight's gradient.
    "aten::_fused_rms_norm": _copies("input"),
    "aten::_fused_rms_norm_backward": _copies("grad_out", "input"),
    "aten::bmm": _batch("self", "mat2"),
    "aten::baddbmm": _batch("batch1", "batch2"),
    "aten::embedding_dense_backward": _embedding_backward,
    "aten::gelu_backward": lambda call: ZERO,  # TensorIterator takes strided operands
    "aten::mean": lambda call: ZERO,  # summed in registers, whatever the precision
    **{f"aten::{name}": loss(own=True, widened=False) for name in _LOSSES},
    **{f"aten::{name}": lambda call: ZERO for name in _IN_PLACE},
    "aten::binary_cross_entropy_with_logits": cross_entropy_with_logits(widened=False),
    "aten::scatter_reduce": scatter_mean,
    "aten::native_dropout": lambda call: ZERO,  # one kernel
}
