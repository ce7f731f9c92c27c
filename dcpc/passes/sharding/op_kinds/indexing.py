"""Kinds of ops that read or write elements at given positions."""

from __future__ import annotations

from typing import Any

import torch

from dcpc.passes.sharding.op_kinds.op_call import NameSizes, OpCall, broadcast, members, own
from dcpc.passes.sharding.rule_types import Names, OpSharding


def gather(call: OpCall) -> OpSharding:
    """x.gather(dim, index): x is whole along dim; elsewhere the sizes must agree to share."""
    shapes = [o.shape for o in call.operands]
    output, sizes = own(shapes[1])
    dims = call.dims("dim", len(output))
    if not dims:
        return OpSharding(((), ()), output, sizes, linear="first")
    operand, more, whole = _aligned(shapes[0], shapes[1], output, dims[0], "x")
    # The gathered dim of the index is free: each rank looks its own positions up in the whole x.
    whole -= set(output[dims[0]])
    return OpSharding(
        (operand, output), output, sizes | more, whole=frozenset(whole), linear="first"
    )


def _aligned(
    shape: tuple[Any, ...], like: tuple[Any, ...], names: Names, dim: int, prefix: str
) -> tuple[Names, NameSizes, set[str]]:
    """Names for a tensor that shares every dim but one with another, where the sizes agree."""
    found: list[tuple[str, ...]] = []
    sizes: NameSizes = {}
    whole: set[str] = set(names[dim])
    for d, (a, b) in enumerate(zip(shape, like, strict=True)):
        if d != dim and a == b:
            found.append(names[d])
            continue
        name = (f"{prefix}{d}",) if a != 1 else ()
        found.append(name)
        sizes |= dict.fromkeys(name, a)
        whole |= {*name, *names[d]}
    return tuple(found), sizes, whole


def scatter(call: OpCall) -> OpSharding:
    """scatter, scatter_add: whole along dim; the other dims are shared where the sizes agree."""
    output, sizes = own(call.output.shape)
    dims = call.dims("dim", len(output))
    operands: list[Names] = [output]
    whole: set[str] = set(output[dims[0]]) if dims else set()
    for i, operand in enumerate(call.operands[1:], 1):
        names: Names = ()
        if dims and operand.shape:
            names, more, kept = _aligned(
                operand.shape, call.output.shape, output, dims[0], f"x{i}_"
            )
            sizes |= more
            whole |= kept
        operands.append(names)
    return OpSharding(tuple(operands), output, sizes, whole=frozenset(whole))


def index(call: OpCall) -> OpSharding:
    """x[i, j, :]: indexed dims are whole, the indices' own dims and the other dims are free."""
    source = call.input_shape
    at, ndim, position = _indexed(call, len(call.operands))
    output, sizes = own(call.output.shape)
    rest = list(output[:position] + output[position + ndim :])
    operand: list[tuple[str, ...]] = []
    whole: set[str] = set()
    for d, size in enumerate(source):
        if d in at:
            name = (f"x{d}",) if size != 1 else ()
            operand.append(name)
            whole |= {*name}
            sizes |= dict.fromkeys(name, size)
        else:
            operand.append(rest.pop(0))
    shared = output[position : position + ndim]
    indices = [broadcast(shared, t.shape) for t in call.operands[1:]]
    return OpSharding(
        (tuple(operand), *indices), output, sizes, whole=frozenset(whole), linear="first"
    )


def _indexed(call: OpCall, stop: int) -> tuple[list[int], int, int]:
    """Returns the indexed dims, the ndim of the broadcast indices, and where it goes."""
    given: list[Any] = list(call.args["indices"])
    at = [d for d, g in enumerate(given) if g is not None]
    tensors = call.operands[1:stop]
    if not at or any(t.dtype in (torch.bool, torch.uint8) for t in tensors):
        raise NotImplementedError("a boolean index has a data-dependent size")
    ndim = max(len(t.shape) for t in tensors)
    return at, ndim, at[0] if at == list(range(at[0], at[-1] + 1)) else 0


