"""Transient memory of the CPU's losses, norms, sorts, indices, pads and transforms.

As in `transients.py`: bytes allocated while an op runs and freed before it returns, beyond its
outputs, measured with torch.profiler's allocator events (torch 2.13; float32, float64, bfloat16,
several sizes and layouts). `tests/symbolic_profile/ops/test_kernel_transients.py` has a line for
each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import sympy
import torch

from dcpc.symbolic_profile.ops.facts import CallFacts, TensorFacts, argument, op_name
from dcpc.symbolic_profile.polynomials import larger

ZERO = sympy.Integer(0)
INDEX_BYTES = 8  # of an element of int64
WIDE_BYTES = 4  # of an element of float32
SMALL_IMAGE = 128  # rows and columns


def copies(*names: str) -> Callable[[CallFacts], sympy.Expr]:
    """Returns the formula: a dense copy of each of these arguments that is not contiguous."""

    def formula(call: CallFacts) -> sympy.Expr:
        operands = (call.tensor(name) for name in names)
        return sympy.Add(*(t.size_bytes for t in operands if not t.contiguous()))

    return formula


def half(x: TensorFacts) -> bool:
    """Returns whether its elements are numbers in half precision."""
    return x.dtype.itemsize < WIDE_BYTES and x.dtype.is_floating_point


def loss(own: bool, widened: bool = True) -> Callable[[CallFacts], sympy.Expr]:
    """Returns the formula: the losses of all elements, and those in float32 that are averaged.

    Args:
        own: whether a reduced one has memory for them besides its result's.
        widened: whether a mean in half precision makes them in float32, as on a CPU.
    """

    def formula(call: CallFacts) -> sympy.Expr:
        x, reduction = call.tensor("self"), argument(call.node, "reduction", 1)
        if reduction == 0:
            return ZERO
        wide = WIDE_BYTES * x.numel if widened and reduction == 1 and half(x) else ZERO
        return wide + (x.size_bytes if own else ZERO)

    return formula


def cross_entropy_with_logits(widened: bool = True) -> Callable[[CallFacts], sympy.Expr]:
    """Returns the formula: the log-sigmoid, of a copy if the input is strided; then the losses."""

    def formula(call: CallFacts) -> sympy.Expr:
        each, weight = call.tensor("self").size_bytes, call.given("pos_weight")
        each += loss(own=True, widened=widened)(call)
        return each + copies("self")(call) + (ZERO if weight is None else weight.size_bytes)

    return formula


def _widened(call: CallFacts) -> sympy.Expr:
    """In half precision the result in float32, but where whole rows are gathered."""
    out, index = call.facts.of(call.node)[0], call.tensor("index")
    rows = argument(call.node, "dim") == 0 and all(s == 0 for s in index.strides[1:])
    gathered = op_name(call.node) == "aten::gather" and len(index.shape) > 1 and rows
    return WIDE_BYTES * out.numel if half(out) and not gathered else ZERO


def _gelu_backward(call: CallFacts) -> sympy.Expr:
    """Where oneDNN computes it: a copy of the gradient, and an output where it is strided.

    oneDNN takes a dense input, in no float64.
    """
    x, out = call.tensor("self"), call.facts.of(call.node)[0]
    if x.dtype.itemsize == 8 or not x.contiguous():
        return ZERO
    return copies("grad_output")(call) + (ZERO if out.contiguous() else out.size_bytes)


def _batch_norm_backward(call: CallFacts) -> sympy.Expr:
    """A gradient of the input more, where operands are dense alike."""
    x, grad = call.tensor("input"), call.tensor("grad_out")
    dense = any(like(x) and like(grad) for like in (TensorFacts.contiguous, _channels_last))
    return x.size_bytes if dense and argument(call.node, "output_mask")[0] else ZERO


def _by_value(call: CallFacts) -> sympy.Expr:
    """A copy of the values, and their numbers."""
    x = call.tensor("self")
    return x.size_bytes + x.numel * INDEX_BYTES


def _median(call: CallFacts) -> sympy.Expr:
    """A copy, but of rows that are dense."""
    x, dim = call.tensor("self"), argument(call.node, "dim")
    return ZERO if dim is not None and x.strides[dim] == 1 else x.size_bytes


def _numbered(
    shape: Callable[[CallFacts], Sequence[sympy.Expr]],
) -> Callable[[CallFacts], sympy.Expr]:
    """The numbers of the positions along one dim."""

    def formula(call: CallFacts) -> sympy.Expr:
        sizes = shape(call)
        dim = argument(call.node, "dim", -1)
        return sizes[dim] * INDEX_BYTES if sizes else ZERO

    return formula


def _own_shape(call: CallFacts) -> Sequence[sympy.Expr]:
    return call.tensor("self").shape


def _overlapping(call: CallFacts) -> Sequence[sympy.Expr]:
    """The shape that is cut into windows; of windows that do not overlap nothing is numbered."""
    if argument(call.node, "step") >= argument(call.node, "size"):
        return []
    return [call.facts.size(size) for size in argument(call.node, "input_sizes")]


def scatter_mean(call: CallFacts) -> sympy.Expr:
    """Returns, of a mean: ones like the source, how many each element got, and which got none."""
    if argument(call.node, "reduce") != "mean":
        return ZERO
    x, source = call.tensor("self"), call.tensor("src")
    return source.size_bytes + x.size_bytes + x.numel


def _scatter_reduce(call: CallFacts) -> sympy.Expr:
    """As `scatter_mean`; in half precision how many each got is counted in float32."""
    held, x = scatter_mean(call), call.tensor("self")
    return _widened(call) + (held - x.numel if held != 0 and half(x) else held)


def _index_mean(call: CallFacts) -> sympy.Expr:
    """As `scatter_mean`, but the ones are gone before the last."""
    if argument(call.node, "reduce") != "mean":
        return ZERO
    x, source = call.tensor("self"), call.tensor("source")
    return x.size_bytes + larger(source.size_bytes, x.numel)


def _masked_backward(call: CallFacts) -> sympy.Expr:
    """The selected gradients and zeros for the rest, as many as the values say: an upper bound.

    Several threads number the elements first. In half precision they are copied in float32.
    """
    grad, out = call.tensor("grad_output"), call.output_bytes
    if half(grad):
        out += WIDE_BYTES * grad.numel
    return out if call.threads == 1 else 2 * out + grad.numel * INDEX_BYTES


def _bags(call: CallFacts) -> sympy.Expr:
    """Of sums up to three numbers a bag, of maxima one."""
    offsets, weight = call.tensor("offsets"), call.tensor("weight")
    if argument(call.node, "mode", 0) == 2:
        return offsets.numel * INDEX_BYTES
    return offsets.numel * (2 * INDEX_BYTES + weight.dtype.itemsize)


def _bags_backward(call: CallFacts) -> sympy.Expr:
    """Returns a maximum's added rows and their indices, else an upper bound of sorted indices."""
    if argument(call.node, "mode") == 2:
        grad, where = call.tensor("grad"), call.tensor("maximum_indices")
        return grad.size_bytes + where.size_bytes + grad.shape[0] * INDEX_BYTES
    return call.tensor("indices").numel * (4 * INDEX_BYTES + 4)


