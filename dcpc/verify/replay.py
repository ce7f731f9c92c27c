"""Copies of dcpc's graphs that run node by node, in float64 and with known random numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from dcpc.acceptance.exactness import LOW
from dcpc.codegen import RUN
from dcpc.verify.draws import known_normal, known_uniform

Watch = Callable[[fx.Node, Any], None]
Size = list[int]


def replayed(gm: fx.GraphModule, *, wide: bool, alike: bool) -> fx.GraphModule:
    """Returns a copy of a graph to compare with the plain model.

    Args:
        gm: not changed.
        wide: whether every lower floating dtype that a call names is float64.
        alike: see `draws.KnownDraws`.
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    for node in graph.nodes:
        if node.op == "call_function":
            node.target = _draw(node.target, alike) or RUN.get(node.target, node.target)
            if wide:
                node.args = fx.node.map_aggregate(node.args, _wide_dtype)
                node.kwargs = fx.node.map_aggregate(node.kwargs, _wide_dtype)
    return fx.GraphModule(gm, graph)


def _draw(target: Any, alike: bool) -> Callable[..., Tensor] | None:
    known = {
        torch.ops.dcpc.uniform.default: known_uniform,
        torch.ops.dcpc.normal.default: known_normal,
    }.get(target)
    if known is None:
        return None

    def drawn(
        size: Size, seed: int, salt: int, index: int, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        return known(size, alike, dtype, device)

    return drawn


def _wide_dtype(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value in LOW else value


class Watched(fx.Interpreter):
    """Runs a graph and shows each node's value."""

    def __init__(self, gm: fx.GraphModule, watch: Watch) -> None:
        """Takes what is called with each node and its value."""
        super().__init__(gm)
        self.watch = watch

    def run_node(self, n: fx.Node) -> Any:
        """Runs one node."""
        value = super().run_node(n)
        self.watch(n, value)
        return value


def in_order(gm: fx.GraphModule, values: Mapping[str, Any]) -> list[Any]:
    """Returns the values of a graph's placeholders, in their order."""
    return [values[n.name] for n in gm.graph.nodes if n.op == "placeholder"]
