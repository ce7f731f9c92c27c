"""Builds the forward and backward graphs of a schedule, and splits a backward in two."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from dcpc.codegen.away.leaving import STANDS_FOR
from dcpc.codegen.joint.gathers import ROW_CALLS
from dcpc.fx.large_graphs import LazyGraphModule
from dcpc.ir import DividedBackward, Partition, Schedule


def partition(schedule: Schedule, names: Mapping[sympy.Symbol, sympy.Expr]) -> Partition:
    """Returns the forward and backward graphs of a schedule."""
    taken = (*schedule.saved, *schedule.backward_primals)
    return Partition(
        forward=_module(schedule.primals, schedule.forward, (*schedule.outputs, *schedule.saved)),
        backward=_module((*taken, *schedule.tangents), schedule.backward, schedule.gradients),
        resident=tuple(n.name for n in schedule.primals if isinstance(n.meta["val"], Tensor)),
        saved=tuple(n.name for n in schedule.saved),
        backward_primals=tuple(n.name for n in schedule.backward_primals),
        names=names,
        returned=len(schedule.outputs),
        begins=schedule.begins,
    )


def divided(
    calls: Sequence[fx.Node], gradients: Sequence[fx.Node | None], first: Collection[int]
) -> tuple[list[fx.Node], list[fx.Node], list[fx.Node]]:
    """Returns the calls that the first gradients need, the other calls, and the values these read.

    Both parts keep the order of the whole. A value that both parts recompute is made in the first
    part and kept.

    Args:
        calls: calls of a backward graph.
        gradients: gradients that the graph returns.
        first: indices of the gradients to produce in the first part. Default, if empty: the one
            made last, so that for a graph without trainable inputs the second part is little more
            than products for weights.
    """
    known = {n: gradient for n, gradient in enumerate(gradients) if gradient is not None}
    if not known:
        return [], [*calls], []
    place = {node: i for i, node in enumerate(calls)}
    wanted = first or [max(known, key=lambda n: place.get(known[n], -1))]
    needed = _needed(calls, gradients, wanted)
    early = [n for n in calls if n in needed]
    late = [n for n in calls if n not in needed]
    after = {*late}
    read = [source for n in late for source in n.all_input_nodes]
    read += [g for n, g in known.items() if n not in first and g not in needed]
    return early, late, [n for n in dict.fromkeys(read) if n not in after]


def divide(backward: fx.GraphModule, first: Collection[int]) -> DividedBackward | None:
    """Returns a backward graph in two parts, or None if one of them would be empty."""
    nodes = [*backward.graph.nodes]
    given, calls = ([n for n in nodes if n.op == op] for op in ("placeholder", "call_function"))
    outputs: Any = backward.graph.output_node().args[0]
    early, late, kept = divided(calls, outputs, first)
    if not early or not late:
        return None
    own = {*early}
    known = [n for n, gradient in enumerate(outputs) if gradient is not None]
    numbers = tuple(n for n in known if n in first or outputs[n] in own)
    others = tuple(n for n in known if n not in numbers)
    return DividedBackward(
        _module(given, early, (*(outputs[n] for n in numbers), *kept)),
        _module(kept, late, [outputs[n] for n in others]),
        numbers,
        others,
    )


def _needed(
    calls: Sequence[fx.Node], gradients: Sequence[fx.Node | None], numbers: Collection[int]
) -> set[fx.Node]:
    """Returns the calls that some of the gradients need, and the getitems of these calls."""
    read = {gradients[n] for n in numbers}
    needed = set()
    for node in reversed(calls):
        if node in read:
            needed.add(node)
            read.update(node.all_input_nodes)
    # Else all values of a call would live until one of them is picked.
    needed |= {n for n in calls if n.target is operator.getitem and n.args[0] in needed}
    return needed


def _module(
    placeholders: Sequence[fx.Node], calls: Sequence[fx.Node], outputs: Sequence[fx.Node | None]
) -> fx.GraphModule:
    graph = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    for node in placeholders:
        made[node] = graph.placeholder(node.name)
    token: fx.Node | None = None
    for node in calls:
        made[node] = graph.node_copy(node, lambda n: made[n])
        if STANDS_FOR in node.meta:
            made[node.meta[STANDS_FOR]] = made[node]
        if node.target in ROW_CALLS:  # whatever compiles the graph keeps their order
            if token is not None:
                made[node].kwargs = {**made[node].kwargs, "token": token}
            last = len(node.meta["val"]) - 1
            # An explicit name: the default one, "getitem", may be that of a later call.
            args, name = (made[node], last), f"{node.name}_token"
            token = graph.create_node("call_function", operator.getitem, args, name=name)
            token.meta = {"val": node.meta["val"][last], "storage": node.meta["storage"][last:]}
    for node in (*placeholders, *calls):
        copy = made[node]
        copy.meta = {k: v for k, v in node.meta.items() if k in ("val", "storage")}
    graph.output(tuple(None if n is None else made[n] for n in outputs))
    graph.lint()
    return LazyGraphModule(torch.nn.Module(), graph)