def _distances(call: CallFacts) -> sympy.Expr:
    """Both operands beside their squares' sums and ones, whose product the distances are.

    Before it, the first times -2 beside what that becomes.
    """
    first, second = call.tensor("x1"), call.tensor("x2")
    sums = [x.size_bytes / x.shape[-1] for x in (first, second)]
    wide = [x.size_bytes + 2 * s for x, s in zip((first, second), sums, strict=True)]
    while_made = first.size_bytes + wide[0] + 2 * sympy.Add(*sums) - call.output_bytes
    return larger(while_made, sympy.Add(*wide))


def _trilinear(call: CallFacts) -> sympy.Expr:
    """Both products of one step of its loop over the dim `unroll_dim`.

    Source: `_trilinear` of torch's Linear.cpp, which multiplies the first two operands, sums what
    the third does not have, multiplies by the third and sums the rest.
    """
    shapes = []
    for number in "123":
        left = iter(call.tensor(f"i{number}").shape)
        own = argument(call.node, f"expand{number}")
        total = len(call.tensor(f"i{number}").shape) + len(own)
        shapes.append([sympy.Integer(1) if d in own else next(left) for d in range(total)])
    summed, third = argument(call.node, "sumdim"), argument(call.node, "expand3")
    gone = {argument(call.node, "unroll_dim", 1)}
    first, last = sympy.Integer(1), sympy.Integer(1)
    for d, sizes in enumerate(zip(*shapes, strict=True)):
        if d not in gone and not (d in summed and d in third):
            first *= next((s for s in sizes[:2] if s != 1), 1)
        if d not in gone and d not in summed:
            last *= next((s for s in sizes if s != 1), 1)
    return (first + last) * call.tensor("i1").dtype.itemsize


def _fft(call: CallFacts) -> sympy.Expr:
    """A copy of an operand whose other dims are not one as they lie.

    Source: `_exec_fft` of torch's mkl/SpectralOps.cpp.
    """
    x = call.tensor("self")
    others = _others(x, argument(call.node, "dim"))
    return x.size_bytes if x.nested(others) is None else ZERO


