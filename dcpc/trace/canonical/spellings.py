"""Rewrites ops that combine several plain ops into these, which have sharding rules.

    type_as(x, y)                 ->  _to_copy(x, y's dtype)
    broadcast_tensors, getitem    ->  expand
    meshgrid, getitem             ->  reshape, expand
    split by symbolic sizes       ->  slices
    repeat, repeat_interleave     ->  reshape, expand, reshape
    x[mask] = one row or number   ->  where(mask, row, x)
    rrelu outside of training     ->  leaky_relu (seeded.py refuses the other)
    x * 2j, x / 2j                ->  x * a tensor: torch differentiates no call with such a number
    as_strided(x, ..)             ->  x in the order of its memory, flat, read at computed positions

So none of these needs a sharding rule beside those of the plain ops.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch import fx

from dcpc.errors import TraceError
from dcpc.trace.canonical.editor import Editor, expression

aten = torch.ops.aten


def type_as(node: fx.Node, edit: Editor) -> fx.Node | None:
    """Rewrites a cast to another tensor's dtype as a cast to that dtype."""
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
    """Rewrites each result as an expand of one operand to the common shape."""
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
    """Whether two sizes are the same expression. The comparison adds no guard."""
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
    """Rewrites each result as a reshape of one operand and an expand along the other dims."""
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
    """Replaces each getitem of `node` by a value. The caller erases the node."""
    users = list(node.users)
    if not all(u.target is operator.getitem for u in users):
        return None
    for user in users:
        index: Any = user.args[1]
        user.replace_all_uses_with(values[index])
        user.graph.erase_node(user)
    return values[0]  # no user is left


def slices(node: fx.Node, edit: Editor, source: fx.Node, dim: int, sizes: list[Any]) -> fx.Node:
    """Rewrites a split into pieces, whose lengths may be symbolic, as slices of one dim."""
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
    """Rewrites a split into given lengths, some of them symbolic, as slices."""
    source, sizes = node.args[:2]
    assert isinstance(source, fx.Node)
    given: Any = sizes
    dim: Any = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim", 0)
    if not all(u.target is operator.getitem for u in node.users):
        return None
    return slices(node, edit, source, dim % source.meta["val"].ndim, list(given))


