"""Extracts part of a graph as a graph: two layers of many are enough to time them."""

from __future__ import annotations

import operator
from collections.abc import Collection

import torch
from torch import fx


def excerpt(gm: fx.GraphModule, keep: Collection[str]) -> fx.GraphModule:
    """Returns the calls of these names as a graph; `gm` is only read.

    Returns:
        Placeholders: the integers of `gm`, then all other values that the calls read, by name;
        outputs: the values that no call here reads, or that a call elsewhere reads.
    """
    kept = {n for n in gm.graph.nodes if n.op == "call_function" and _goes(n, keep)}
    integers = [n for n in gm.graph.nodes if n.op == "placeholder" and _is_integer(n)]
    read = [s for n in gm.graph.nodes if n in kept for s in n.all_input_nodes if s not in kept]
    graph = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    for source in dict.fromkeys((*integers, *read)):
        if source.op == "get_attr":
            made[source] = graph.node_copy(source)
            continue
        made[source] = graph.placeholder(source.name)
        made[source].meta = dict(source.meta)
    for node in gm.graph.nodes:
        if node in kept:
            made[node] = graph.node_copy(node, made.__getitem__)
    results = [n for n in gm.graph.nodes if n in kept and not kept.issuperset(n.users)]
    results += [n for n in gm.graph.nodes if n in kept and not n.users]
    graph.output(tuple(made[n] for n in results if isinstance(n.meta["val"], torch.Tensor)))
    return fx.GraphModule(gm, graph)


def _goes(node: fx.Node, keep: Collection[str]) -> bool:
    if node.target is operator.getitem:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        return source.name in keep
    return node.name in keep


def _is_integer(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.SymInt | int)
