"""Ops that read or write at given positions."""

from typing import Any

import torch

from tests.passes.sharding.rule_cases.source import Source, aten, strategy
from tests.passes.sharding.rule_check import Case


@strategy("aten.gather", "aten.take_along_dim")
def gather(source: Source) -> Case:
    shape = source.shape()
    dim = source.dim(shape)
    wanted = [n if source.flag() else source.size(1, n) for n in shape]
    wanted[dim] = source.size()
    index = source.below(shape[dim], *wanted)
    x = source.tensor(*shape)
    if source.op == "aten.gather":
        return Case(aten.gather.default, (x, dim, index))
    # Here the other dims broadcast, and the index is into the broadcast x.
    wanted = [n if source.flag() else 1 for n in shape]
    wanted[dim] = source.size()
    index = source.below(shape[dim], *wanted)
    return Case(aten.take_along_dim.default, (x, index, dim))


def distinct(source: Source, shape: list[int], dim: int, stop: int) -> torch.Tensor:
    """Indices that differ along a dim, so that writing in any order gives the same."""
    return source.floats(*[stop if d == dim else n for d, n in enumerate(shape)]).argsort(dim)


@strategy("aten.scatter", "aten.scatter_add", "aten.scatter_reduce")
def scatter(source: Source) -> Case:
    shape = source.shape()
    dim = source.dim(shape) % len(shape)
    wanted = [n if source.flag() else source.size(1, n) for n in shape]
    wanted[dim] = source.size(1, shape[dim])
    index = distinct(source, wanted, dim, shape[dim]).narrow(dim, 0, wanted[dim]).contiguous()
    given = [n if source.flag() else n + 1 for n in wanted]
    x = source.floats(*shape)
    if source.op == "aten.scatter" and source.flag():
        return Case(aten.scatter.value, (x, dim, index, 2.0))
    extra = ("amax",) if source.op == "aten.scatter_reduce" else ()
    name = {"aten.scatter": "src", "aten.scatter_reduce": "two"}.get(source.op, "default")
    op = getattr(source.packet, name)
    return Case(op, (x, dim, index, source.floats(*given), *extra))


def indices(source: Source, shape: list[int]) -> tuple[list[Any], list[int]]:
    """Index tensors that broadcast together, at some dims, and their broadcast shape."""
    common = source.shape(1, 2, 4)
    found: list[Any] = [None] * len(shape)
    for d in {source.dim(shape) % len(shape) for _ in range(source.size(1, 2))}:
        found[d] = source.below(shape[d], *source.broadcast(common))
    given = [x for x in found if x is not None]
    while found[-1] is None and source.flag():
        found.pop()
    return found, list(torch.broadcast_shapes(*(x.shape for x in given)))


@strategy("aten.index")
def index(source: Source) -> Case:
    shape = source.shape()
    return Case(aten.index.Tensor, (source.tensor(*shape), indices(source, shape)[0]))


@strategy("aten.index_put")
def index_put(source: Source) -> Case:
    shape = source.shape()
    x = source.floats(*shape)
    if source.size() == 1:
        mask = source.below(2, *shape[: source.size(1, len(shape))]).bool()
        return Case(aten.index_put.default, (x, [mask], source.floats()))
    at, _ = indices(source, shape)
    like = aten.index.Tensor(x, at)
    values = source.floats(*source.broadcast(list(like.shape)))
    if not source.flag():  # without adding, equal positions would be written in any order
        return Case(aten.index_put.default, (x, at, values.flatten()[0]))
    return Case(aten.index_put.default, (x, at, values, True))


@strategy("aten.index_select")
def index_select(source: Source) -> Case:
    shape = source.shape()
    dim = source.dim(shape)
    positions = source.below(shape[dim], source.size())
    return Case(aten.index_select.default, (source.tensor(*shape), dim, positions))


@strategy("aten.index_add", "aten.index_copy", "aten.index_fill", "aten.index_reduce")
def index_add(source: Source) -> Case:
    shape = source.shape()
    dim = source.dim(shape)
    count = source.size(1, shape[dim])
    positions = torch.randperm(shape[dim], generator=source.generator)[:count]
    given = list(shape)
    given[dim] = count
    x = source.floats(*shape)
    if source.op == "aten.index_fill":
        value = source.pick(2.0, None)
        if value is None:
            return Case(aten.index_fill.int_Tensor, (x, dim, positions, source.floats()))
        return Case(aten.index_fill.int_Scalar, (x, dim, positions, value))
    how = (source.pick("prod", "amax"),) if source.op == "aten.index_reduce" else ()
    return Case(source.packet.default, (x, dim, positions, source.floats(*given), *how))


@strategy("aten.select_scatter")
def select_scatter(source: Source) -> Case:
    shape = source.shape()
    dim = source.dim(shape)
    given = [n for d, n in enumerate(shape) if d != dim % len(shape)]
    x, at = source.tensor(*shape, dtypes=(torch.float64,)), source.size(0, shape[dim] - 1)
    return Case(aten.select_scatter.default, (x, source.floats(*given), dim, at))


@strategy("aten.slice_scatter")
def slice_scatter(source: Source) -> Case:
    shape = source.shape()
    dim = source.dim(shape)
    start = source.size(0, shape[dim] - 1)
    given = list(shape)
    given[dim] = shape[dim] - start
    args = (source.floats(*shape), source.floats(*given), dim, start, shape[dim])
    return Case(aten.slice_scatter.default, args)
