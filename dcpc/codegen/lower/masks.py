"""Replaces recognised masks in a program: attention gets limits and kept keys instead."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch._guards import detect_fake_mode
from torch.utils._pytree import tree_map

from dcpc.fx.large_graphs import without_unused
from dcpc.ir import MaskPlan, Program, Recipe, TensorInfo

aten = torch.ops.aten

_OPS: dict[str, Callable[..., Any]] = {
    "not": aten.logical_not.default,
    "and": aten.logical_and.default,
    "or": aten.logical_or.default,
    "add": aten.add.Tensor,
    "sub": aten.sub.Tensor,
    "mul": aten.mul.Tensor,
    **{name: getattr(aten, name).Tensor for name in ("lt", "le", "gt", "ge", "eq", "ne")},
}


def apply_masks(program: Program, plan: MaskPlan) -> Program:
    """Returns a copy of the program without its recognised masks, and with the plan's notes.

    The graph hash stays the same, as the computation is the same.
    """
    notes = (*program.notes, *plan.notes)
    if not plan.decisions:
        return dataclasses.replace(program, notes=notes)
    applied = _Applied(program)
    for name, decision in plan.decisions.items():
        node = applied.nodes[name]
        keep = None if decision.keep is None else applied.keep(node, decision.keep)
        segment = None if decision.segment is None else applied.value(node, decision.segment)
        limits = {"before": decision.before, "after": decision.after}
        kwargs = {k: v for k, v in node.kwargs.items() if k not in limits}
        kwargs |= {k: v for k, v in limits.items() if v is not None}
        kwargs |= {"empty": decision.empty} if decision.empty else {}
        operands = [None, keep, segment] if segment else [None, keep] if keep else []
        node.args = (*node.args[:3], *operands)
        node.kwargs = kwargs
    graph = applied.graph
    without_unused(graph)
    graph.lint()
    gm = fx.GraphModule(program.gm, graph)
    return dataclasses.replace(program, gm=gm, info=applied.info, notes=notes)


class _Applied:
    """A copy of a program's graph, and the nodes added to it."""

    def __init__(self, program: Program) -> None:
        self.graph = fx.Graph()
        made: dict[fx.Node, fx.Node] = {}
        output = self.graph.graph_copy(program.gm.graph, made)
        self.graph.output(output)
        for old, new in made.items():
            assert old.name == new.name, f"{old} became {new}: its facts are under its name"
        self.nodes = {n.name: n for n in self.graph.nodes}
        self.info = dict(program.info)
        self.made: dict[Recipe, fx.Node] = {}

    def keep(self, before: fx.Node, recipe: Recipe) -> fx.Node:
        """Returns the visible keys, boolean `[batch or 1, keys]`, shared by all attentions."""
        found = self.value(before, recipe)
        if self.info[found.name].dtype == torch.bool:
            return found
        truth = ("truth", recipe)
        if truth not in self.made:
            with self.graph.inserting_before(before):
                self.made[truth] = self._call(aten.ne.Scalar, found, 0)
        return self.made[truth]

    def value(self, before: fx.Node, recipe: Recipe) -> fx.Node:
        """Returns values by (sample, key), `[batch or 1, keys]`, shared by all attentions."""
        if recipe not in self.made:
            with self.graph.inserting_before(before):
                self.made[recipe] = self._emit(recipe)
        return self.made[recipe]

    def _emit(self, recipe: Any) -> Any:
        if not isinstance(recipe, tuple):
            return recipe
        if recipe[0] == "get":
            return self._get(*recipe[1:])
        if recipe[0] == "cast":
            return self._call(aten._to_copy.default, self._emit(recipe[2]), dtype=recipe[1])
        first, *rest = map(self._emit, recipe[1:])
        op = _OPS[str(recipe[0])]
        if not isinstance(first, fx.Node):  # a number first: the op wants a tensor there
            (other,) = rest
            first = self._call(aten.full_like.default, other, first)
        if rest and not isinstance(rest[0], fx.Node) and recipe[0] not in ("add", "sub", "mul"):
            op = getattr(aten, recipe[0]).Scalar
        made: fx.Node = self._call(op, first, *rest)
        return made

    def _get(self, name: str, fixed: tuple[tuple[int, int], ...], sample: int, key: int) -> fx.Node:
        """Emits a tensor indexed by (sample, key), of size 1 where it is constant."""
        found: fx.Node = self.nodes[name]
        for dim, position in sorted(fixed, reverse=True):
            found = self._call(aten.select.int, found, dim, position)
        if sample > key >= 0:
            found = self._call(aten.transpose.int, found, 0, 1)
        if sample < 0:
            found = self._call(aten.unsqueeze.default, found, 0)
        if key < 0:
            found = self._call(aten.unsqueeze.default, found, 1)
        return found

    def _call(self, op: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(op, args, kwargs)
        values = tree_map(lambda x: x.meta["val"] if isinstance(x, fx.Node) else x, args)
        mode = detect_fake_mode([v for v in values if isinstance(v, Tensor)])
        assert mode is not None, "a program's values are fake"
        with mode:
            node.meta["val"] = op(*values, **kwargs)
        if isinstance(node.meta["val"], Tensor):
            self.info[node.name] = self._info(op, args, node.meta["val"])
        return node

    def _info(self, op: Callable[..., Any], args: tuple[Any, ...], value: Tensor) -> TensorInfo:
        """Returns the result's shape in symbols of dims: these ops keep, drop or add dims."""
        shapes = [self.info[a.name].shape for a in args if isinstance(a, fx.Node)]
        shape = list(shapes[0])
        if op is aten.select.int:
            del shape[args[1]]
        elif op is aten.transpose.int:
            shape.reverse()
        elif op is aten.unsqueeze.default:
            shape.insert(args[1], sympy.Integer(1))
        else:
            for other in shapes[1:]:
                shape = [a if b == 1 else b for a, b in zip(shape, other, strict=True)]
        return TensorInfo(tuple(shape), value.dtype, False)
