"""Helpers for graphs of thousands of nodes, and for the source lines of nodes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch.fx._lazy_graph_module
from torch import fx
from torch.fx.node import map_aggregate

from dcpc.errors import is_ours, lies_in_no_file

# Its Python is made when it is called.
LazyGraphModule = torch.fx._lazy_graph_module._LazyGraphModule
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')


def without_unused(graph: fx.Graph) -> None:
    """Erases the calls whose values nobody reads.

    `Graph.eliminate_dead_code` also does this, but checks whether each op is pure. In a lowered
    graph all unused calls may go, also those that draw random numbers, as each draws its own.
    """
    for node in reversed(graph.nodes):
        if node.op == "call_function" and not node.users:
            graph.erase_node(node)


def op_name(node: fx.Node) -> str:
    """Returns the name of a node's op, or "" if it has none."""
    return str(getattr(node.target, "_opname", ""))


def source_line(node: fx.Node) -> str:
    """Returns `file:line` of a user's code that made a node, "" where it is of none.

    It is the innermost frame outside of torch and of dcpc. Code that torch generates
    (`<eval_with_key>`, for a no_grad block) is skipped.
    """
    frames = _FRAME.findall(str(node.meta.get("stack_trace", "")))
    users = [f for f in frames if _is_users(f[0])]
    if not users:
        return ""
    file, line = users[-1]
    return f"{'/'.join(file.split('/')[-2:])}:{line}"


def _is_users(file: str) -> bool:
    if file.startswith("<"):
        return lies_in_no_file(file)
    return "/torch/" not in file and not is_ours(file)


def called_on_cpu(node: fx.Node, known: Mapping[fx.Node, Any]) -> Any:
    """Returns the result of a node's call on CPU values, whatever device its arguments name."""

    def given(x: Any) -> Any:
        if isinstance(x, fx.Node):
            return known[x]
        return torch.device("cpu") if isinstance(x, torch.device) else x

    assert callable(node.target), f"{node} is no call"
    args, kwargs = map_aggregate((node.args, {**node.kwargs}), given)
    return node.target(*args, **kwargs)
