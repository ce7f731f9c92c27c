"""Kinds of ops that look at neighbouring positions: convolution, pooling, interpolation.

Where a window is as long as its step (a patch embedding), a dim is (windows, position in the
window) and its windows are free. A convolution may get rows of neighbours (`RowWindow`). Else
spatial dims stay whole.
"""

from __future__ import annotations

from dataclasses import replace

import sympy

from dcpc.passes.sharding.factors import quotient
from dcpc.passes.sharding.op_kinds.op_call import NameSizes, OpCall, members, own
from dcpc.passes.sharding.rule_types import Names, OpSharding, RowWindow

Dims = list[tuple[str, ...]]


def _spatial(
    call: OpCall, kernel: list[sympy.Expr], stride: list[int], plain: list[bool]
) -> tuple[Dims, Dims, NameSizes, set[str]]:
    """Names of the input's and the output's spatial dims.

    Args:
        call: the call; its last len(kernel) dims are spatial.
        kernel: window in each of them.
        stride: step in each of them.
        plain: whether a dim has neither padding nor dilation.
    """
    count = len(kernel)
    before: Dims = []
    after: Dims = []
    sizes: NameSizes = {}
    whole: set[str] = set()
    shapes = zip(call.input_shape[-count:], call.output.shape[-count:], strict=True)
    for d, (size, out) in enumerate(shapes):
        is_patch = plain[d] and kernel[d] == stride[d] != 1
        windows = quotient(size, kernel[d]) if is_patch else None
        if windows is not None:
            names = {f"w{d}": windows, f"k{d}": sympy.sympify(kernel[d])}
            whole.add(f"k{d}")
            before.append(tuple(n for n, s in names.items() if s != 1))
            after.append(tuple(n for n in (f"w{d}",) if windows != 1))
        else:
            names = {f"in{d}": size, f"out{d}": out}
            whole |= names.keys()
            before.append((f"in{d}",) if size != 1 else ())
            after.append((f"out{d}",) if out != 1 else ())
        sizes |= {n: s for n, s in names.items() if s != 1}
    return before, after, sizes, whole & sizes.keys()


def convolution(call: OpCall) -> OpSharding:
    """Batch and output channels are free, input channels are summed over.

    With groups, an output channel is (group, channel in it) and both are free: a rank that has some
    of the groups is told how many (`codegen/lower/local_ops.py`).
    """
    weight = call.operands[1].shape
    count = len(weight) - 2
    if call.args.get("transposed") or call.op.startswith("conv_transpose"):
        return _transposed(call, count)
    padding = call.args["padding"]
    pads = [0] * count if padding == "valid" else [1] * count
    if not isinstance(padding, str):
        pads = call.numbers("padding", count)
    dilation = call.numbers("dilation", count)
    plain = [p == 0 and d == 1 for p, d in zip(pads, dilation, strict=True)]
    kernel, stride = list(weight[2:]), call.numbers("stride", count)
    before, after, sizes, whole = _spatial(call, kernel, stride, plain)
    windows: dict[str, RowWindow] = {}
    for d, names in enumerate(after if not isinstance(padding, str) else ()):
        if names != (f"out{d}",) or before[d] != (f"in{d}",) or not kernel[d].is_Integer:
            continue
        reach = (int(kernel[d]) - 1) * dilation[d] + 1
        if stride[d] == 1 and sizes[f"in{d}"] == sizes[f"out{d}"]:  # pieces of both are alike
            before[d] = after[d] = (f"same{d}",)
            sizes[f"same{d}"] = sizes.pop(f"in{d}")
            del sizes[f"out{d}"]
            whole = (whole - {f"in{d}", f"out{d}"}) | {f"same{d}"}
        (read,), (made,) = before[d], after[d]
        windows[made] = RowWindow(read, stride[d], reach, pads[d])
    inside: Dims = []
    for d, size in enumerate(kernel):
        # In a patch the window is the input's own factor; else it is a dim of its own.
        name = f"k{d}" if any(f"w{d}" in x or f"k{d}" in x for x in before) else f"kernel{d}"
        inside.append((name,) if size != 1 else ())
        sizes |= {name: size} if size != 1 else {}
        whole |= {*inside[-1]}
    return replace(_with_channels(call, (before, after, inside), sizes, whole), windows=windows)


def _with_channels(
    call: OpCall, spatial: tuple[Dims, Dims, Dims], sizes: NameSizes, whole: set[str]
) -> OpSharding:
    before, after, inside = spatial
    weight, groups = call.operands[1].shape, call.integer("groups")
    unbatched = len(call.input_shape) == len(weight) - 1
    biased = len(call.operands) > 2
    free = {"g": groups, "o": sympy.cancel(weight[0] / groups), "c": weight[1]}
    free |= {} if unbatched else {"n": call.input_shape[0]}
    sizes = sizes | {n: s for n, s in free.items() if s != 1}

    def known(*names: str) -> tuple[str, ...]:
        return tuple(n for n in names if n in sizes)

    batch = () if unbatched else (known("n"),)
    channels = known("g", "o")
    operands: list[Names] = [
        (*batch, known("g", "c"), *before),
        (channels, known("c"), *inside),
    ]
    operands += [(channels,)] if biased else []
    alone = groups == 1 and not biased
    whole |= set() if alone else {"c"}
    return OpSharding(
        tuple(operands), (*batch, channels, *after), sizes,
        whole=frozenset(whole & sizes.keys()),
        summed=frozenset({"c"} & sizes.keys()) if alone else frozenset(),
        linear="none" if biased else "one", multiplies=True,
        nonempty=frozenset(sizes.keys() - {"n"}),
    )  # fmt: skip


