"""Kinds of ops that work on each element, or on each row, by itself."""

from __future__ import annotations

import sympy
from torch import fx

from dcpc.ops.tiled import tiling_of
from dcpc.passes.sharding.op_kinds.op_call import (
    OpCall,
    all_whole,
    broadcast,
    broadcast_shape,
    members,
    own,
    unrelated,
)
from dcpc.passes.sharding.rule_types import Linear, Names, OpSharding


def pointwise(call: OpCall) -> OpSharding:
    """Elementwise with broadcasting: a dim of an operand is the output's dim, or has size 1."""
    output, sizes = own(call.output.shape)
    operands = tuple(broadcast(output, o.shape) for o in call.operands)
    return OpSharding(operands, output, sizes, linear=_linear(call))


def _linear(call: OpCall) -> Linear:
    if call.args.get("rounding_mode") is not None:
        return "none"
    if call.linear == "all" and len(call.operands) < 2:
        # x + 1, x + seq: the number would be added on every rank.
        given = [call.args.get(n) for n in ("self", "other")]
        return "first" if all(g in (None, 0) for g in given[1:]) else "none"
    if call.linear == "first" and not _is_first_operand(call):
        return "none"
    return call.linear


def _is_first_operand(call: OpCall) -> bool:
    """Whether the op's first argument is a tensor (else the first operand is a divisor, say)."""
    return bool(call.args) and isinstance(next(iter(call.args.values())), fx.Node)


def elementwise_loss(call: OpCall) -> OpSharding:
    """A loss for each element; a reduced one is taken apart by the trace."""
    if call.args["reduction"] != 0:
        raise NotImplementedError("a reduced loss is not split")
    return pointwise(call)


def fill(call: OpCall) -> OpSharding:
    """Every element becomes one number: the shape of self, the value for all."""
    output, sizes = own(call.output.shape)
    operands = (output, *(() for _ in call.operands[1:]))
    return OpSharding(operands, output, sizes)


def along(call: OpCall) -> OpSharding:
    """softmax, cumsum, flip, roll: as elementwise, but the dims of the argument stay whole."""
    names, sizes = own(call.output.shape)
    whole = frozenset(members(names[d] for d in call.dims(call.along, len(names))))
    operands = tuple(broadcast(names, o.shape) for o in call.operands)
    return OpSharding(operands, names, sizes, whole=whole, linear=call.linear)


def resized(call: OpCall) -> OpSharding:
    """topk, diff, fft: as `along`, but these dims may have another length in the output."""
    operand, sizes = own(call.input_shape)
    if len(call.operands) > 1 and call.op != "diff":
        raise NotImplementedError("more than one tensor")
    output, whole = list(operand), set()
    others = [list(operand) for _ in call.operands[1:]]  # for diff: the tensors before and after
    for dim in call.dims(call.along, len(operand)):
        after = call.output.shape[dim]
        output[dim] = (f"after{dim}",) if after != 1 else ()
        sizes |= dict.fromkeys(output[dim], after)
        whole |= {*operand[dim], *output[dim]}
        for i, (names, other) in enumerate(zip(others, call.operands[1:], strict=True)):
            length = other.shape[dim]
            names[dim] = (f"other{i}",) if length != 1 else ()
            sizes |= dict.fromkeys(names[dim], length)
            whole |= {*names[dim]}
    operands = (operand, *map(tuple, others))
    return OpSharding(
        operands, tuple(output), sizes, whole=frozenset(whole),
        linear="none" if others else call.linear,
        nonempty=frozenset(sizes) if call.op.startswith(("fft", "_fft")) else frozenset(),
    )  # fmt: skip


def fixed_dim(call: OpCall) -> OpSharding:
    """msort, flipud, fliplr: the dim that is reordered is part of the op's name."""
    names, sizes = own(call.output.shape)
    dim = 1 if call.op == "fliplr" else 0
    whole = frozenset(names[dim] if names else ())
    return OpSharding((names,), names, sizes, whole=whole, linear=call.linear)


def beside(call: OpCall) -> OpSharding:
    """type_as, isin: elementwise in the first operand; the others are looked at whole."""
    output, sizes = own(call.output.shape)
    if call.operands[0].shape != call.output.shape:
        raise NotImplementedError("the first operand is a number")
    others, more = unrelated(call, 1)
    return OpSharding(
        (output, *others), output, sizes | more, whole=frozenset(more), linear=call.linear
    )


