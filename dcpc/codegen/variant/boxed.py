"""Turns graphs into Python functions of one list, which they empty to free values early.

Ops run by torch's own Python functions, where these call the same op in less time:

    torch.ops.aten.mul.Tensor(x, y)    4.0 us    any op, its arguments boxed by its schema
    torch.mul(x, y)                    1.3 us    the same op

A graph of a GPT with 6 layers makes 1,500 calls a micro-batch, forward and backward. Views that are
a tensor which there is already, as autograd leaves them in a graph, are not made.
`tests/codegen/variant/test_boxed.py` compares each function with its op: what torch dispatches, and
the bits of the results.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from dcpc.codegen.variant.empty import SAFE, dense
from dcpc.ops.attention import DIRECT

aten = torch.ops.aten

Boxed = Callable[[list[Any]], Any]


def _group_norm(*args: Any) -> Any:
    return aten.native_group_norm.default(*map(dense, args))


def _group_norm_backward(*args: Any) -> Any:
    return aten.native_group_norm_backward.default(*map(dense, args))


# op -> function that runs for it. Group norms take memory as it lies only if it is dense in some
# format, and weights that have no strides of their own; torch copies above its dispatch.
RUN = {
    **SAFE,
    **DIRECT,
    aten.native_group_norm.default: _group_norm,
    aten.native_group_norm_backward.default: _group_norm_backward,
    # Strides of a real tensor may differ from its fake one's: a view may need a copy.
    aten._unsafe_view.default: torch.reshape,
    aten.view.default: torch.reshape,
}
# Ops of one overload, which torch's function of the same name calls.
_NAMES = (
    "_log_softmax", "_log_softmax_backward_data", "_softmax", "_softmax_backward_data", "abs",
    "addmm", "baddbmm", "bmm", "cat", "clone", "cos", "embedding", "erf", "exp", "log", "maximum",
    "minimum", "mm", "native_layer_norm", "neg", "permute", "reciprocal", "relu", "reshape",
    "rsqrt", "sigmoid", "sin", "sqrt", "t", "tanh", "unsqueeze",
)  # fmt: skip
# Op -> function; of the operands the first is a tensor, so that torch finds this overload.
BINDINGS: dict[Any, Callable[..., Any]] = {
    **{getattr(aten, name).default: getattr(torch, name) for name in _NAMES},
    **{getattr(aten, name).Tensor: getattr(torch, name) for name in ("add", "div", "mul", "sub")},
    **{
        getattr(getattr(aten, name), kind): getattr(torch, name)
        for name in ("eq", "ge", "gt", "le", "lt", "ne")
        for kind in ("Scalar", "Tensor")
    },
    aten.expand.default: torch.Tensor.expand,
    aten.mean.dim: torch.mean,
    aten.pow.Tensor_Scalar: torch.pow,
    aten.select.int: torch.select,
    aten.silu.default: torch._C._nn.silu,
    aten.gelu.default: torch._C._nn.gelu,
    aten.squeeze.dim: torch.squeeze,
    aten.sum.dim_IntList: torch.sum,
    aten.transpose.int: torch.transpose,
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
    _without_idle_views(graph)
    for node in graph.nodes:
        node.target = RUN.get(node.target) or _binding(node) or node.target
    graph.set_codegen(fx.graph._BoxedCodeGen())
    return fx.GraphModule(gm, graph).forward


def _binding(node: fx.Node) -> Callable[..., Any] | None:
    """Returns torch's function for a call of a graph; None: it is called as it is."""
    number_first = bool(node.args) and isinstance(node.args[0], (int, float, complex))
    return None if number_first else BINDINGS.get(node.target)


def _without_idle_views(graph: fx.Graph) -> None:
    """Removes calls whose result is a tensor that there is already, in place.

    What the graph returns stays: a result must not be the same object as an input.
    """
    returned = {*graph.output_node().all_input_nodes}
    for node in [*graph.nodes]:
        same = _same(node)
        if same is not None and node not in returned:
            node.replace_all_uses_with(same)
            given = node.args[0]
            graph.erase_node(node)
            if isinstance(given, fx.Node) and given is not same and not given.users:
                graph.erase_node(given)  # it was made for this view alone


def _same(node: fx.Node) -> fx.Node | None:
    """Returns the node whose elements and strides a view has; None: there is none."""
    given = node.args[0] if node.args else None
    if not isinstance(given, fx.Node):
        return None
    if node.target is aten.detach.default:
        return given
    if node.target is aten.t.default and given.target is aten.t.default:
        inner = given.args[0]
        assert isinstance(inner, fx.Node), "t takes a tensor"
        return inner
    whole = node.target is aten.slice.Tensor and node.args[2:4] == (0, sys.maxsize)
    return given if whole and node.args[4:] in ((), (1,)) else None
