"""Lowers ops that read neighbouring positions of a split dim: windows and norms.

A convolution gets the rows that its windows cover (`dcpc::halo`), with zeros at both ends, and has
no padding along that dim. A padded dim gets the rows of its new piece. A norm in groups adds up the
sums of all ranks' pieces.
"""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch import fx

from dcpc.codegen.collectives.halo import HaloCall
from dcpc.codegen.lower.local_graph import LocalGraph
from dcpc.ir import Factor, tensor_operands

aten = torch.ops.aten


def local_convolution(on: LocalGraph, node: fx.Node, operands: list[fx.Node]) -> fx.Node | None:
    """Returns a rank's piece of a convolution along positions; None for other splits."""
    label = on.label(node)
    weight = on.program.info[tensor_operands(node, on.program.info)[1].name].shape
    count = len(weight) - 2
    d = label.dim - (len(on.program.info[node.name].shape) - count)
    if not on.placement.nodes[node.name].name.startswith(("out", "same")):
        return None
    source = tensor_operands(node, on.program.info)[0]
    kept, read = on.factor(node.name, label), on.factor(source.name, _wanted(on, node))
    if on.placement.is_zigzag(kept) or on.placement.is_zigzag(read):
        return _in_whole(on, node, label.dim, kept)
    padding, stride, dilation = (
        _numbers(node, n, count) for n in ("padding", "stride", "dilation")
    )
    reach = (int(weight[2 + d]) - 1) * dilation[d] + 1
    reach = max(reach, stride[d])  # as many rows as the windows of no position have, and not less
    rows = (on.integers.length(kept) - 1) * stride[d] + reach
    if reach > 1 or padding[d] or read != kept:  # else a row of x is one of the result
        window = (stride[d], reach, padding[d], rows)
        operands[0] = _halo(on, operands[0], (label.dim, read, kept), window)
    copied = on.copy(node, operands)
    padding[d] = 0
    names = [a.name for a in copied.target._schema.arguments]  # type: ignore[union-attr]
    at = names.index("padding")
    if at < len(copied.args):
        copied.args = (*copied.args[:at], padding, *copied.args[at + 1 :])
    else:
        copied.kwargs = {**copied.kwargs, "padding": padding}
    return copied


def local_pad(on: LocalGraph, node: fx.Node, operands: list[fx.Node]) -> fx.Node | None:
    """Returns a rank's piece of a padded dim; None if another dim is split."""
    label = on.label(node)
    if not on.placement.nodes[node.name].name.startswith("pad"):
        return None
    source = tensor_operands(node, on.program.info)[0]
    kept, read = on.factor(node.name, label), on.factor(source.name, _wanted(on, node))
    if on.placement.is_zigzag(kept) or on.placement.is_zigzag(read):
        return _in_whole(on, node, label.dim, kept)
    copied = on.copy(node, operands)
    amounts = list(copied.args[1])  # type: ignore[arg-type]
    on.graph.erase_node(copied)
    at = 2 * (len(on.program.info[node.name].shape) - 1 - label.dim)
    front, amounts[at], amounts[at + 1] = amounts[at], 0, 0
    rows = on.integers.length(kept)
    found = _halo(on, operands[0], (label.dim, read, kept), (1, 1, front, rows))
    if all(isinstance(a, int) and a == 0 for a in amounts):
        return found
    return on.graph.call_function(aten.constant_pad_nd.default, (found, amounts))


def local_group_norm(on: LocalGraph, node: fx.Node, operands: list[fx.Node]) -> fx.Node | None:
    """Returns a norm over pieces of the positions; None if samples or groups are split.

    Means and variances are all-reduced sums, in float32 or better.
    """
    label, info = on.label(node), on.program.info[node.name]
    if not label.sharded or label.dim < 2:
        return None
    copied = on.copy(node, operands)
    names = [a.name for a in aten.group_norm.default._schema.arguments]
    given: dict[str, Any] = {**dict(zip(names, copied.args, strict=False)), **copied.kwargs}
    on.graph.erase_node(copied)
    groups, call, emit = given["num_groups"], on.graph.call_function, on.integers.emit
    shape = on.shape(node.name, label)
    half = info.dtype.itemsize < 4
    x = operands[0]
    if half:
        x = call(aten._to_copy.default, (x,), {"dtype": torch.float32})
    count = emit(sympy.Mul(*info.shape[1:]) / groups)
    # Only the channels are split: for an empty piece torch cannot infer the strides of more dims.
    x = on.reshape(x, [shape[0], groups, emit(info.shape[1] / groups), *shape[2:]])

    def mean(y: fx.Node) -> fx.Node:
        added = call(aten.sum.dim_IntList, (y, [*range(2, len(shape) + 1)], True))
        added = call(torch.ops.dcpc.all_reduce.default, (added, on.group))
        return call(aten.div.Tensor, (added, count))

    x = call(aten.sub.Tensor, (x, mean(x)))
    variance = mean(call(aten.mul.Tensor, (x, x)))
    scale = call(aten.rsqrt.default, (call(aten.add.Tensor, (variance, given.get("eps", 1e-5))),))
    x = on.reshape(call(aten.mul.Tensor, (x, scale)), shape)
    for name, op in (("weight", aten.mul.Tensor), ("bias", aten.add.Tensor)):
        learnt = given.get(name)
        if isinstance(learnt, fx.Node):
            x = call(op, (x, on.reshape(learnt, [shape[1], *[1] * (len(shape) - 2)])))
    return call(aten._to_copy.default, (x,), {"dtype": info.dtype}) if half else x


def _wanted(on: LocalGraph, node: fx.Node) -> Any:
    return on.placement.nodes[node.name].operands[0]


def _halo(
    on: LocalGraph, x: fx.Node, where: tuple[int, Factor, Factor], window: tuple[Any, ...]
) -> fx.Node:
    """Emits the rows of a dim for windows of (stride, reach, before, number of rows)."""
    (dim, read, kept), (stride, reach, before, rows) = where, window
    emit: Any = on.integers.emit  # gives a number, or a node where sizes vary
    parents = [emit(on.integers.parent(factor)) for factor in (read, kept)]
    call = HaloCall(
        dim, emit(read.size), parents[0], read.shift, emit(kept.size), parents[1], kept.shift,
        stride, reach, before, emit(rows), on.group,
    )  # fmt: skip
    return on.graph.call_function(torch.ops.dcpc.halo.default, (x, *call))


def _in_whole(on: LocalGraph, node: fx.Node, dim: int, kept: Factor) -> fx.Node:
    """Computes the whole op on each rank and narrows it: a zigzag piece has no single window."""
    return on.narrowed(on.copy(node, None), dim, kept)


def _numbers(node: fx.Node, name: str, count: int) -> list[int]:
    names = [a.name for a in node.target._schema.arguments]  # type: ignore[union-attr]
    at = names.index(name)
    value: Any = node.args[at] if at < len(node.args) else node.kwargs.get(name)
    if value is None:
        value = 0 if name == "padding" else 1
    values = list(value) if isinstance(value, (list, tuple)) else [value]
    return [int(v) for v in values] * (count if len(values) == 1 else 1)
