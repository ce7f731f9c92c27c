"""Kinds of ops that reduce dims."""

from __future__ import annotations

from dcpc.passes.sharding.op_kinds.elementwise import pointwise
from dcpc.passes.sharding.op_kinds.op_call import OpCall, members, own
from dcpc.passes.sharding.rule_types import OpSharding

_ADDS_UP = ("sum", "nansum", "count_nonzero")


def reduction(call: OpCall) -> OpSharding:
    """Pieces of a sum's reduced dims add up; other reductions need these dims whole."""
    operand, sizes = own(call.input_shape)
    reduced = call.dims("dim", len(operand))
    gone = frozenset(members(operand[d] for d in reduced))
    keep = bool(call.args.get("keepdim", False))
    output = tuple(
        () if d in reduced else names for d, names in enumerate(operand) if keep or d not in reduced
    )
    if call.op in _ADDS_UP:
        return OpSharding((operand,), output, sizes, summed=gone, linear=call.linear)
    return OpSharding((operand,), output, sizes, whole=gone, linear=call.linear)


def extremum(call: OpCall) -> OpSharding:
    """max, min: of all elements, or of two tensors elementwise."""
    return pointwise(call) if call.args.get("other") is not None else reduction(call)


def quantile(call: OpCall) -> OpSharding:
    """quantile, nanquantile: the dim is whole; several quantiles are a new first dim, whole."""
    operand, sizes = own(call.input_shape)
    reduced = call.dims("dim", len(operand))
    keep = bool(call.args["keepdim"])
    rest = [() if d in reduced else n for d, n in enumerate(operand) if keep or d not in reduced]
    several = len(call.output.shape) > len(rest)
    first = ("q",) if several and call.output.shape[0] != 1 else ()
    sizes |= {"q": call.output.shape[0]} if first else {}
    output = (first, *rest) if several else tuple(rest)
    asked = tuple((first,) if several else () for _ in call.operands[1:])
    whole = members(operand[d] for d in reduced) | {*first}
    return OpSharding(
        (operand, *asked), output, sizes, whole=frozenset(whole),
        nonempty=frozenset(sizes),
    )  # fmt: skip
