"""Makes numbers that Dynamo passes to a captured graph constants of the graph."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import SymFloat, SymInt, Tensor, fx
from torch._dynamo.exc import TensorifyScalarRestartAnalysis
from torch._dynamo.symbolic_convert import TensorifyState

from dcpc.errors import TraceError


def fix_numbers(gm: fx.GraphModule) -> None:
    """Makes Dynamo capture again, with guards on the values of numbers in place of arguments.

    With `dynamic=True` each number of a module (an epsilon, a probability) is passed as a tensor,
    made anew in each call, and read in the graph. Inductor requests the same.

    Raises:
        TensorifyScalarRestartAnalysis: there are such numbers; Dynamo starts again.
    """
    found = {n: _symbol(n) for n in gm.graph.find_nodes(op="placeholder") if is_number(n)}
    read = {symbol for n, symbol in found.items() if all(u.target == "item" for u in n.users)}
    known = TensorifyState.should_specialize
    if missing := {symbol for symbol in read if symbol and not known(symbol)}:
        for symbol in missing:
            TensorifyState.specialize(symbol)
        raise TensorifyScalarRestartAnalysis


def is_number(placeholder: fx.Node) -> bool:
    """Whether an argument of a captured graph is a number, passed as a tensor."""
    return bool(getattr(placeholder.meta.get("grapharg"), "pass_arg_as_tensor", False))


def _symbol(placeholder: fx.Node) -> str:
    """Returns Dynamo's name of a number, or "" if Dynamo may not fix it."""
    number = getattr(placeholder.meta.get("example_value"), "item_memo", None)
    return str(number.node._expr) if isinstance(number, SymFloat) else ""


def with_numbers(gm: fx.GraphModule, numbers: Mapping[int, int | float]) -> fx.GraphModule:
    """Returns a captured graph in which some arguments are replaced by constants.

    Args:
        gm: graph module from Dynamo; not changed.
        numbers: position of an argument -> its value. A float is passed as a tensor.
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    placeholders = graph.find_nodes(op="placeholder")
    for position, value in numbers.items():
        if isinstance(value, int):
            _read_instead(placeholders[position], value)
            continue
        for item in [*placeholders[position].users]:
            if item.target != "item":
                raise TraceError(
                    f"argument '{placeholders[position].name}' of the captured graph: got a number "
                    f"that {item.format_node()} takes for a tensor; expected item() alone"
                )
            _read_instead(item, value)
            graph.erase_node(item)
    return fx.GraphModule(gm, graph)


def value_of(number: Any) -> int | float:
    """Returns a number that is passed as a tensor or as it is.

    Args:
        number: value of the argument. A symbol gives its hint, as Dynamo would guard on its value.
    """
    if isinstance(number, SymInt):
        return int(number.node.hint)
    return float(number) if isinstance(number, Tensor) else int(number)


def _read_instead(node: fx.Node, value: int | float) -> None:
    """Replaces a node by a number in its users."""

    def taken(leaf: Any) -> Any:
        return value if leaf is node else leaf

    for user in [*node.users]:
        args, kwargs = fx.node.map_aggregate((user.args, user.kwargs), taken)
        user.args, user.kwargs = args, kwargs
