"""Builds the graph of one rank: values under labels, and the collectives between labels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sympy
import torch
from torch import fx

from dcpc.codegen.collectives.collectives import DimSplit
from dcpc.codegen.lower.integer_inputs import IntegerNodes
from dcpc.ir import REPLICATED, Factor, Label, Placement, Program

aten = torch.ops.aten


class LocalGraph:
    """The graph of one rank for a program, while it is built.

    Attributes:
        graph: graph under construction.
        integers: integer inputs, after the program's placeholders.
        values: (name of a program's node, label) -> local value.
        others: name of a program's node that is no tensor -> its copy.
    """

    def __init__(
        self, program: Program, placement: Placement, group: str, any_degree: bool
    ) -> None:
        self.program, self.placement, self.group = program, placement, group
        self.graph = fx.Graph()
        self.values: dict[tuple[str, Label], fx.Node] = {}
        self.others: dict[str, fx.Node] = {}
        for node in program.gm.graph.nodes:
            if node.op == "placeholder":
                self.values[node.name, REPLICATED] = self.graph.placeholder(node.name)
        self.integers = IntegerNodes(program, placement, self.graph, any_degree)

    # ----------------------------------------------------------------------------------- sizes

    def label(self, node: fx.Node) -> Label:
        """Returns the label under which a node produces its value."""
        return self.placement.nodes[node.name].output

    def factor(self, name: str, label: Label) -> Factor:
        """Returns the factor along which a sharded label splits a value."""
        return self.placement.factors[name][label.dim][label.index]

    def dim_size(self, name: str, dim: int, label: Label) -> sympy.Expr:
        """Returns the local length of one dim under a label."""
        if label.sharded and label.dim == dim:
            sizes = [f.size for f in self.placement.factors[name][dim]]
            sizes[label.index] = self.integers.length(self.factor(name, label))
            return sympy.Mul(*sizes)
        return self.program.info[name].shape[dim]

    def shape(self, name: str, label: Label) -> list[int | fx.Node]:
        """Returns the local shape of a value under a label."""
        return [
            self.integers.emit(self.dim_size(name, d, label))
            for d in range(len(self.program.info[name].shape))
        ]

    # ---------------------------------------------------------------------------------- values

    def value(self, name: str, want: Label) -> fx.Node:
        """Returns a value under a consumer's label; each redistribution is made once."""
        if (name, want) not in self.values:
            have = self.placement.nodes[name].output
            self.values[name, want] = self.redistributed(name, have, want)
        return self.values[name, want]

    def redistributed(self, name: str, have: Label, want: Label) -> fx.Node:
        """Returns a value redistributed from one label to another."""
        x = self.values[name, have]
        dims = [d for d in {have.dim, want.dim} if d >= 0]
        composite = any(len(self.placement.factors[name][d]) > 1 for d in dims)
        if composite:
            x = self.reshape(x, _split_shape(self, name, dims, have))
        sharded = [label for label in (have, want) if label.sharded]
        at = {label: _position(self, name, dims, label) for label in sharded}
        x = _collective(self, x, name, have, want, at)
        return self.reshape(x, self.shape(name, want)) if composite else x

    def narrowed(self, x: fx.Node, dim: int, factor: Factor) -> fx.Node:
        """Returns this rank's piece of a whole value along a dim."""
        integers, call = self.integers, self.graph.call_function
        length = integers.emit(integers.length(factor))
        if not self.placement.is_zigzag(factor):
            (start,) = integers.piece(factor, "start")
            return call(torch.ops.dcpc.narrow.default, (x, dim, start, length))
        where = integers.piece(factor, "start", "turn", "second")
        return call(torch.ops.dcpc.pick.default, (x, dim, *where, length))

    def reshape(self, x: fx.Node, shape: list[int | fx.Node]) -> fx.Node:
        """Emits a reshape of a local value."""
        return self.graph.call_function(aten.reshape.default, (x, shape))

    def copy(self, node: fx.Node, operands: list[fx.Node] | None) -> fx.Node:
        """Emits the same call on local operands, or on replicated ones if None."""
        queue = list(operands or [])

        def argument(leaf: Any) -> Any:
            if not isinstance(leaf, fx.Node):
                return leaf
            if leaf.name in self.program.scalars:
                return self.integers.emit(self.program.scalars[leaf.name])
            if leaf.name in self.program.info:
                return queue.pop(0) if operands is not None else self.value(leaf.name, REPLICATED)
            return self.others[leaf.name]

        args, kwargs = fx.node.map_aggregate((node.args, dict(node.kwargs)), argument)
        assert callable(node.target)
        return self.graph.call_function(node.target, args, kwargs)


# --------------------------------------------------------------------------------- redistribution


def _split_shape(on: LocalGraph, name: str, dims: list[int], label: Label) -> list[int | fx.Node]:
    """Returns the local shape with each of `dims` split into its factors."""
    sizes: list[sympy.Expr] = []
    for d in range(len(on.program.info[name].shape)):
        if d not in dims:
            sizes.append(on.dim_size(name, d, label))
            continue
        for i, factor in enumerate(on.placement.factors[name][d]):
            split = label.sharded and (label.dim, label.index) == (d, i)
            sizes.append(on.integers.length(factor) if split else factor.size)
    return [on.integers.emit(size) for size in sizes]


def _position(on: LocalGraph, name: str, dims: list[int], label: Label) -> int:
    """Returns the dim of a label's factor after `dims` are split into factors."""
    before = [len(on.placement.factors[name][d]) if d in dims else 1 for d in range(label.dim)]
    return sum(before) + label.index


def _split(on: LocalGraph, dim: int, size: sympy.Expr, factor: Factor) -> DimSplit:
    """Returns the split of a factor for a collective; it holds nodes if sizes vary."""
    where: Any = (dim, on.integers.emit(size), *on.integers.split(factor))
    return DimSplit(*where)


def _collective(
    on: LocalGraph, x: fx.Node, name: str, have: Label, want: Label, at: Mapping[Label, int]
) -> fx.Node:
    ops, call = torch.ops.dcpc, on.graph.call_function
    source = on.factor(name, have) if have.sharded else None
    target = on.factor(name, want) if want.sharded else None
    if have.partial and target is None:
        return call(ops.all_reduce.default, (x, on.group))
    if have.partial and target is not None:
        scattered = _split(on, at[want], on.integers.length(target), target)
        return call(ops.reduce_scatter.default, (x, *scattered, on.group))
    if source is None and target is not None:
        return on.narrowed(x, at[want], target)
    assert source is not None, f"no way from {have} to {want} for {name}"
    gathered = _split(on, at[have], source.size, source)
    if target is None:
        return call(ops.all_gather.default, (x, *gathered, on.group))
    scattered = _split(on, at[want], on.integers.length(target), target)
    return call(ops.all_to_all.default, (x, *gathered, *scattered, on.group))