def glu(call: OpCall) -> OpSharding:
    """A dim is halved, one half gating the other: it stays whole."""
    operand, sizes = own(call.input_shape)
    dim = call.dims("dim", len(operand))[0]
    output = list(operand)
    size = call.output.shape[dim]
    output[dim] = ("half",) if size != 1 else ()
    sizes |= {"half": size} if size != 1 else {}
    whole = frozenset({*operand[dim], *output[dim]})
    return OpSharding((operand,), tuple(output), sizes, whole=whole)


def triangle(call: OpCall) -> OpSharding:
    """tril, triu: elementwise in the leading dims, the last two are compared by position."""
    names, sizes = own(call.output.shape)
    return OpSharding((names,), names, sizes, whole=frozenset(members(names[-2:])), linear="first")


def norm(call: OpCall) -> OpSharding:
    """layer_norm, rms_norm: the normalised dims stay whole, weight and bias have only these."""
    output, sizes = own(call.output.shape)
    count = len(call.args["normalized_shape"])
    if call.result:  # a row's mean or scale
        names, sizes = own(call.input_shape)
        output = (*names[: len(names) - count], *((),) * count)
    else:
        names = output
    kept = names[len(names) - count :]
    operands = (names, *(kept for _ in call.operands[1:]))
    return OpSharding(operands, output, sizes, whole=frozenset(members(kept)))


def group_norm(call: OpCall) -> OpSharding:
    """Samples and groups are free; the channels of a group and positions are averaged over.

    A rank that has some of the groups is told how many (`codegen/lower/local_ops.py`).
    """
    output, sizes = own(call.output.shape)
    groups = call.integer("num_groups")
    parts = {"g": groups, "c": sympy.cancel(call.output.shape[1] / groups)}
    channels = tuple(n for n, size in parts.items() if size != 1)
    sizes = {n: s for n, s in sizes.items() if n not in output[1]}
    sizes |= {n: parts[n] for n in channels}
    whole = members(output[2:]) | {"c"}
    output = (output[0], channels, *output[2:])
    operands = (output, *((channels,) for _ in call.operands[1:]))
    return OpSharding(
        operands, output, sizes, whole=frozenset(whole & sizes.keys()),
        nonempty=frozenset({"g"} & sizes.keys()), averages=frozenset(members(output[2:])),
    )  # fmt: skip


def channel_norm(call: OpCall) -> OpSharding:
    """batch_norm, instance_norm: channels are free, and dims that are not averaged over."""
    names, sizes = own(call.input_shape)
    operands = (names, *(names[1:2] for _ in call.operands[1:]))
    if call.op == "instance_norm":
        averaged = names[2:] if call.args["use_input_stats"] else ()
    else:
        averaged = (names[0], *names[2:]) if call.args["training"] else ()
    if averaged and call.args.get("running_mean") is not None:
        return all_whole(call)  # the call also changes the running statistics
    if call.result and not averaged:
        return all_whole(call)  # statistics without elements
    # The kernels read the first channel; instance_norm makes every (sample, channel) one.
    needed = members(names[:2] if call.op == "instance_norm" else names[1:2])
    output = names[1:2] if call.result else names
    return OpSharding(
        operands, output, sizes, whole=frozenset(members(averaged)), nonempty=frozenset(needed)
    )


def prelu(call: OpCall) -> OpSharding:
    """The weight is one number, or one a channel (dim 1)."""
    output, sizes = own(call.output.shape)
    weight: Names = ()
    if len(call.operands[1].shape):
        several = call.operands[1].shape[0] != 1
        weight = (output[min(1, len(output) - 1)] if several else (),)
    return OpSharding((output, weight), output, sizes)


def one_hot(call: OpCall) -> OpSharding:
    """A dim of classes is added at the end: it stays whole."""
    operand, sizes = own(call.input_shape)
    classes = call.output.shape[-1]
    last = ("classes",) if classes != 1 else ()
    sizes |= {"classes": classes} if last else {}
    return OpSharding((operand,), (*operand, last), sizes, whole=frozenset(last))


