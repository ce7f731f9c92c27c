"""Lowers attention for one rank: a piece of the queries, or keys that go round a ring."""

from __future__ import annotations

from collections.abc import Mapping
from math import lcm
from typing import Any

import sympy
import torch
from torch import fx

from dcpc.codegen.collectives.ring import RingCall
from dcpc.codegen.collectives.ring_swap import SwapCall
from dcpc.codegen.lower.local_graph import LocalGraph
from dcpc.ir import Factor, Label, NodePlacement, tensor_operands
from dcpc.ops.attention import Sight
from dcpc.ops.ring_route import RowSplit

aten = torch.ops.aten
HEADS = 1  # a dim of queries, keys, values and output


def local_attention(on: LocalGraph, node: fx.Node, operands: list[fx.Node]) -> fx.Node | None:
    """Returns this rank's part of an attention, or None if it is the same call on pieces.

    If keys are hidden by position or by sequence, the call gets the start of this rank's queries.
    """
    chosen = on.placement.nodes[node.name]
    if chosen.name == "ring":
        return _ring(on, node, operands, chosen)
    given = {k: node.kwargs.get(k) for k in ("before", "after")}
    band = {k: v for k, v in given.items() if isinstance(v, int)}
    packed = len(node.args) > 5 and node.args[5] is not None
    if chosen.name != "q" or not (band or packed):
        return None
    factor, factors = on.factor(node.name, chosen.output), on.placement.factors[node.name]
    outer, *inner = factors[chosen.output.dim]
    if factor.key != outer.key:
        return _masked(on, node, operands, band)
    assert not node.kwargs.get("start"), f"{node}: its queries are a piece already"
    roles = ("start", *("turn", "second") * on.placement.is_zigzag(factor))
    rows = sympy.Mul(*(f.size for f in inner))
    pieces, emit = on.integers.pieces, on.integers.emit
    where = {role: emit(pieces[factor.key, role] * rows) for role in roles}
    copied = on.copy(node, operands)
    copied.kwargs = {**copied.kwargs, **where}
    return copied


# ------------------------------------------------------------------------------------------ masks


def _masked(
    on: LocalGraph, node: fx.Node, operands: list[fx.Node], band: Mapping[str, int]
) -> fx.Node:
    """Emits attention with a mask made of positions, for queries that are not consecutive.

    The piece is then one of an inner factor, such as the first patches of each frame.
    """
    call, emit, label = on.graph.call_function, on.integers.emit, on.label(node)
    device = {"device": node.meta["val"].device}
    factor, factors = on.factor(node.name, label), on.placement.factors[node.name]
    sizes = [f.size for f in factors[label.dim]]
    rows = call(aten.arange.default, (emit(sympy.Mul(*sizes)),), device)
    rows = on.reshape(rows, [emit(size) for size in sizes])
    rows = on.reshape(on.narrowed(rows, label.index, factor), [-1, 1])
    _, key, *_ = tensor_operands(node, on.program.info)
    columns = call(aten.arange.default, (emit(on.program.info[key.name].shape[-2]),), device)
    distance = call(aten.sub.Tensor, (columns, rows))
    mask = call(aten.ones_like.default, (distance,), {"dtype": torch.bool})
    if "after" in band:
        mask = call(aten.le.Scalar, (distance, band["after"]))
    if "before" in band:
        near = call(aten.ge.Scalar, (distance, -band["before"]))
        mask = call(aten.logical_and.default, (mask, near))
    mask = call(aten.unsqueeze.default, (call(aten.unsqueeze.default, (mask, 0)), 0))
    copied = on.copy(node, operands)
    _, _, _, given, _, segment = _tensors(copied)
    with on.graph.inserting_before(copied):
        if segment is not None:
            mask = _same_segment(on, mask, segment, rows)
        if given is not None:
            source, query = node.args[3], node.args[0]
            assert isinstance(source, fx.Node)
            assert isinstance(query, fx.Node)
            of_mask, of_query = (on.program.info[n.name] for n in (source, query))
            own = of_mask.shape[0] in (1, of_query.shape[0])
            assert own or segment is None, f"{node}: samples share a mask, and each has sequences"
            truth = of_mask.dtype == torch.bool
            both = (aten.logical_and.default, (mask, given))
            some = (aten.where.ScalarOther, (mask, given, float("-inf")))
            mask = call(*(both if truth else some))
    copied.args = (*_tensors(copied)[:3], mask, *_tensors(copied)[4:5])
    copied.kwargs = {k: v for k, v in copied.kwargs.items() if k not in band}
    return copied


