"""Torch ops that stand for a region of a forward graph, from a sort of rows by value to its end.

An op is made as an autograd function's is (`own_functions.py`): a name for passes that look at
forward alone, in whose place a joint graph has the region's own calls.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.fx.node import map_aggregate
from torch.utils._pytree import tree_structure

from dcpc.ops.own_functions import OwnFunction, op_of

_BODIES: dict[str, fx.GraphModule] = {}  # by code
_CODE: dict[object, tuple[str, float]] = {}  # op -> code and FLOPs
KEPT = 16  # constants up to this are never divided


class Routed:
    """A region's graph in the place of an autograd function."""

    @staticmethod
    def apply(code: str, *operands: Tensor) -> Any:
        """Returns the region's result."""
        return _BODIES[code](*operands)


def routed_op(body: fx.Graph, flops: float) -> OpOverload:
    """Returns the op of a region, the same one for equal graphs.

    Args:
        body: region; placeholders: its operands; output: one tensor.
        flops: FLOPs of its products, for each element of its result.
    """
    gm = fx.GraphModule(torch.nn.Module(), body, "Routed")
    _BODIES.setdefault(gm.code, gm)
    count = len(body.find_nodes(op="placeholder"))
    leaves = (gm.code, *("Tensor",) * count)
    operands, tree = tuple(range(1, count + 1)), tree_structure(leaves)
    op = op_of(OwnFunction(Routed, leaves, operands, tree, (0,), None, nullcontext))
    _CODE[op] = gm.code, flops
    return op


def routed_flops(op: object) -> float:
    """Returns the FLOPs of a region's products for each element of its result; 0: no region."""
    return _CODE[op][1] if op in _CODE else 0.0


def as_tried(op: Any, divisor: int, wide: bool) -> Callable[..., Any]:
    """Returns the function that a trial runs: of a region its graph, with numbers changed alike.

    Args:
        op: any op.
        divisor: divisor of the operands' large sizes, and of the region's numbers.
        wide: whether operands of the trial are float64; then no call casts to another float.
    """
    if op not in _CODE:
        return op  # type: ignore[no-any-return]

    def other(x: Any) -> Any:
        if wide and isinstance(x, torch.dtype) and x.is_floating_point:
            return torch.float64
        if type(x) is not int or x <= KEPT or divisor == 1:
            return x
        return next((y // divisor - y + x for y in (x, x + 1) if y % divisor == 0), x)

    graph = fx.Graph()
    graph.output(graph.graph_copy(_BODIES[_CODE[op][0]].graph, {}))
    for node in graph.nodes:
        if node.op == "call_function":
            node.args, node.kwargs = map_aggregate((node.args, node.kwargs), other)
            if wide and node.target is torch.ops.aten._grouped_mm.default:
                node.target = _grouped_product
    return fx.GraphModule(torch.nn.Module(), graph)


def _grouped_product(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Returns torch's grouped product in float64, which torch does not have."""
    borders = [0, *ends.tolist()]
    parts = [x[a:b] @ w for a, b, w in zip(borders, borders[1:], weights, strict=False)]
    return torch.cat([*parts, x.new_zeros(len(x) - borders[-1], weights.shape[-1])])