def repeat_interleave(node: fx.Node, edit: Editor) -> fx.Node | None:
    """Repeats each element of a dim: the dim becomes (old, copies)."""
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
    """Repeats each dim as a whole: the dim becomes (copies, old)."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    counts: Any = list(node.args[1])  # type: ignore[arg-type]
    missing = len(counts) - source.meta["val"].ndim
    if missing > 0:
        ones = [1] * missing
        source = edit.call(aten.reshape.default, source, [*ones, *edit.shape(source)])
    return _repeated(edit, source, counts, outer=True)


def _repeated(edit: Editor, source: fx.Node, counts: list[Any], outer: bool) -> fx.Node:
    """Repeats dims by reshape, expand, reshape: (copies, old) if `outer`, else (old, copies)."""
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


def masked_put(node: fx.Node, edit: Editor) -> fx.Node | None:
    """Rewrites `x[mask] = value` as a `where`, if all selected elements get the same value."""
    source: Any = node.args[0]
    indices: Any = node.args[1]
    value: Any = node.args[2]
    accumulate = node.args[3] if len(node.args) > 3 else node.kwargs.get("accumulate", False)
    mask = indices[-1] if indices else None
    if any(i is not None for i in indices[:-1]) or not isinstance(mask, fx.Node):
        return None
    if mask.meta["val"].dtype != torch.bool:
        return None
    covered = mask.meta["val"].ndim
    behind = source.meta["val"].ndim - (len(indices) - 1) - covered
    shape = edit.shape(value)
    if len(shape) > behind:  # it has a dim for the selected elements
        at = len(shape) - behind - 1
        if not _is(1, shape[at]):
            return None
        value = edit.call(
            aten.reshape.default, value, [*shape[:at], *[1] * covered, *shape[at + 1 :]]
        )
    ones = [1] * behind
    wide = edit.call(aten.reshape.default, mask, [*edit.shape(mask), *ones]) if ones else mask
    if accumulate:  # a mask picks nothing twice
        return edit.call(aten.add.Tensor, source, edit.call(aten.where.ScalarOther, wide, value, 0))
    return edit.call(aten.where.self, wide, value, source)


def read_by_position(graph: fx.Graph) -> None:
    """Rewrites strided reads and writes of memory as indexing by position, as in the plain model.

    In a canonical graph there are no copies, and ranks have pieces, so strides differ there.

    Raises:
        TraceError: the memory layout of an operand is not known.
    """
    for node in list(graph.nodes):
        if node.target in (aten.as_strided.default, aten.as_strided_scatter.default):
            node.replace_all_uses_with(_by_position(node, Editor(node)))
            graph.erase_node(node)


def _by_position(node: fx.Node, edit: Editor) -> fx.Node:
    source: Any = node.args[0]
    written = node.target is aten.as_strided_scatter.default
    sizes, strides, *rest = node.args[1 + written :]
    offset = rest[0] if rest else node.kwargs.get("storage_offset")
    order = _memory_order(source)
    if order is None:
        raise TraceError(
            f"{node.target} of '{source.name}' reads memory by strides; expected a value that has "
            "all elements of its memory; read it by slices, unfold or indices, or read a clone"
        )
    flat = edit.call(aten.reshape.default, edit.call(aten.permute.default, source, order), [-1])
    at = _positions(edit, sizes, strides, offset or 0, source.meta["val"].device)
    if not written:
        return edit.call(aten.index.Tensor, flat, [at])
    flat = edit.call(aten.index_put.default, flat, [at], node.args[1])
    lying = edit.call(aten.reshape.default, flat, [edit.shape(source)[d] for d in order])
    return edit.call(aten.permute.default, lying, [order.index(d) for d in range(len(order))])


def _memory_order(node: fx.Node) -> list[int] | None:
    """Returns a tensor's dims, outermost first, if it fills its memory densely in some order."""
    value = node.meta["val"]
    if value.storage_offset() != 0:
        return None

    def number(size: Any) -> int:
        return int(size.node.hint) if isinstance(size, torch.SymInt) else int(size)

    def same(a: Any, b: Any) -> bool:  # torch writes a number of bytes as a sum
        return bool(sympy.expand(expression(a) - expression(b)) == 0)

    dims = range(value.ndim)
    order = sorted(dims, key=lambda d: (-number(value.stride(d)), -number(value.shape[d])))
    stride: Any = 1
    for d in reversed(order):
        if not _is(1, value.shape[d]):
            if not same(value.stride(d), stride):
                return None
            stride = stride * value.shape[d]
    bytes_ = stride * value.dtype.itemsize
    return order if same(value.untyped_storage().nbytes(), bytes_) else None


def _positions(
    edit: Editor, sizes: Any, strides: Any, offset: Any, device: torch.device
) -> fx.Node:
    """Emits the memory position of each element of a strided view, as int64."""
    at = edit.call(aten.full.default, [1] * len(sizes), offset, dtype=torch.int64, device=device)
    for d, (size, stride) in enumerate(zip(sizes, strides, strict=True)):
        steps = edit.call(aten.arange.default, size, device=device)
        shape = [-1 if i == d else 1 for i in range(len(sizes))]
        along = edit.call(aten.reshape.default, steps, shape)
        at = edit.call(aten.add.Tensor, at, edit.call(aten.mul.Tensor, along, stride))
    return at


def rrelu(node: fx.Node, edit: Editor) -> fx.Node:
    """Rewrites rrelu outside of training as leaky_relu, whose slope is the mean of the bounds."""
    slopes = [n for n in node.args[1:3] if isinstance(n, int | float)]
    lower, upper = slopes + [1 / 8, 1 / 3][len(slopes) :]  # aten's own defaults
    return edit.call(aten.leaky_relu.default, node.args[0], (lower + upper) / 2)


def complex_factor(node: fx.Node, edit: Editor) -> fx.Node | None:
    """Makes a complex number that multiplies or divides a tensor, as backward conjugates it."""
    op: Any = node.target
    factor = node.args[1]
    if not isinstance(factor, complex):
        return None
    value = node.meta["val"]
    made = edit.call(aten.full.default, [], factor, dtype=value.dtype, device=value.device)
    return edit.call(op, node.args[0], made)


SPELLINGS: dict[Any, Callable[[fx.Node, Editor], fx.Node | None]] = {
    aten.type_as.default: type_as,
    aten.broadcast_tensors.default: broadcast_tensors,
    aten.meshgrid.default: meshgrid,
    aten.meshgrid.indexing: meshgrid,
    aten.repeat_interleave.self_int: repeat_interleave,
    aten.repeat.default: repeat,
    aten.index_put.default: masked_put,
    aten.rrelu.default: rrelu,
    aten.mul.Tensor: complex_factor,
    aten.div.Tensor: complex_factor,
}
