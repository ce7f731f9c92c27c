"""Transient memory of ops on a GPU, where it differs from the CPU's.

Read in the kernels' sources, not measured: the tests have no GPU; `make gpu` compares.
`dcpc.ops.attention` names the kernel of each attention (`gpu_kernel`). The caching allocator's
blocks are those of `allocator.py`. Not modelled: workspaces of cuBLAS (a constant: 32 MiB on
Hopper, 8 MiB before), of cuDNN's convolutions (its choice; copies of all operands stand for it),
and of sums over a whole tensor (small).
"""

from __future__ import annotations

from collections.abc import Callable

import sympy
from torch.utils._sympy.functions import CeilDiv

from dcpc.ops.attention import OnGpu, gpu_kernel, kernel_name
from dcpc.symbolic_profile.ops import attention
from dcpc.symbolic_profile.ops.convolutions import gpu_convolution, gpu_convolution_backward
from dcpc.symbolic_profile.ops.facts import CallFacts, argument
from dcpc.symbolic_profile.ops.kernel_transients import (
    copies,
    cross_entropy_with_logits,
    loss,
    scatter_mean,
)

ZERO = sympy.Integer(0)
ROWS = 128  # flash attention rounds queries up to a multiple of this
EFFICIENT_ROWS = 32  # and the efficient kernel its logsumexp


def _kernel(call: CallFacts) -> str:
    """Returns the kernel of an attention on a GPU: "blocks", or a fused one's name."""
    query, value, mask = call.tensor("query"), call.tensor("value"), call.given("mask")
    width, sight = query.shape[3], attention.sight_of(call)
    name = kernel_name(
        "cuda",
        width == value.shape[3],
        None if mask is None else mask.dtype,
        call.given("keep") is not None,
        sight,
        call.given("segment") is not None,
    )
    if name != "cuda" or not width.is_Integer:
        return "blocks"
    assert call.gpu is not None, "a GPU is planned for"
    return gpu_kernel(OnGpu(query.dtype, int(width), sight, call.gpu))


def _in_parts(call: CallFacts) -> bool:
    return call.given("segment") is not None or argument(call.node, "turn") is not None


def _forward(call: CallFacts) -> sympy.Expr:
    """A copy of the output, unless queries lie (b, s, h, d) as the kernel's output does.

    In parts as on the CPU, which is an upper bound.
    """
    name = _kernel(call)
    if name == "blocks":
        return attention.blocks(call)
    query, groups = call.tensor("query"), attention.groups_of(call)
    made = ZERO
    if name == "efficient":
        made = _rounded(call) / groups
    if _in_parts(call):
        return attention.forward_bound(call) + made
    if name == "efficient" and groups != 1:
        return query.size_bytes / groups + made  # what a call gives, until it is copied
    return made + (ZERO if query.contiguous(attention.BSHD) else query.size_bytes)


def _rounded(call: CallFacts) -> sympy.Expr:
    """Bytes of the efficient kernel's logsumexp."""
    batch, heads, rows, _ = call.tensor("query").shape
    return 4 * batch * heads * EFFICIENT_ROWS * CeilDiv(rows, EFFICIENT_ROWS)


def _own(call: CallFacts) -> sympy.Expr:
    """Returns the bytes that a fused kernel's backward holds besides its results."""
    if _kernel(call) == "flash":
        return _accumulators(call)
    return _efficient_accumulators(call)


def _efficient_accumulators(call: CallFacts) -> sympy.Expr:
    """Logsumexp and a number a row, rounded up; in half precision gradients in float32.

    Of shared keys a call's gradients, and the sums in float32. Source: torch's
    mem_eff_attention/kernel_backward.h (`workspace_size`, an upper bound) and attention_backward.cu
    (`delta`).
    """
    tensors = [call.tensor(name) for name in ("query", "key", "value")]
    groups = attention.groups_of(call)
    held = 2 * _rounded(call) / groups
    query, *of_keys = tensors
    own = [sympy.sympify(query.numel) / groups, *(x.numel for x in of_keys)]
    if query.dtype.itemsize < 4:
        held += 4 * sympy.Add(*own)
    if groups != 1:
        held += query.dtype.itemsize * sympy.Add(*own)
        held += 4 * sympy.Add(*own[1:]) if query.dtype.itemsize < 4 else ZERO
    return held


def _accumulators(call: CallFacts) -> sympy.Expr:
    """The queries' gradient and a number a row in float32, rounded up; each query head's dk and dv.

    Source: flash-attention, csrc/flash_attn/flash_api.cpp, mha_bwd (dq_accum, softmax_d,
    dk_expanded, dv_expanded), of which torch has a copy.
    """
    query, key, value = (call.tensor(name) for name in ("query", "key", "value"))
    batch, heads, rows, width = query.shape
    rounded = ROWS * CeilDiv(rows, ROWS)
    wide = 256 if width > 192 else 32 * (-(-int(width) // 32))
    held = batch * heads * rounded * (wide + 1) * 4
    groups = sympy.sympify(heads) / key.shape[1]
    return held if groups == 1 else held + groups * (key.size_bytes + value.size_bytes)


def _backward(call: CallFacts) -> sympy.Expr:
    if _kernel(call) == "blocks":
        return attention.blocks_backward(call)
    held = _own(call)
    return held + attention.backward_bound(call) if _in_parts(call) else held


def _ring_backward(call: CallFacts) -> sympy.Expr:
    """As on the CPU, and the kernel's own: an upper bound."""
    held = attention.ring_backward_bound(call)
    return held if _kernel(call) == "blocks" else held + _own(call)


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
    return copies("grad_output")(call) + 4 * grad.numel + 4 * 8 * indices.numel


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
    "aten::native_layer_norm_backward": copies("grad_out", "input"),
    "aten::convolution": gpu_convolution,
    "aten::convolution_backward": gpu_convolution_backward,
    # Source: aten/src/ATen/native/cuda/layer_norm_kernel.cu (`_fused_rms_norm_cuda` and backward);
    # not modelled: of many narrow rows a 32nd of the input, for sums of the weight's gradient.
    "aten::_fused_rms_norm": copies("input"),
    "aten::_fused_rms_norm_backward": copies("grad_out", "input"),
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
