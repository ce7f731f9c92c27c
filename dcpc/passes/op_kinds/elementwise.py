"""Kinds of ops that work on each element, or on each row, by itself."""

from __future__ import annotations

import sympy
from torch import fx

from dcpc.passes.op_kinds.call import (
    Call,
    all_whole,
    broadcast,
    members,
    own,
    unrelated,
)
from dcpc.passes.rule_types import Linear, Names, OpSharding


def pointwise(call: Call) -> OpSharding:
    """Elementwise with broadcasting: a dim of an operand is the output's dim, or has size 1."""
    output, sizes = own(call.output.shape)
    operands = tuple(broadcast(output, o.shape) for o in call.operands)
    return OpSharding(operands, output, sizes, linear=_linear(call))


def _linear(call: Call) -> Linear:
    if call.args.get("rounding_mode") is not None:
        return "none"
    if call.linear == "all" and len(call.operands) < 2:
        # x + 1, x + seq: the number would be added on every rank.
        given = [call.args.get(n) for n in ("self", "other")]
        return "first" if all(g in (None, 0) for g in given[1:]) else "none"
    if call.linear == "first" and not _is_first_operand(call):
        return "none"
    return call.linear


def _is_first_operand(call: Call) -> bool:
    """Whether the op's first argument is a tensor (else the first operand is a divisor, say)."""
    return bool(call.args) and isinstance(next(iter(call.args.values())), fx.Node)


def elementwise_loss(call: Call) -> OpSharding:
    """A loss for each element; a reduced one is taken apart by the trace."""
    if call.args["reduction"] != 0:
        raise NotImplementedError("a reduced loss is not split")
    return pointwise(call)


def fill(call: Call) -> OpSharding:
    """Every element becomes one number: the shape of self, the value for all."""
    output, sizes = own(call.output.shape)
    operands = (output, *(() for _ in call.operands[1:]))
    return OpSharding(operands, output, sizes)


def along(call: Call) -> OpSharding:
    """softmax, cumsum, flip, roll: as elementwise, but the dims of the argument stay whole."""
    names, sizes = own(call.output.shape)
    whole = frozenset(members(names[d] for d in call.dims(call.along, len(names))))
    operands = tuple(broadcast(names, o.shape) for o in call.operands)
    return OpSharding(operands, names, sizes, whole=whole, linear=call.linear)


def glu(call: Call) -> OpSharding:
    """A dim is halved, one half gating the other: it stays whole."""
    operand, sizes = own(call.input_shape)
    dim = call.dims("dim", len(operand))[0]
    output = list(operand)
    size = call.output.shape[dim]
    output[dim] = ("half",) if size != 1 else ()
    sizes |= {"half": size} if size != 1 else {}
    whole = frozenset({*operand[dim], *output[dim]})
    return OpSharding((operand,), tuple(output), sizes, whole=whole)


def triangle(call: Call) -> OpSharding:
    """tril, triu: elementwise in the leading dims, the last two are compared by position."""
    names, sizes = own(call.output.shape)
    return OpSharding(
        (names,), names, sizes, whole=frozenset(members(names[-2:])), linear="first"
    )


def norm(call: Call) -> OpSharding:
    """layer_norm, rms_norm: the normalised dims stay whole, weight and bias have only these."""
    output, sizes = own(call.output.shape)
    count = len(call.args["normalized_shape"])
    kept = output[len(output) - count :]
    operands = (output, *(kept for _ in call.operands[1:]))
    return OpSharding(operands, output, sizes, whole=frozenset(members(kept)))


def group_norm(call: Call) -> OpSharding:
    """Samples are free; channels and positions are averaged over in groups."""
    output, sizes = own(call.output.shape)
    operands = (output, *(output[1:2] for _ in call.operands[1:]))
    return OpSharding(operands, output, sizes, whole=frozenset(members(output[1:])))


def channel_norm(call: Call) -> OpSharding:
    """batch_norm, instance_norm: channels are free, and what is not averaged over."""
    output, sizes = own(call.output.shape)
    operands = (output, *(output[1:2] for _ in call.operands[1:]))
    if call.op == "instance_norm":
        averaged = output[2:] if call.args["use_input_stats"] else ()
    else:
        averaged = (output[0], *output[2:]) if call.args["training"] else ()
    if averaged and call.args["running_mean"] is not None:
        return all_whole(call)  # the call also changes the running statistics
    # The kernels read the first channel; instance_norm makes every (sample, channel) one.
    needed = members(output[:2] if call.op == "instance_norm" else output[1:2])
    return OpSharding(
        operands, output, sizes, whole=frozenset(members(averaged)), nonempty=frozenset(needed)
    )


def prelu(call: Call) -> OpSharding:
    """The weight is one number, or one a channel (dim 1)."""
    output, sizes = own(call.output.shape)
    weight: Names = ()
    if len(call.operands[1].shape):
        several = call.operands[1].shape[0] != 1
        weight = (output[min(1, len(output) - 1)] if several else (),)
    return OpSharding((output, weight), output, sizes)


def one_hot(call: Call) -> OpSharding:
    """A dim of classes is added at the end: it stays whole."""
    operand, sizes = own(call.input_shape)
    classes = call.output.shape[-1]
    last = ("classes",) if classes != 1 else ()
    sizes |= {"classes": classes} if last else {}
    return OpSharding((operand,), (*operand, last), sizes, whole=frozenset(last))


def bucketize(call: Call) -> OpSharding:
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


def cross_entropy(call: Call) -> OpSharding:
    """Cross-entropy of class indices, one loss a row: rows are free, classes are whole."""
    logits, target = call.operands[0].shape, call.operands[1].shape
    if call.args["reduction"] != 0:
        if call.op == "nll_loss_nd":  # the trace leaves it the reduction of one number a row
            return all_whole(call)
        raise NotImplementedError("a reduced cross-entropy is not split")
    if len(call.operands) > 2 or len(target) >= len(logits):
        raise NotImplementedError("weighted or soft-target cross-entropy is not split")
    rows, sizes = own(target)
    classes = logits[1] if len(logits) > 1 else logits[0]
    c = ("c",) if classes != 1 else ()
    sizes |= {"c": classes} if c else {}
    left = (rows[0], c, *rows[1:]) if len(logits) > 1 else (c,)
    return OpSharding((left, rows), rows, sizes, whole=frozenset(c))


def generator(call: Call) -> OpSharding:
    """full, zeros, ones, arange: made by the op, each rank its own piece.

    Operands are only looked at for their dtype (`new_ones(x, ...)`).
    """
    output, sizes = own(call.output.shape)
    operands, more = unrelated(call)
    return OpSharding(tuple(operands), output, sizes | more, whole=frozenset(more))


def similarity(call: Call) -> OpSharding:
    """cosine_similarity, pairwise_distance: one dim of the broadcast operands is reduced away."""
    shapes = [o.shape for o in call.operands]
    ndim = max(map(len, shapes))
    wide = [sympy.Integer(1)] * ndim
    for shape in shapes:
        for d, s in enumerate(shape, ndim - len(shape)):
            wide[d] = s if wide[d] == 1 else wide[d]
    names, sizes = own(tuple(wide))
    dim = call.dims("dim", ndim)[0] if "dim" in call.args else ndim - 1
    keep = bool(call.args.get("keepdim"))
    output = tuple(() if d == dim else n for d, n in enumerate(names) if keep or d != dim)
    operands = tuple(broadcast(names, shape) for shape in shapes)
    return OpSharding(operands, output, sizes, whole=frozenset(names[dim]))
