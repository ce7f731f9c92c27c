"""Replaces attention over one key by its value, and drops the scores and unused projections.

    attention(q, k, v), one key            ->  v, for every query
    linear of which one part is used       ->  linear of that part of the weight's rows

So an image, a video of one frame, pays nothing for the temporal attention's queries and keys, also
where one matrix makes queries, keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from dcpc.trace.canonical.editor import Editor
from dcpc.trace.canonical.seeded import repeat_heads

aten = torch.ops.aten


def attention_of_one_key(node: fx.Node, edit: Editor) -> fx.Node | None:
    """Returns the value, repeated for every query, where there is one key and no mask; else None.

    The softmax of a single score is 1, so queries and keys have a gradient of zero.
    """
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    q, k, v = (given[n] for n in names[:3])
    assert isinstance(q, fx.Node)
    assert isinstance(k, fx.Node)
    assert isinstance(v, fx.Node)
    one_key = not isinstance(k.meta["val"].shape[-2], torch.SymInt) and k.meta["val"].shape[-2] == 1
    if not one_key or given.get("attn_mask") is not None or given.get("dropout_p"):
        return None
    if given.get("enable_gqa"):
        heads: Any = (q.meta["val"].shape[-3], v.meta["val"].shape[-3])
        v = v if heads[0] == heads[1] else repeat_heads(edit, v, heads[0] // heads[1])
    out, value = node.meta["val"], v.meta["val"]
    if tuple(map(str, out.shape)) == tuple(map(str, value.shape)):
        return v
    if tuple(map(str, out.shape[:-1])) != tuple(map(str, q.meta["val"].shape[:-1])):
        return None  # the queries are broadcast over a batch of keys
    return edit.call(aten.expand.default, v, [*edit.shape(q)[:-1], *edit.shape(v)[-1:]])


def narrow_projections(graph: fx.Graph) -> None:
    """Reduces each linear of which only one part is used to the weight rows of that part."""
    for node in list(graph.nodes):
        if node.target is not aten.linear.default or node.kwargs:
            continue
        chain = _one_part(node)
        if chain is not None:
            _narrow(node, chain)
        elif len(node.users) == 1:
            _narrow_slice(node, next(iter(node.users)))


@dataclass(frozen=True, slots=True)
class _ViewChain:
    """The views between a linear and the `select` of one of its `parts`, in order.

    Attributes:
        views: reshape, permute and transpose calls.
        split: index in `views` of the reshape that splits the last dim into parts.
        dim: dim of the parts in that reshape's result.
        parts: number of parts, the size of `dim`.
        select: call that takes one part.
    """

    views: tuple[fx.Node, ...]
    split: int
    dim: int
    parts: int
    select: fx.Node


def _one_part(linear: fx.Node) -> _ViewChain | None:
    """Returns the views by which one part of a linear's output is taken; None for other uses."""
    views: list[fx.Node] = []
    split = at = -1
    dim = parts = 0
    node = linear
    while len(node.users) == 1:
        (user,) = node.users
        before = node.meta["val"].shape
        if user.target is aten.select.int and split >= 0:
            if user.args[1] % len(before) != at or not isinstance(user.args[2], int):  # type: ignore[operator]
                return None
            return _ViewChain(tuple(views), split, dim, parts, user)
        if user.target is aten.reshape.default and split < 0:
            after = user.meta["val"].shape
            at = dim = _parts_dim(before, after)
            if dim < 0:
                return None
            split, parts = len(views), int(after[dim])
        elif user.target is aten.permute.default and split >= 0:
            order: Any = user.args[1]
            at = [d % len(before) for d in order].index(at)
        elif user.target is aten.transpose.int and split >= 0:
            pair: Any = user.args[1:3]
            a, b = (int(d) % len(before) for d in pair)
            at = {a: b, b: a}.get(at, at)
        else:
            return None
        views.append(user)
        node = user
    return None


def _parts_dim(before: Sequence[Any], after: Sequence[Any]) -> int:
    """Returns the outermost new dim if a reshape only splits the last dim; else -1."""
    lead = len(before) - 1
    whole = len(after) > len(before) and all(isinstance(s, int) for s in after[lead:])
    same = list(map(str, after[:lead])) == list(map(str, before[:lead]))
    return lead if whole and same and after[lead] > 1 else -1


def _rows(linear: fx.Node, start: int, stop: int) -> fx.Node:
    """Emits a linear with the weight rows `start` to `stop` alone."""
    edit = Editor(linear)
    source, *weights = (a for a in linear.args if a is not None)
    parts = [edit.call(aten.slice.Tensor, w, 0, start, stop) for w in weights]
    return edit.call(aten.linear.default, source, *parts)


def _narrow_slice(linear: fx.Node, user: fx.Node) -> None:
    """Narrows a linear whose only user is a slice of the last dim."""
    width = linear.meta["val"].shape[-1]
    if user.target is not aten.slice.Tensor or len(user.args) > 4:
        return
    dim, start, stop = (0, None, None) if len(user.args) < 4 else user.args[1:4]
    last = len(linear.meta["val"].shape) - 1
    if dim not in (-1, last) or not isinstance(start, int) or not isinstance(stop, int):
        return
    start, stop, _ = slice(start, stop).indices(width)  # from the end where they are negative
    if stop <= start or stop - start == width:
        return
    user.replace_all_uses_with(_rows(linear, start, stop))
    linear.graph.erase_node(user)
    linear.graph.erase_node(linear)


def _narrow(linear: fx.Node, chain: _ViewChain) -> None:
    weight: Any = linear.args[1]
    rows = weight.meta["val"].shape[0] // chain.parts
    chosen: Any = chain.select.args[2]
    index = int(chosen) % chain.parts
    last: fx.Node = _rows(linear, index * rows, (index + 1) * rows)
    for position, view in enumerate(chain.views):
        edit = Editor(view)
        args: list[Any] = list(view.args[1:])
        if position == chain.split:
            shape = list(args[0])
            shape[chain.dim] = 1
            args = [shape]
        last = edit.call(view.target, last, *args)  # type: ignore[arg-type]
    one = Editor(chain.select).call(aten.select.int, last, chain.select.args[1], 0)
    chain.select.replace_all_uses_with(one)
    for old in (chain.select, *reversed(chain.views), linear):
        linear.graph.erase_node(old)


def depends_on(graph: fx.Graph) -> set[str]:
    """Returns the names of the placeholders that a gradient of the output reaches."""
    output = next(n for n in reversed(graph.nodes) if n.op == "output")
    found: set[fx.Node] = set()
    stack = list(output.all_input_nodes)
    while stack:
        node = stack.pop()
        value = node.meta.get("val")
        whole = isinstance(value, Tensor)
        stops = whole and not (value.is_floating_point() or value.is_complex())
        if node in found or stops or node.target is aten.detach.default:
            continue
        found.add(node)
        stack += node.all_input_nodes
    return {n.name for n in found if n.op == "placeholder"}
