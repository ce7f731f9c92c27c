"""Graphs of thousands of nodes, most of them only planned with."""

from __future__ import annotations

import torch.fx._lazy_graph_module
from torch import fx

# Its Python is made when it is called.
LazyGraphModule = torch.fx._lazy_graph_module._LazyGraphModule


def without_unused(graph: fx.Graph) -> None:
    """Erases the calls whose values nobody reads.

    `Graph.eliminate_dead_code` does so as well, and asks each op whether it may go: of the ops in a
    lowered graph all may, those that draw random numbers too, since each draws its own.
    """
    for node in reversed(graph.nodes):
        if node.op == "call_function" and not node.users:
            graph.erase_node(node)
