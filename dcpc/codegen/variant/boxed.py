"""Turns graphs into Python functions of one list, which they empty to free values early."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from dcpc.codegen.variant.empty import SAFE, dense

Boxed = Callable[[list[Any]], Any]


def _group_norm(*args: Any) -> Any:
    return torch.ops.aten.native_group_norm.default(*map(dense, args))


def _group_norm_backward(*args: Any) -> Any:
    return torch.ops.aten.native_group_norm_backward.default(*map(dense, args))


# op -> function that runs for it. A kernel may return other strides than torch's fake tensors have
# (batch norms of a transposed input): a view of the fake one may need a copy of the real one.
# Group norms take memory as it lies only if it is dense in some format, and weights that have no
# strides of their own; torch copies above its dispatch.
RUN = {
    **SAFE,
    torch.ops.aten.view.default: torch.ops.aten.reshape.default,
    torch.ops.aten.native_group_norm.default: _group_norm,
    torch.ops.aten.native_group_norm_backward.default: _group_norm_backward,
}


def handing_over(gm: fx.GraphModule) -> Boxed:
    """Returns a backward graph that passes each gradient to its last argument once it is made."""
    graph = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    outputs: Any = graph.graph_copy(gm.graph, made)
    with graph.inserting_before(next(n for n in graph.nodes if n.op != "placeholder")):
        hand_over = graph.placeholder("hand_over")
    results: list[Any] = []
    for number, gradient in enumerate(outputs):
        if gradient is not None:
            after = hand_over if gradient.op == "placeholder" else gradient
            with graph.inserting_after(after):
                gradient = graph.call_function(_call, (hand_over, number, gradient))
        results.append(gradient)
    graph.output(tuple(results))
    return boxed_python(fx.GraphModule(gm, graph))


def _call(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


def boxed_python(gm: fx.GraphModule) -> Boxed:
    """Returns a graph as a function of one list, which it empties to free values early."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    for node in graph.nodes:
        node.target = RUN.get(node.target, node.target)
    graph.set_codegen(fx.graph._BoxedCodeGen())
    return fx.GraphModule(gm, graph).forward
