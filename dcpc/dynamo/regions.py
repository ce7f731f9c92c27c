"""Inlines regions that Dynamo keeps as nested graphs."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx

# An op that runs a graph -> the position of the first value that it passes to this graph.
_RUNS: Mapping[Any, int] = {
    torch.ops.higher_order.tag_activation_checkpoint: 1,  # checkpoint(): dcpc plans recompute
    torch.ops.higher_order.invoke_subgraph: 2,  # nested_compile_region: after the graph and a name
}


def without_regions(gm: fx.GraphModule) -> fx.GraphModule:
    """Returns a captured graph with its regions' calls inlined.

    The results stay the same. A region's own choice of recompute is dropped: recompute is planned,
    as for every other value.

    Args:
        gm: graph from Dynamo; not changed, and returned if it has no regions.
    """
    if not any(n.target in _RUNS for n in gm.graph.nodes):
        return gm
    graph = fx.Graph()
    graph.output(_copied(graph, gm, "", None))
    return fx.GraphModule(gm, graph)


def _copied(graph: fx.Graph, source: fx.GraphModule, path: str, given: Iterable[Any] | None) -> Any:
    """Copies the calls of a graph into another one, and returns the values of its outputs.

    Args:
        graph: graph to append to.
        source: graph to copy.
        path: name of `source` in the outermost module, with a dot behind it; "" is that module.
        given: values of its arguments; None: they become arguments of `graph`.
    """
    values: dict[fx.Node, Any] = {}
    arguments = None if given is None else iter(given)

    def value(node: fx.Node) -> Any:
        return values[node]

    for node in source.graph.nodes:
        if node.op == "placeholder" and arguments is not None:
            values[node] = next(arguments)
        elif node.op == "output":
            return fx.node.map_arg(node.args[0], value)
        elif node.target in _RUNS:
            name = str(node.args[0].target)
            passed = fx.node.map_arg(node.args[_RUNS[node.target] :], value)
            values[node] = _copied(graph, getattr(source, name), f"{path}{name}.", passed)
        elif node.target is operator.getitem and isinstance(values[node.args[0]], tuple | list):
            values[node] = values[node.args[0]][node.args[1]]
        elif node.op == "get_attr":
            if not all(user.target in _RUNS for user in node.users):
                values[node] = graph.node_copy(node, value)
                values[node].target = path + str(node.target)
        else:
            values[node] = graph.node_copy(node, value)
    raise AssertionError("a graph has an output")