def bucketize(call: OpCall) -> OpSharding:
    """Each element is looked up in a sorted list, which stays whole."""
    output, sizes = own(call.output.shape)
    position = 0 if call.op == "bucketize" else 1
    if not isinstance(call.node.args[position], fx.Node):
        raise NotImplementedError("the value that is looked up is a number")
    table, more = own(call.operands[1 - position].shape, "x")
    operands = (output, table) if position == 0 else (table, output)
    if position == 1 and len(table) > 1:
        raise NotImplementedError("every row has a list of its own")
    return OpSharding(operands, output, sizes | more, whole=frozenset(more))


def cross_entropy(call: OpCall) -> OpSharding:
    """Cross-entropy, one loss a row: rows are free, classes are whole.

    The target is a class index a row, or a probability for each class; a weight is one a class.
    """
    logits = call.input_shape
    if call.args["reduction"] != 0:
        if call.op == "nll_loss_nd":  # the trace leaves it the reduction of one number a row
            return all_whole(call)
        raise NotImplementedError("a reduced cross-entropy is not split")
    rows, sizes = own(call.output.shape)
    classes = logits[1] if len(logits) > 1 else logits[0]
    c = ("c",) if classes != 1 else ()
    sizes |= {"c": classes} if c else {}
    left = (rows[0], c, *rows[1:]) if len(logits) > 1 else (c,)
    soft = call.operands[1].dtype.is_floating_point
    weights = [(c,) for _ in call.operands[2:]]
    target = left if soft else rows
    return OpSharding((left, target, *weights), rows, sizes, whole=frozenset(c))


def row_loss(call: OpCall) -> OpSharding:
    """cosine_embedding, triplet and multi-margin losses: one loss a row, whose features are whole.

    A reduced one is taken apart by the trace.
    """
    if call.args["reduction"] != 0:
        raise NotImplementedError("a reduced loss is not split")
    rows, sizes = own(call.output.shape)
    width = next((o.shape[-1] for o in call.operands if len(o.shape) == len(rows) + 1), None)
    if width is None:
        raise NotImplementedError("operands without a dim of features")
    last = ("features",) if width != 1 else ()
    sizes |= dict.fromkeys(last, width)
    operands: list[Names] = []
    for operand in call.operands:
        wide = len(operand.shape) > len(rows)
        operands.append(broadcast((*rows, last) if wide else rows, operand.shape))
    if call.op == "multi_margin_loss" and len(call.operands) > 2:
        operands[2] = (last,)
    return OpSharding(
        tuple(operands), rows, sizes, whole=frozenset(last), nonempty=frozenset(members(rows))
    )


def generator(call: OpCall) -> OpSharding:
    """full, zeros, ones, arange: made by the op, each rank its own piece.

    Operands are only looked at for their dtype (`new_ones(x, ...)`).
    """
    output, sizes = own(call.output.shape)
    operands, more = unrelated(call)
    return OpSharding(tuple(operands), output, sizes | more, whole=frozenset(more))


def similarity(call: OpCall) -> OpSharding:
    """cosine_similarity, pairwise_distance: one dim of the broadcast operands is reduced away."""
    shapes = [o.shape for o in call.operands]
    names, sizes = own(tuple(broadcast_shape(shapes)))
    ndim = len(names)
    dim = call.dims("dim", ndim)[0] if "dim" in call.args else ndim - 1
    keep = bool(call.args.get("keepdim"))
    output = tuple(() if d == dim else n for d, n in enumerate(names) if keep or d != dim)
    operands = tuple(broadcast(names, shape) for shape in shapes)
    return OpSharding(operands, output, sizes, whole=frozenset(names[dim]))


def tiled(call: OpCall) -> OpSharding:
    """A region that runs a few rows at a time: rows are free, all else is whole."""
    made = tiling_of(call.node.target)
    assert made is not None, "the op is a region"
    result_dim = made.exits[call.result][2]
    sizes: dict[str, sympy.Expr] = {}
    tensors = []
    for i, (tensor, dim) in enumerate(
        zip((*call.operands, call.output), (*made.rows, result_dim), strict=True)
    ):
        names = []
        for d, size in enumerate(tensor.shape):
            name = "r" if d == dim else f"x{i}.{d}"
            names.append((name,) if size != 1 else ())
            sizes |= {name: size} if size != 1 else {}
        tensors.append(tuple(names))
    return OpSharding(
        tuple(tensors[:-1]), tensors[-1], sizes, whole=frozenset(sizes) - {"r"}, multiplies=True
    )