def _fft_to_real(call: CallFacts) -> sympy.Expr:
    """Over several dims first a complex one over all but the last, whose result may be copied."""
    x, (*first, last) = call.tensor("self"), argument(call.node, "dim")
    if not first:
        return _fft(call)
    others = _others(x, first)
    copied = x.size_bytes if x.nested(others) is None else ZERO
    order = [d for d in x.nested(range(len(x.shape))) or x.nested(others) or () if d in others]
    again = ZERO if order and order[-1] == last % len(x.shape) else x.size_bytes
    return x.size_bytes + larger(copied, again + call.output_bytes) - call.output_bytes


def _others(x: TensorFacts, dims: Sequence[int]) -> list[int]:
    taken = {d % len(x.shape) for d in dims}
    return [d for d in range(len(x.shape)) if d not in taken]


def _pool_backward(*names: str) -> Callable[[CallFacts], sympy.Expr]:
    """Returns the formula: copies of these and of the result that lie otherwise than the gradient.

    In one of the two layouts that there are kernels for: channels are the last dim, or are not.
    """

    def formula(call: CallFacts) -> sympy.Expr:
        grad, (out, *_) = call.tensor("grad_output"), call.facts.of(call.node)
        last = not grad.contiguous() and _channels_last(grad)
        rest = ZERO if last or grad.contiguous() else grad.size_bytes
        like = _channels_last if last else TensorFacts.contiguous
        others = (*map(call.tensor, names), out)
        return rest + sympy.Add(*(x.size_bytes for x in others if not like(x)))

    return formula


def _gradient_as_input(call: CallFacts) -> sympy.Expr:
    """A copy of a gradient whose channels are last where the input's are not, or the other way."""
    x, grad = call.tensor("self"), call.tensor("grad_output")
    last = not x.contiguous() and _channels_last(x)
    as_input = _channels_last(grad) if last else grad.contiguous()
    return ZERO if as_input else grad.size_bytes


def _rolled(call: CallFacts) -> sympy.Expr:
    """Returns the bytes of all rolls but the last, one for each dim."""
    return (len(argument(call.node, "shifts")) - 1) * call.tensor("self").size_bytes


def _channels_last(x: TensorFacts) -> bool:
    return x.contiguous((0, *range(2, len(x.shape)), 1))


def _unordered(*names: str) -> Callable[[CallFacts], sympy.Expr]:
    """Returns a formula: dense copies of inputs neither contiguous nor channels-last."""

    def formula(call: CallFacts) -> sympy.Expr:
        found = [call.tensor(name) for name in names]
        dense = [t.contiguous() or _channels_last(t) for t in found]
        return sympy.Add(*(t.size_bytes for t, d in zip(found, dense, strict=True) if not d))

    return formula


def _interpolated(taps: int) -> Callable[[CallFacts], sympy.Expr]:
    """A copy of a strided operand; for each position an index and a weight of each tap."""

    def formula(call: CallFacts) -> sympy.Expr:
        item_bytes = INDEX_BYTES + call.tensor("self").dtype.itemsize
        lengths = sympy.Add(*call.facts.of(call.node)[0].shape[2:])
        return _unordered("self")(call) + taps * item_bytes * lengths

    return formula


def _upsampled(call: CallFacts) -> sympy.Expr:
    """Of results of up to 128 rows and columns: both operands with their channels last.

    Source: `_use_vectorized_kernel_cond_2d` of torch's UpSampleKernel.cpp.
    """
    x, out = call.tensor("self"), call.facts.of(call.node)[0]
    if _channels_last(x):
        return ZERO
    small = sympy.Max(0, sympy.Min(1, SMALL_IMAGE + 1 - out.shape[-2] - out.shape[-1]))
    return small * (x.size_bytes + out.size_bytes)


def _antialiased(call: CallFacts) -> sympy.Expr:
    """The rows, which are resized first."""
    x, out = call.tensor("self"), call.facts.of(call.node)[0]
    return x.size_bytes / x.shape[-1] * out.shape[-1] + copies("self")(call)


def _windows(call: CallFacts) -> sympy.Expr:
    """Memory of the input's size that it does not use, and a copy of a strided one."""
    return call.tensor("self").size_bytes + copies("self")(call)


def _cumprod_backward(call: CallFacts) -> sympy.Expr:
    """Three tensors and a mask; where an element is 0 see `trace/canonical/scans.py`."""
    x = call.tensor("x")
    return 3 * x.size_bytes + x.numel


