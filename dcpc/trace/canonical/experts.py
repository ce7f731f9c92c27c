"""Makes one call of a mixture's experts, from the sort of the tokens by expert to their results.

    sort(ids); x[order // k]; grouped products; [order]   ─►   dcpc_function::Routed_1a2b3c(x, ...)

Inside, rows stand in an order that depends on values, so no call there may have a piece of them.
From entry to exit each token has a row of its own, which the rule that is derived for the call
shows by trials. Calls that others read, too, such as a count of tokens for a loss, stay besides.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from dcpc.ops.routed import routed_op
from dcpc.trace.canonical.editor import Editor, expression

aten = torch.ops.aten
_SORTS = (aten.sort.default, aten.sort.stable, aten.argsort.default, aten.argsort.stable)
MOST_CALLS = 100  # of a region


def replace_routed(graph: fx.Graph) -> None:
    """Replaces each region of the graph, in place."""
    sorts = [node for node in graph.nodes if node.target in _SORTS]
    if not sorts or not any(map(_multiplies, graph.nodes)):
        return
    for sort in sorts:
        rows = _rows(sort)
        if rows.is_Integer:
            continue
        met = (n for n in _met(sort) if _size(n) == rows)
        last = next((n for n in met if n.meta["val"].ndim > 1), None)
        if last is not None:
            _replace(graph, sort, last, rows)


def _met(source: fx.Node) -> Iterator[fx.Node]:
    """Yields the nodes that every path from a node passes, the nearest first."""
    reached, on_the_way, node = {source}, len(source.users), source.next
    while node.op != "output":
        ends = sum(given in reached for given in node.all_input_nodes)
        if ends:
            reached.add(node)
            if ends == on_the_way:
                yield node
            on_the_way += len(node.users) - ends
        node = node.next


def _replace(graph: fx.Graph, sort: fx.Node, last: fx.Node, rows: sympy.Expr) -> None:
    inside: set[fx.Node] = set()
    todo = [sort]
    while todo:
        node = todo.pop()
        if node not in inside:
            inside.add(node)
            todo += node.users if node is not last else ()
    operands: set[fx.Node] = set()
    todo = [*inside]
    while todo and len(inside) < MOST_CALLS:
        for given in todo.pop().all_input_nodes:
            if given in inside or not isinstance(given.meta.get("val"), Tensor | tuple | list):
                continue  # sizes are made of the operands'
            if given.op != "call_function" or _size(given) == rows:
                operands.add(given)
            else:
                inside.add(given)
                todo.append(given)
    given_rows = any(_size(n) == rows for n in operands)
    if todo or not given_rows or not any(map(_multiplies, inside)) or any(map(_draws, inside)):
        return
    ordered = [n for n in graph.nodes if n in operands]
    body = _body([n for n in graph.nodes if n in inside], ordered, last, rows)
    if body is not None:
        flops = sympy.Add(*map(_flops, inside)) / sympy.Mul(
            *map(expression, last.meta["val"].shape)
        )
        op = routed_op(body, float(sympy.simplify(flops)))
        last.replace_all_uses_with(Editor(last).call(op, *ordered))


def _body(
    calls: list[fx.Node], operands: list[fx.Node], last: fx.Node, rows: sympy.Expr
) -> fx.Graph | None:
    """Returns a region as a graph with sizes of its operands; None if a size is not of the rows."""
    body = fx.Graph()
    made = {n: body.placeholder(f"x{i}") for i, n in enumerate(operands)}
    row = next(made[n] for n in operands if _size(n) == rows)
    count = body.call_function(aten.sym_size.int, (row, 0))
    foreign = False

    def local(node: fx.Node) -> Any:
        nonlocal foreign
        if node in made:
            return made[node]
        size = expression(node.meta["val"])
        times = size if size.is_Integer else sympy.simplify(size / rows)
        foreign |= not times.is_Integer
        if foreign or size.is_Integer:
            return None if foreign else int(size)
        return body.call_function(operator.mul, (count, int(times))) if times != 1 else count

    for node in calls:
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), local)
        target: Any = node.target
        made[node] = body.call_function(target, args, kwargs)
    body.output(made[last])
    return None if foreign else body


def _multiplies(node: fx.Node) -> bool:
    return "grouped_mm" in str(node.target)


def _draws(node: fx.Node) -> bool:
    """Returns whether a call may draw numbers, or depends on more than its operands."""
    op = node.target
    own = isinstance(op, torch._ops.OpOverload) and op.namespace in ("dcpc", "dcpc_function")
    return own or torch.Tag.nondeterministic_seeded in getattr(op, "tags", ())


def _flops(node: fx.Node) -> sympy.Expr:
    """Returns the FLOPs of a grouped product of rows."""
    if not _multiplies(node):
        return sympy.Integer(0)
    x: Any = node.args[0]
    return 2 * sympy.Mul(*map(expression, (*x.meta["val"].shape, node.meta["val"].shape[-1])))


def _rows(sort: fx.Node) -> sympy.Expr:
    """Returns the number of tokens that sorted numbers are of, each with one or several."""
    node: Any = sort.args[0]
    if node.meta["val"].ndim != 1:
        return sympy.Integer(0)
    if node.target is aten.reshape.default and node.args[0].meta["val"].ndim == 2:
        node = node.args[0]
    return _size(node)


def _size(node: fx.Node) -> sympy.Expr:
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or not value.ndim:
        return sympy.Integer(-1)
    return expression(value.shape[0])
