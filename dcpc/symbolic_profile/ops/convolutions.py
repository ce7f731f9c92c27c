"""Transient memory of a convolution, by torch's own kernel or by oneDNN.

Torch's own kernel multiplies the windows of its input, side by side: exact to the byte. It computes
float64, float32 of small inputs, and half precision where the processor has no instructions for it
(oneDNN is asked once). oneDNN has an upper bound for all x86 processors (`onednn.py`).
"""

from __future__ import annotations

import sympy
import torch
from torch.utils._sympy.functions import CeilDiv

from dcpc.symbolic_profile.ops.facts import CallFacts, TensorFacts, argument
from dcpc.symbolic_profile.ops.kernel_transients import copies, half
from dcpc.symbolic_profile.ops.onednn import ConvolutionBytes, multiplies
from dcpc.symbolic_profile.polynomials import larger

CHANNELS = 16  # of a block of a GPU's layouts
SMALL_INPUT = 20480  # elements, of the first four dims
PARTIAL_SCRATCH = 1 << 15  # bytes


def convolution(call: CallFacts) -> sympy.Expr:
    """Returns columns, or the bound of oneDNN; copies of an input that is not contiguous."""
    x, out = call.tensor("input"), call.facts.of(call.node)[0]
    bias = int(call.given("bias") is not None)
    onednn = _onednn(call, out, bias, grads=0)
    return _by_dtype(call, onednn, _forward_columns(call, x, out)) + _relaid(call, "input")


def convolution_backward(call: CallFacts) -> sympy.Expr:
    """Returns columns, or the bound of oneDNN; copies of operands that are not contiguous.

    oneDNN makes the gradients of weight and bias together.
    """
    x, grad = call.tensor("input"), call.tensor("grad_output")
    of_input, *of_weight = argument(call.node, "output_mask")
    onednn = _onednn(call, grad, int(of_weight[1]), grads=int(of_input) + 2 * any(of_weight))
    slow = _backward_columns(call, x, grad)
    return _by_dtype(call, onednn, slow) + _relaid(call, "grad_output", "input")


def gpu_convolution(call: CallFacts) -> sympy.Expr:
    """Returns the bytes of cuDNN as if it copied output, input and weight to another layout."""
    x, out = call.tensor("input"), call.facts.of(call.node)[0]
    times = 2 if argument(call.node, "transposed") else 1
    copied = times * _blocked(out) + _blocked(x) + _blocked_weights(call)
    slow = _forward_columns(call, x, out)
    return _of_either(call, copied, slow, half(x)) + copies("input")(call)


def gpu_convolution_backward(call: CallFacts) -> sympy.Expr:
    """Returns the same for backward; the input's gradient may be added up in float32."""
    x, grad = call.tensor("input"), call.tensor("grad_output")
    copied = 2 * _blocked(grad) + (2 if half(x) else 1) * _blocked(x) + _blocked_weights(call)
    slow = _backward_columns(call, x, grad)
    return _of_either(call, copied, slow, half(x)) + copies("grad_output", "input")(call)


def _onednn(call: CallFacts, out: TensorFacts, bias: int, grads: int) -> sympy.Expr:
    """Returns the bound of oneDNN, at given sizes."""
    node, x, weight = call.node, call.tensor("input"), call.tensor("weight")
    groups = call.facts.size(argument(node, "groups"))
    numbers = (argument(node, name) for name in ("stride", "padding", "dilation"))
    dims = len(x.shape) - 2
    found = (
        x.dtype.itemsize,
        call.threads,
        int(argument(node, "transposed")),
        bias,
        grads,
        x.shape[0],
        groups,
        x.shape[1] / groups,
        *x.shape[2:],
        out.shape[1] / groups,
        *out.shape[2:],
        *weight.shape[2:],
        *(call.facts.size(n) for each in numbers for n in (each * dims)[:dims]),
    )
    return ConvolutionBytes(*map(sympy.sympify, found))


def _relaid(call: CallFacts, *names: str) -> sympy.Expr:
    """Copies of operands: all lie with their channels last if input or weight do, or densely."""
    operands = [call.tensor(name) for name in (*names, "weight")]
    order = (0, *range(2, len(operands[0].shape)), 1)
    last = any(
        not x.contiguous() and x.contiguous(order) for x in map(call.tensor, ("input", "weight"))
    )
    wanted = order if last else None
    return sympy.Add(*(x.size_bytes for x in operands if not x.contiguous(wanted)))


