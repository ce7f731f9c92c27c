"""Ops that say in one call what several plain ones say: the canonical form has the plain ones.

    type_as(x, y)                 ->  _to_copy(x, y's dtype)
    broadcast_tensors, getitem    ->  expand
    meshgrid, getitem             ->  reshape, expand
    split by symbolic sizes       ->  slices
    repeat, repeat_interleave     ->  reshape, expand, reshape

None of these has a rule of its own to keep in step with the plain op's.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from dcpc.trace.canonical.editor import Editor

aten = torch.ops.aten


def type_as(node: fx.Node, edit: Editor) -> fx.Node | None:
    """A cast to another tensor's dtype is a cast to a dtype that is known."""
    source, other = node.args[:2]
    assert isinstance(source, fx.Node)
    assert isinstance(other, fx.Node)
    have, want = source.meta["val"], other.meta["val"]
    if have.device != want.device:
        return None
    if have.dtype == want.dtype:
        return source
    return edit.call(aten._to_copy.default, source, dtype=want.dtype)


def broadcast_tensors(node: fx.Node, edit: Editor) -> fx.Node | None:
    """Each result is one operand, expanded to the shape of all."""
    operands: Any = node.args[0]
    values: Any = node.meta["val"]
    shape: list[Any] = []
    for d, size in enumerate(values[0].shape):
        # The size of an operand that has the whole dim, as the graph knows it.
        whole = next((x for x in operands if _has(x, d, values[0].ndim, size)), None)
        at = d - values[0].ndim
        shape.append(edit.sizes(whole, [at])[0] if whole is not None else size)
    return _instead(node, [_expanded(edit, x, shape) for x in operands])


def _has(operand: fx.Node, dim: int, ndim: int, size: Any) -> bool:
    shape = operand.meta["val"].shape
    at = dim - (ndim - len(shape))
    return bool(at >= 0 and shape[at] is not None and _same(shape[at], size))


def _same(a: Any, b: Any) -> bool:
    """Whether two sizes are one expression; asks nothing that would become a guard."""
    if isinstance(a, int) or isinstance(b, int):
        return isinstance(a, int) and isinstance(b, int) and a == b
    return bool(a.node.expr == b.node.expr)


def _expanded(edit: Editor, source: fx.Node, shape: list[Any]) -> fx.Node:
    have = source.meta["val"].shape
    want = [s.meta["val"] if isinstance(s, fx.Node) else s for s in shape]
    if len(have) == len(want) and all(map(_same, have, want)):
        return source
    return edit.call(aten.expand.default, source, shape)


def meshgrid(node: fx.Node, edit: Editor) -> fx.Node | None:
    """Each result is one list of positions along a dim of its own, expanded along the others."""
    operands: Any = node.args[0]
    indexing = node.args[1] if len(node.args) > 1 else node.kwargs.get("indexing", "ij")
    lengths = [1 if x.meta["val"].ndim == 0 else edit.sizes(x, [0])[0] for x in operands]
    dims = list(range(len(operands)))
    if indexing == "xy" and len(operands) > 1:
        dims[:2] = [1, 0]
    shape: list[Any] = [1] * len(operands)
    for d, length in zip(dims, lengths, strict=True):
        shape[d] = length
    found = []
    for d, x in zip(dims, operands, strict=True):
        column = [lengths[dims.index(d)] if i == d else 1 for i in range(len(operands))]
        found.append(_expanded(edit, edit.call(aten.reshape.default, x, column), shape))
    return _instead(node, found)


def _instead(node: fx.Node, values: list[fx.Node]) -> fx.Node | None:
    """Puts each value where its getitem stood; the caller erases the node."""
    users = list(node.users)
    if not all(u.target is operator.getitem for u in users):
        return None
    for user in users:
        index: Any = user.args[1]
        user.replace_all_uses_with(values[index])
        user.graph.erase_node(user)
    return values[0]  # no user is left