def _same_segment(on: LocalGraph, mask: fx.Node, segment: fx.Node, rows: fx.Node) -> fx.Node:
    """Returns a mask [1, 1, rows, keys] restricted to equal segments: [b or 1, 1, rows, keys]."""
    call = on.graph.call_function
    own = call(aten.index_select.default, (segment, 1, on.reshape(rows, [-1])))
    own = call(aten.unsqueeze.default, (call(aten.unsqueeze.default, (own, 1)), 3))
    keys = call(aten.unsqueeze.default, (call(aten.unsqueeze.default, (segment, 1)), 2))
    same = call(aten.eq.Tensor, (own, keys))
    return call(aten.logical_and.default, (mask, same))


def _tensors(call: fx.Node) -> list[Any]:
    """Returns query, key, value, mask, keep and segment of an attention; None for missing ones."""
    given = [*call.args, None, None, None][:6]
    assert not {"mask", "keep", "segment"} & call.kwargs.keys(), f"{call}: tensors by name"
    return given


# ------------------------------------------------------------------------------------------ rings


def _ring(on: LocalGraph, node: fx.Node, operands: list[fx.Node], chosen: NodePlacement) -> fx.Node:
    """Emits attention whose keys and values go round a ring, with swaps if ranks share heads."""
    call, across, swap = on.graph.call_function, chosen.across, torch.ops.dcpc.swap.default
    integers = on.integers
    emit: Any = integers.emit  # gives a number, or a node where sizes vary
    copied = on.copy(node, operands)
    query, key, value, mask, keep, segment = _tensors(copied)
    given: dict[str, Any] = dict(copied.kwargs)
    on.graph.erase_node(copied)
    sources = tensor_operands(node, on.program.info)[:2]
    rows = [on.factor(s.name, w) for s, w in zip(sources, chosen.operands, strict=False)]
    inner = [_inner(on, s.name, w) for s, w in zip(sources, chosen.operands, strict=False)]
    each = [emit(size) for size in inner]
    queries, keys = (_row_split(on, f, n) for f, n in zip(rows, each, strict=True))
    heads = [int(on.program.info[s.name].shape[HEADS]) if across > 1 else 0 for s in sources]
    if across > 1:
        repeats = lcm(heads[1], across) // heads[1]
        pieces = [integers.pieces[f.key, f"shared{across}"] for f in rows]
        shared = [emit(piece * n) for piece, n in zip(pieces, inner, strict=True)]
        key, value = (_repeated(on, x, repeats) for x in (key, value))
        of_queries, of_keys = (queries, shared[0], heads[0]), (keys, shared[1], heads[1] * repeats)
        query, key, value = (
            call(swap, (x, *SwapCall.of(True, *rows_and_heads, across, on.group)))
            for x, rows_and_heads in ((query, of_queries), (key, of_keys), (value, of_keys))
        )
    tensors = (query, key, value, mask, keep, segment)
    how = RingCall.of(Sight(**given), queries, keys, across, on.group)
    out = call(torch.ops.dcpc.ring_attention.default, tensors, how._asdict())
    if across == 1:
        return out
    length = emit(integers.length(rows[0]) * inner[0])
    return call(swap, (out, *SwapCall.of(False, queries, length, heads[0], across, on.group)))


def _row_split(on: LocalGraph, factor: Factor, rows: int | fx.Node) -> RowSplit:
    """Returns the split of a factor with `rows` rows an element; it holds nodes if sizes vary."""
    where: Any = (on.integers.emit(factor.size), *on.integers.split(factor), rows)
    return RowSplit(*where)


def _inner(on: LocalGraph, name: str, label: Label) -> sympy.Expr:
    """Returns the number of rows in each element of a dim's outer factor."""
    outer, *inner = on.placement.factors[name][label.dim]
    assert outer.key == on.factor(name, label).key, f"{name}: split along an inner factor"
    return sympy.Mul(*(f.size for f in inner))


def _repeated(on: LocalGraph, x: fx.Node, repeats: int) -> fx.Node:
    """Returns keys or values with each head repeated `repeats` times."""
    if repeats == 1:
        return x
    call = on.graph.call_function
    x = call(aten.unsqueeze.default, (x, HEADS + 1))
    x = call(aten.expand.default, (x, [-1, -1, repeats, -1, -1]))
    return call(aten.flatten.using_ints, (x, HEADS, HEADS + 1))