def _forward_columns(call: CallFacts, x: TensorFacts, out: TensorFacts) -> sympy.Expr:
    if _in_volumes(call):
        return _columns(call, out) * argument(call.node, "groups")
    return _each_group(call, _columns(call, out, every=True) + _groups_copied(call, x))


def _backward_columns(call: CallFacts, x: TensorFacts, grad: TensorFacts) -> sympy.Expr:
    if _in_volumes(call):
        return _columns(call, grad) * argument(call.node, "groups")
    return _each_group(call, _columns(call, grad) + _groups_copied(call, x, grad))


def _by_dtype(call: CallFacts, onednn: sympy.Expr, slow: sympy.Expr) -> sympy.Expr:
    """Returns the transient bytes of this processor's kernel for the dtype."""
    return _of_either(call, onednn, slow, multiplies(call.tensor("input").dtype))


def _blocked(x: TensorFacts) -> sympy.Expr:
    """Returns the bytes of a tensor in whole blocks of channels."""
    channels = x.shape[1]
    return x.size_bytes / channels * (CHANNELS * CeilDiv(channels, CHANNELS))


def _blocked_weights(call: CallFacts) -> sympy.Expr:
    """Four times the weight in whole blocks, and scratch where they are not full."""
    weight = call.tensor("weight")
    rows, columns = (CHANNELS * CeilDiv(size, CHANNELS) for size in weight.shape[:2])
    window = weight.size_bytes / (weight.shape[0] * weight.shape[1])
    full = (rows, columns) == tuple(weight.shape[:2])
    return 4 * rows * columns * window + (0 if full else PARTIAL_SCRATCH)


def _groups_copied(call: CallFacts, *operands: TensorFacts) -> sympy.Expr:
    """Torch's own kernel computes groups one by one, of copies of their channels."""
    groups = argument(call.node, "groups")
    if groups == 1:
        return sympy.Integer(0)
    parts = groups if isinstance(groups, int) else 1
    return sympy.Add(*(x.size_bytes / parts for x in operands))


def _each_group(call: CallFacts, one: sympy.Expr) -> sympy.Expr:
    """Returns the bytes of one group, or of all groups' results beside their concatenation."""
    return one if argument(call.node, "groups") == 1 else larger(one, call.output_bytes)


def _dilated(call: CallFacts) -> bool:
    return any(d != 1 for d in argument(call.node, "dilation"))


def _in_volumes(call: CallFacts) -> bool:
    """Whether torch's own kernel is that of three spatial dims, which computes groups together."""
    transposed = argument(call.node, "transposed")
    return len(call.tensor("input").shape) == 5 and not transposed and not _dilated(call)


def _columns(call: CallFacts, out: TensorFacts, every: bool = False) -> sympy.Expr:
    """Returns the bytes of the input's windows, side by side, that torch's own kernel multiplies.

    None where a window is one element, but for a dilated convolution, which has one sample's of
    any window, and for a transposed one, which has all samples' forward and one's backward.

    Args:
        call: convolution, or its backward.
        out: output, or its gradient.
        every: whether a transposed one has those of all samples.
    """
    x, weight = call.tensor("input"), call.tensor("weight")
    one = all(size == 1 for size in weight.shape[2:])
    strides, pads = (argument(call.node, name) for name in ("stride", "padding"))
    plain = one and all(s == 1 for s in strides) and all(p == 0 for p in pads)
    transposed = argument(call.node, "transposed")
    if plain and not _dilated(call) and not (transposed and every):
        return sympy.Integer(0)
    window = weight.numel / weight.shape[0] * x.dtype.itemsize
    if transposed:
        return x.numel / (x.shape[1] * (1 if every else x.shape[0])) * window
    samples = out.shape[0] if _dilated(call) else 1
    return out.numel / (samples * out.shape[1]) * window


def _of_either(call: CallFacts, library: sympy.Expr, slow: sympy.Expr, halves: bool) -> sympy.Expr:
    """Returns the bytes of oneDNN in half precision, of the larger kernel in float32.

    In float32 torch's own kernel computes windows of several elements only of small inputs; which
    one computes windows of one depends on threads and samples.

    Source: `ConvParams::use_mkldnn` of torch's Convolution.cpp.
    """
    x, weight = call.tensor("input"), call.tensor("weight")
    if x.dtype != torch.float32:
        return library if halves else slow
    if not argument(call.node, "transposed") and any(size != 1 for size in weight.shape[2:]):
        slow *= sympy.Max(0, sympy.Min(1, SMALL_INPUT + 1 - sympy.Mul(*x.shape[:4])))
    return larger(library, slow)