# `grad` or `grad_output`, as the release has it.
_DISTANCES_GRADIENT = torch.ops.aten._cdist_backward.default._schema.arguments[0].name
_grad = copies("grad_output")
_own = copies("self")

# op -> bytes allocated while it runs and freed before it returns.
KERNELS: Mapping[str, Callable[[CallFacts], sympy.Expr]] = {
    "aten::_adaptive_avg_pool2d_backward": _pool_backward(),
    "aten::_cdist_backward": copies(_DISTANCES_GRADIENT, "x1", "x2"),
    "aten::_cdist_forward": copies("x1", "x2"),
    "aten::_embedding_bag": _bags,
    "aten::_embedding_bag_backward": _bags_backward,
    "aten::_embedding_bag_per_sample_weights_backward": lambda call: (
        2 * call.tensor("indices").size_bytes
    ),
    "aten::_euclidean_dist": _distances,
    "aten::_fft_c2c": _fft,
    "aten::_fft_c2r": _fft_to_real,
    "aten::_fft_r2c": _fft,
    "aten::_trilinear": _trilinear,
    "aten::avg_pool2d": _unordered("self"),
    "aten::avg_pool2d_backward": _gradient_as_input,
    "aten::avg_pool3d": _own,
    "aten::avg_pool3d_backward": _grad,
    "aten::bucketize": _own,
    "aten::channel_shuffle": _unordered("self"),
    "aten::binary_cross_entropy": loss(own=False),
    "aten::binary_cross_entropy_with_logits": cross_entropy_with_logits(),
    "aten::col2im": _own,
    "aten::gelu_backward": _gelu_backward,
    "aten::gather": _widened,
    "aten::grid_sampler_2d_backward": _grad,
    "aten::huber_loss": loss(own=True),
    "aten::im2col": _windows,
    "aten::index_reduce": _index_mean,
    "aten::kthvalue": _by_value,
    "aten::log_sigmoid_forward": _own,
    "aten::masked_scatter_backward": _masked_backward,
    "aten::max_pool2d_with_indices": _unordered("self"),
    "aten::max_pool2d_with_indices_backward": _pool_backward("indices"),
    "aten::max_pool3d_with_indices_backward": _pool_backward("indices"),
    "aten::median": _median,
    "aten::nanmedian": _median,
    "aten::mse_loss": loss(own=True),
    "aten::native_batch_norm_backward": _batch_norm_backward,
    "aten::nll_loss2d_backward": copies("target"),
    "aten::nll_loss2d_forward": copies("self", "target"),
    "aten::pixel_shuffle": _unordered("self"),
    "aten::pixel_unshuffle": _unordered("self"),
    "aten::reflection_pad1d": _own,
    "aten::reflection_pad1d_backward": _grad,
    "aten::reflection_pad2d_backward": _gradient_as_input,
    "aten::reflection_pad3d_backward": _gradient_as_input,
    "aten::replication_pad1d": _own,
    "aten::replication_pad1d_backward": _grad,
    "aten::replication_pad2d_backward": _gradient_as_input,
    "aten::replication_pad3d_backward": _gradient_as_input,
    "aten::roll": _rolled,
    "aten::scatter": _widened,
    "aten::scatter_add": _widened,
    "aten::scatter_reduce": _scatter_reduce,
    "aten::searchsorted": copies("sorted_sequence", "self"),
    "aten::smooth_l1_loss": loss(own=True),
    "aten::soft_margin_loss": loss(own=False),
    "aten::soft_margin_loss_backward": lambda call: 2 * call.tensor("self").size_bytes,
    "aten::sort": _numbered(_own_shape),
    "aten::unfold_backward": _numbered(_overlapping),
    "aten::_upsample_bicubic2d_aa": _antialiased,
    "aten::_upsample_bilinear2d_aa": _antialiased,
    "aten::_upsample_nearest_exact2d": _upsampled,
    "aten::upsample_bilinear2d": _upsampled,
    "aten::upsample_nearest2d": _upsampled,
    "aten::upsample_bicubic2d_backward": _grad,
    "aten::upsample_linear1d": _interpolated(2),
    "aten::upsample_linear1d_backward": _grad,
    "aten::upsample_nearest1d": _interpolated(1),
    "aten::upsample_nearest1d_backward": _grad,
    "aten::_upsample_nearest_exact1d_backward": _grad,
    "dcpc::ctc_loss_backward": lambda call: call.tensor("log_alpha").size_bytes,
    "dcpc::ctc_loss_forward": lambda call: call.facts.of(call.node)[1].size_bytes,
    "dcpc::cumprod_backward": _cumprod_backward,
}
