"""Checks that tables indexed by position (position embeddings) have a row for each position."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import sympy
import torch
from torch import fx

from dcpc.buckets import BATCH, Buckets
from dcpc.errors import TraceError
from dcpc.fx.large_graphs import op_name, source_line
from dcpc.ir import Program, tensor_operands

aten = torch.ops.aten

_ARANGES = (aten.arange.default, aten.arange.start, aten.arange.start_step)
# Ops that leave the numbers of their first operand as they are.
_MOVES = {
    *("view", "reshape", "unsqueeze", "squeeze", "expand", "clone", "contiguous", "alias"),
    *("detach", "repeat", "_to_copy", "to", "flatten", "_unsafe_view", "lift_fresh_copy"),
}


def refuse_short_tables(program: Program, buckets: Buckets) -> None:
    """Refuses an embedding table of positions 0, 1, ... with fewer rows than a bucket needs.

    Without this check torch raises an index error in the first step of that bucket.

    Raises:
        TraceError: a table is shorter than a bucket needs.
    """
    for table, end in _reads(program):
        (of,) = tensor_operands(table, program.info)[:1]
        rows = program.info[of.name].shape[0]
        where = source_line(table)
        for bucket in buckets.buckets if rows.is_Integer else ():
            dims = program.dims({BATCH: 1, **bucket.sizes})
            count = int(end.subs(dims)) if end.free_symbols <= dims.keys() else 0
            if count > rows:
                at = f" at {where}" if where else ""
                raise TraceError(
                    f"bucket {bucket}: got positions up to {count - 1}{at}, of a table of {rows} "
                    "rows; expected a row for each; make the table longer, or leave that bucket out"
                )


def _reads(program: Program) -> Iterator[tuple[fx.Node, sympy.Expr]]:
    """Yields the embeddings that are indexed by an `arange`, each with the end of its positions."""
    for node in program.gm.graph.nodes:
        if node.target in _ARANGES:
            yield from _readers(node, _end(node, program.scalars))


def _end(node: fx.Node, scalars: Mapping[str, sympy.Expr]) -> sympy.Expr:
    args: list[Any] = [scalars[a.name] if isinstance(a, fx.Node) else a for a in node.args[:3]]
    step = args[2] if len(args) > 2 else 1
    end = args[0] if len(args) == 1 else args[1]
    return sympy.sympify(end) if step == 1 else sympy.Integer(0)


def _readers(positions: fx.Node, end: sympy.Expr) -> Iterator[tuple[fx.Node, sympy.Expr]]:
    todo = [(positions, end)]
    while todo:
        node, end = todo.pop()
        for user in node.users:
            if user.target is aten.embedding.default and user.args[1] is node:
                yield user, end
            elif user.op == "call_function" and user.args[:1] == (node,):
                name = op_name(user)
                if name in _MOVES:
                    todo.append((user, end))
                elif name == "add" and isinstance(user.args[1], int):
                    todo.append((user, end + user.args[1]))
