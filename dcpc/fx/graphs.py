"""Graphs of thousands of nodes, most of them only planned with, and the lines of their nodes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch.fx._lazy_graph_module
from torch import fx
from torch.fx.node import map_aggregate

# Its Python is made when it is called.
LazyGraphModule = torch.fx._lazy_graph_module._LazyGraphModule
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')


def without_unused(graph: fx.Graph) -> None:
    """Erases the calls whose values nobody reads.

    `Graph.eliminate_dead_code` does so as well, and asks each op whether it may go: of the ops in a
    lowered graph all may, those that draw random numbers too, since each draws its own.
    """
    for node in reversed(graph.nodes):
        if node.op == "call_function" and not node.users:
            graph.erase_node(node)


def op_name(node: fx.Node) -> str:
    """Returns the name of a node's op, "" where it is none."""
    return str(getattr(node.target, "_opname", ""))


def source_line(node: fx.Node) -> str:
    """Returns `file:line` of the code that made a node: the innermost frame outside of torch.

    What torch generates on its way (`<eval_with_key>`, of a no_grad block) is nobody's file.
    """
    frames = _FRAME.findall(str(node.meta.get("stack_trace", "")))
    ours = [f for f in frames if "/torch/" not in f[0] and not f[0].startswith("<")]
    if not ours:
        return ""
    file, line = ours[-1]
    return f"{'/'.join(file.split('/')[-2:])}:{line}"


def called_on_cpu(node: fx.Node, known: Mapping[fx.Node, Any]) -> Any:
    """Returns what a node's call gives for values on the CPU, whatever device it names itself."""

    def given(x: Any) -> Any:
        if isinstance(x, fx.Node):
            return known[x]
        return torch.device("cpu") if isinstance(x, torch.device) else x

    assert callable(node.target), f"{node} is no call"
    args, kwargs = map_aggregate((node.args, {**node.kwargs}), given)
    return node.target(*args, **kwargs)