def slices(node: fx.Node, edit: Editor, source: fx.Node, dim: int, sizes: list[Any]) -> fx.Node:
    """Pieces of one dim whose lengths are sizes of the graph, as slices."""
    starts: list[Any] = [0]
    for size in sizes[:-1]:
        last = starts[-1]
        both_known = isinstance(last, int) and isinstance(size, int)
        same = isinstance(last, int) and last == 0
        starts.append(
            size if same else last + size if both_known else edit.call(operator.add, last, size)
        )
    stops = [*starts[1:], torch.iinfo(torch.int64).max]
    for user in list(node.users):
        index: Any = user.args[1]
        piece = edit.call(aten.slice.Tensor, source, dim, starts[index], stops[index])
        user.replace_all_uses_with(piece)
        user.graph.erase_node(user)
    return source


def split_with_sizes(node: fx.Node, edit: Editor) -> fx.Node | None:
    """Pieces of given lengths, some of them symbolic."""
    source, sizes = node.args[:2]
    assert isinstance(source, fx.Node)
    given: Any = sizes
    dim: Any = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim", 0)
    if not all(u.target is operator.getitem for u in node.users):
        return None
    return slices(node, edit, source, dim % source.meta["val"].ndim, list(given))


def repeat_interleave(node: fx.Node, edit: Editor) -> fx.Node | None:
    """Each element of a dim several times: the dim becomes (old, copies)."""
    source, repeats = node.args[:2]
    dim: Any = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim")
    assert isinstance(source, fx.Node)
    if isinstance(repeats, fx.Node) and not isinstance(repeats.meta["val"], torch.SymInt):
        return None  # a tensor: another number of copies of each element
    if dim is None:
        return None
    ndim = source.meta["val"].ndim
    counts: list[Any] = [1] * ndim
    counts[dim % ndim] = repeats
    return _repeated(edit, source, counts, outer=False)


def repeat(node: fx.Node, edit: Editor) -> fx.Node | None:
    """Every dim several times, one copy after the other: the dim becomes (copies, old)."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    counts: Any = list(node.args[1])  # type: ignore[arg-type]
    missing = len(counts) - source.meta["val"].ndim
    if missing > 0:
        ones = [1] * missing
        source = edit.call(aten.reshape.default, source, [*ones, *edit.shape(source)])
    return _repeated(edit, source, counts, outer=True)


def _repeated(edit: Editor, source: fx.Node, counts: list[Any], outer: bool) -> fx.Node:
    """A dim (copies, old) or (old, copies), made by expand: no size of it is an op's argument."""
    sizes = edit.shape(source)
    if all(isinstance(c, int) and c == 1 for c in counts):
        return source
    if all(_is(1, c) or _is(1, n) for c, n in zip(counts, sizes, strict=True)):
        shape = [c if _is(1, n) else n for c, n in zip(counts, sizes, strict=True)]
        return edit.call(aten.expand.default, source, shape)
    apart: list[Any] = []
    wide: list[Any] = []
    joined: list[Any] = []
    for count, size in zip(counts, sizes, strict=True):
        if _is(1, count):
            parts, full = [size], [size]
        else:
            parts, full = ([1, size], [count, size]) if outer else ([size, 1], [size, count])
        apart += parts
        wide += full
        joined.append(full[0] if len(full) == 1 else _product(edit, *full))
    split = edit.call(aten.reshape.default, source, apart)
    return edit.call(aten.reshape.default, edit.call(aten.expand.default, split, wide), joined)


def _is(number: int, size: Any) -> bool:
    return isinstance(size, int) and size == number


def _product(edit: Editor, a: Any, b: Any) -> Any:
    if isinstance(a, int) and isinstance(b, int):
        return a * b
    return edit.call(operator.mul, a, b)


SPELLINGS: dict[Any, Callable[[fx.Node, Editor], fx.Node | None]] = {
    aten.type_as.default: type_as,
    aten.broadcast_tensors.default: broadcast_tensors,
    aten.meshgrid.default: meshgrid,
    aten.meshgrid.indexing: meshgrid,
    aten.repeat_interleave.self_int: repeat_interleave,
    aten.repeat.default: repeat,
}