def _transposed(call: OpCall, count: int) -> OpSharding:
    weight = call.operands[1].shape
    if call.args["groups"] != 1 or len(call.input_shape) != len(weight):
        raise NotImplementedError("a transposed convolution with groups or without a batch")
    sizes: NameSizes = {"n": call.input_shape[0], "c": weight[0], "o": weight[1]}
    for d in range(count):
        sizes |= {f"in{d}": call.input_shape[2 + d], f"out{d}": call.output.shape[2 + d]}
        sizes |= {f"kernel{d}": weight[2 + d]}
    sizes = {n: s for n, s in sizes.items() if s != 1}

    def known(*names: str) -> Names:
        return tuple((n,) if n in sizes else () for n in names)

    def space(prefix: str) -> list[str]:
        return [f"{prefix}{d}" for d in range(count)]

    biased = len(call.operands) > 2
    operands = [known("n", "c", *space("in")), known("c", "o", *space("kernel"))]
    operands += [known("o")] if biased else []
    summed = set() if biased else {"c"} & sizes.keys()
    free = {"n", "o"} | summed
    return OpSharding(
        tuple(operands), known("n", "o", *space("out")), sizes,
        whole=frozenset(sizes.keys() - free), summed=frozenset(summed),
        linear="none" if biased else "one", multiplies=True,
        nonempty=frozenset(sizes.keys() - {"n"}),
    )  # fmt: skip


def pooling(call: OpCall) -> OpSharding:
    """Windows of each channel: batch and channels are free."""
    count = next(int(c) for c in call.op if c.isdigit())
    positions = "max" in call.op and ("indices" in call.op or call.op.startswith("adaptive"))
    if positions or "adaptive" in call.op:  # an index counts positions of the whole plane
        kernel, stride, plain = [sympy.Integer(0)] * count, [1] * count, [False] * count
    else:
        kernel = [sympy.Integer(k) for k in call.numbers("kernel_size", count)]
        same = call.args["stride"] in (None, [], ())
        stride = [int(k) for k in kernel] if same else call.numbers("stride", count)
        pads = call.numbers("padding", count)
        dilation = call.numbers("dilation", count) if "dilation" in call.args else [1] * count
        plain = [p == 0 and d == 1 for p, d in zip(pads, dilation, strict=True)]
    before, after, sizes, whole = _spatial(call, kernel, stride, plain)
    return _leading(call, count, (before, after), sizes, whole)


def _leading(
    call: OpCall, count: int, spatial: tuple[Dims, Dims], sizes: NameSizes, whole: set[str]
) -> OpSharding:
    """Every dim before the spatial ones is free; only the batch may be empty on a rank."""
    lead, more = own(call.input_shape[:-count])
    batched = len(lead) > 1
    return OpSharding(
        ((*lead, *spatial[0]),), (*lead, *spatial[1]), sizes | more, whole=frozenset(whole),
        linear=call.linear if call.output.dtype.is_floating_point else "none",  # a mean is rounded
        nonempty=frozenset((sizes.keys() | more.keys()) - (set(lead[0]) if batched else set())),
    )  # fmt: skip


def upsample(call: OpCall) -> OpSharding:
    """Interpolation of the spatial dims, which stay whole; batch and channels are free."""
    count = len(call.input_shape) - 2
    before, sizes = own(call.input_shape[2:], "in")
    after, more = own(call.output.shape[2:], "out")
    whole = members((*before, *after))
    return _leading(call, count, (list(before), list(after)), sizes | more, whole)


def grid_sample(call: OpCall) -> OpSharding:
    """Values at given positions: batch and channels are free, and so are the positions."""
    image, grid = (o.shape for o in call.operands)
    output, sizes = own(call.output.shape)
    inside, more = own(image[2:], "in")
    last = ("xy",)
    sizes |= more | {"xy": grid[-1]}
    operands = ((*output[:2], *inside), (output[0], *output[2:], last))
    free = members(output[:1])
    return OpSharding(
        operands, output, sizes, whole=frozenset({*more, *last}),
        nonempty=frozenset(sizes.keys() - free),
    )  # fmt: skip


def im2col(call: OpCall) -> OpSharding:
    """Windows as columns: only the batch is free."""
    operand, sizes = own(call.input_shape)
    output, more = own(call.output.shape, "out")
    batched = len(operand) == 4
    out = (operand[0], *output[1:]) if batched else output
    sizes = sizes | {n: s for n, s in more.items() if n in members(out)}
    free = set(operand[0]) if batched else set()
    return OpSharding((operand,), out, sizes, whole=frozenset(sizes.keys() - free), linear="first")
