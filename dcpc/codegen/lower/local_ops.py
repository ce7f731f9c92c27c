"""Lowers calls that differ on a rank's pieces: shapes, positions, random numbers, groups."""

from __future__ import annotations

import sympy
import torch
from torch import fx

import dcpc.ops.attention  # registers the op
import dcpc.ops.random  # noqa: F401 - as these two do
from dcpc.codegen.lower.local_attention import local_attention
from dcpc.codegen.lower.local_graph import LocalGraph
from dcpc.codegen.lower.local_windows import local_convolution, local_group_norm, local_pad
from dcpc.ir import REPLICATED

aten = torch.ops.aten


def _resize(on: LocalGraph, node: fx.Node, operands: list[fx.Node]) -> fx.Node:
    """Lowers reshape and expand: the size argument becomes the local shape."""
    assert callable(node.target)
    shape = on.shape(node.name, on.label(node))
    return on.graph.call_function(node.target, (operands[0], shape), dict(node.kwargs))


def _fill(on: LocalGraph, node: fx.Node, operands: list[fx.Node]) -> fx.Node:
    """Lowers full, zeros, new_ones and the like: the size argument becomes the local shape."""
    shape = on.shape(node.name, on.label(node))  # its nodes go before the call that takes them
    copied = on.copy(node, operands)
    position = 1 if operands else 0
    args = list(copied.args)
    args[position] = shape
    copied.args = tuple(args)
    return copied


def _arange(on: LocalGraph, node: fx.Node, operands: list[fx.Node]) -> fx.Node | None:
    """Lowers positions: returns this rank's piece of them, along the factor that is split."""
    label = on.label(node)
    if not label.sharded:
        return None
    on.values[node.name, REPLICATED] = on.copy(node, operands)
    return on.redistributed(node.name, REPLICATED, label)


def _random(on: LocalGraph, node: fx.Node, operands: list[fx.Node]) -> fx.Node:
    """Lowers random numbers: drawn from the call's seed, different for each rank's piece."""
    label = on.label(node)
    salt = on.integers.piece(on.factor(node.name, label), "before")[0] if label.sharded else 0
    size, seed = on.shape(node.name, label), on.integers.seed
    assert callable(node.target)
    return on.graph.call_function(node.target, (size, seed, salt, *node.args[3:]))


def _cut(on: LocalGraph, node: fx.Node, operands: list[fx.Node]) -> fx.Node | None:
    """Lowers a slice of a sharded dim to this rank's piece of it."""
    chosen = on.placement.nodes[node.name]
    if chosen.name != "cut":
        info, source = on.program.info, node.all_input_nodes[0]
        whole = info[node.name].shape == info[source.name].shape
        # A slice of all there is: its end, a whole length, says nothing of a piece.
        return operands[0] if whole and chosen.operands[0] == chosen.output else None
    kept = on.factor(node.name, chosen.output)
    (skipped,) = on.integers.piece(kept, "skip")
    args = (operands[0], chosen.output.dim, skipped, on.integers.emit(on.integers.length(kept)))
    return on.graph.call_function(torch.ops.dcpc.narrow.default, args)


def _grouped(on: LocalGraph, node: fx.Node, operands: list[fx.Node]) -> fx.Node | None:
    """Lowers convolutions and norms in groups: a rank has some of the groups.

    Groups may be several factors of the channels, if another op splits these differently: the rank
    has a piece of one factor and all of the others.
    """
    chosen = on.placement.nodes[node.name]
    if chosen.name != "g":
        is_norm = node.target is aten.group_norm.default
        return (local_group_norm if is_norm else local_convolution)(on, node, operands)
    names = [a.name for a in node.target._schema.arguments]  # type: ignore[union-attr]
    at = next(i for i, name in enumerate(names) if name in ("groups", "num_groups"))
    groups = node.args[at] if at < len(node.args) else node.kwargs[names[at]]
    kept = on.factor(node.name, chosen.output)
    count = sympy.sympify(groups) * on.integers.length(kept) / kept.size
    local = on.integers.emit(count)
    fixed = on.integers.any_degree or isinstance(local, int)
    if node.target is aten.group_norm.default and not fixed:
        return _groups_as_samples(on, node, operands, count, sympy.sympify(groups))
    copied = on.copy(node, operands)
    if at < len(copied.args):
        copied.args = (*copied.args[:at], local, *copied.args[at + 1 :])
    else:
        copied.kwargs = {**copied.kwargs, names[at]: local}
    return copied


def _groups_as_samples(
    on: LocalGraph, node: fx.Node, operands: list[fx.Node], count: sympy.Expr, groups: sympy.Expr
) -> fx.Node:
    """Emits a norm whose number of local groups varies: each group becomes a sample of one group.

    The kernel takes the number of groups as a constant, which would differ between ranks.
    """
    emit, label = on.integers.emit, on.label(node)
    shape = on.shape(node.name, label)
    samples = emit(on.dim_size(node.name, 0, label) * count)
    channels = on.program.info[node.name].shape[1] / groups
    copied = on.copy(node, operands)
    names = [a.name for a in aten.group_norm.default._schema.arguments]
    given = {**dict(zip(names, copied.args, strict=False)), **copied.kwargs}
    on.graph.erase_node(copied)
    x = on.reshape(operands[0], [samples, emit(channels), *shape[2:]])
    args = (x, 1, None, None, given.get("eps", 1e-5))
    x = on.reshape(on.graph.call_function(aten.group_norm.default, args), shape)
    ones = [1] * (len(shape) - 2)
    for name, op in (("weight", aten.mul.Tensor), ("bias", aten.add.Tensor)):
        each = given.get(name)
        if isinstance(each, fx.Node):
            each = on.reshape(each, [shape[1], *ones])
            x = on.graph.call_function(op, (x, each))
    return x


_FILLS = (
    aten.full.default, aten.zeros.default, aten.ones.default, aten.empty.memory_format,
    aten.new_full.default, aten.new_zeros.default, aten.new_ones.default, aten.new_empty.default,
)  # fmt: skip
_GROUPED = (
    aten.group_norm.default, aten.conv1d.default, aten.conv2d.default, aten.conv3d.default,
    aten.conv1d.padding, aten.conv2d.padding, aten.conv3d.padding,
    aten.convolution.default, aten._convolution.default, aten._convolution_mode.default,
)  # fmt: skip
LOCAL = {
    aten.reshape.default: _resize,
    aten.view.default: _resize,
    aten.expand.default: _resize,
    **dict.fromkeys(_FILLS, _fill),
    **dict.fromkeys(_GROUPED, _grouped),
    aten.pad.default: local_pad,
    aten.constant_pad_nd.default: local_pad,
    aten.arange.default: _arange,
    aten.arange.start: _arange,
    aten.arange.start_step: _arange,
    aten.slice.Tensor: _cut,
    torch.ops.dcpc.uniform.default: _random,
    torch.ops.dcpc.normal.default: _random,
    torch.ops.dcpc.attention.default: local_attention,
}