def index_put(call: OpCall) -> OpSharding:
    """x[i, j, :] = values: indexed dims and the indices are whole, the other dims are free."""
    output, sizes = own(call.output.shape)
    if len(call.operands) == 3 and call.operands[1].dtype == torch.bool:
        return _masked_put(call, output, sizes)
    at, ndim, position = _indexed(call, len(call.operands) - 1)
    tensors = call.operands[1:-1]
    whole: set[str] = set(members(output[d] for d in at))
    operands: list[Names] = [output]
    for i, t in enumerate(tensors, 1):
        names, more = own(t.shape, f"x{i}_")
        operands.append(names)
        sizes |= more
        whole |= more.keys()
    rest = [n for d, n in enumerate(output) if d not in at]
    values = call.operands[-1].shape
    full: list[tuple[str, ...]] = [*rest[:position], *[("?",)] * ndim, *rest[position:]]
    skip = len(full) - len(values)
    filled: list[tuple[str, ...]] = []
    for d, size in enumerate(values):
        name = full[skip + d]
        if size == 1:
            name = ()
        elif name == ("?",):
            name = (f"v{d}",)
            sizes |= {f"v{d}": size}
            whole.add(f"v{d}")
        filled.append(name)
    operands.append(tuple(filled))
    return OpSharding(tuple(operands), output, sizes, whole=frozenset(whole))


def _masked_put(call: OpCall, output: Names, sizes: NameSizes) -> OpSharding:
    """x[mask] = number: elementwise in the dims of the mask."""
    mask, values = call.operands[1].shape, call.operands[2].shape
    given = call.args["indices"]
    if values or given[0] is None or len(given) > 1:
        raise NotImplementedError("values for the true elements of a mask, in their order")
    return OpSharding((output, output[: len(mask)], ()), output, sizes)


def index_select(call: OpCall) -> OpSharding:
    """Rows of one dim: x is whole along it, the positions and the other dims are free."""
    source = call.input_shape
    output, sizes = own(call.output.shape)
    if not source:
        return OpSharding(((), *(((),) * len(o.shape) for o in call.operands[1:])), output, sizes)
    dim = call.dims("dim", len(source))[0]
    name = ("x",) if source[dim] != 1 else ()
    sizes |= dict.fromkeys(name, source[dim])
    operand = (*output[:dim], name, *output[dim + 1 :])
    position = output[dim : dim + len(call.operands[1].shape)]
    return OpSharding((operand, position), output, sizes, whole=frozenset(name), linear="first")


def index_add(call: OpCall) -> OpSharding:
    """index_add, index_copy, index_fill: whole along dim, the other dims are free."""
    output, sizes = own(call.output.shape)
    dims = call.dims("dim", len(output))
    if not dims:
        raise NotImplementedError("an index into a single number")
    names, more = own(call.operands[1].shape, "i")
    whole = {*output[dims[0]], *more}
    operands: list[Names] = [output, names]
    sizes |= more
    for operand in call.operands[2:]:
        source: Names = ()
        if operand.shape:
            size = operand.shape[dims[0]]
            name = ("x",) if size != 1 else ()
            source = (*output[: dims[0]], name, *output[dims[0] + 1 :])
            sizes |= dict.fromkeys(name, size)
            whole |= {*name}
        operands.append(source)
    return OpSharding(tuple(operands), output, sizes, whole=frozenset(whole))


def placed(call: OpCall) -> OpSharding:
    """select_scatter, slice_scatter: a tensor is put into x; the dim it goes into is whole."""
    output, sizes = own(call.output.shape)
    dim = call.dims("dim", len(output))[0]
    whole = {*output[dim]}
    if call.op == "select_scatter":
        source = (*output[:dim], *output[dim + 1 :])
    else:
        size = call.operands[1].shape[dim]
        name = ("x",) if size != 1 else ()
        source = (*output[:dim], name, *output[dim + 1 :])
        sizes |= dict.fromkeys(name, size)
        whole |= {*name}
    return OpSharding((output, source), output, sizes, whole=frozenset(whole), linear="all")
