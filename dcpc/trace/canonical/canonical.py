"""Rewrites an exported forward graph into the few op forms that the sharding rules know.

    _assert_*(...)                          ->  gone (shapes are checked at dispatch)
    alias(x), clone(x), dropout(x, p, off)  ->  x
    view, _unsafe_view                      ->  reshape
    cat([empty, x])                         ->  cat([x]) -> x
    copy(x, y)                              ->  y, in x's dtype and shape
    squeeze(x)                              ->  squeeze(x, the dims whose size is the number 1)
    batch_norm (eval)                       ->  sub, mul, add
    split / chunk / unbind, getitem         ->  slice / select
    type_as, meshgrid, broadcast_tensors    ->  casts, reshape, expand (spellings.py)
    conv of patches (stride == kernel)      ->  linear of their rows
    conv of zeros around x                  ->  conv of x with padding, where the ends are alike
    cumprod                                 ->  dcpc::cumprod (scans.py)
    mean over symbolic dims                 ->  sum / count
    adaptive average pooling to one         ->  a mean (torch's kernel reads its result by strides)
    a reduced loss                          ->  one loss a row, and its reduction (losses.py)
    attention, fused or spelled out         ->  dcpc::attention (attention.py)
    experts on tokens sorted by expert      ->  one call of a function of rows (experts.py)

The means become sums over a **global** count, so that a sharded mean is a sum of pieces.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from dcpc.trace.canonical.attention import replace_attention
from dcpc.trace.canonical.editor import Editor
from dcpc.trace.canonical.experts import replace_routed
from dcpc.trace.canonical.losses import LOSSES, join_row_losses
from dcpc.trace.canonical.padded import padded_convolution
from dcpc.trace.canonical.patches import patch_convolution
from dcpc.trace.canonical.scans import cumprod_of_any_length
from dcpc.trace.canonical.seeded import replace_random
from dcpc.trace.canonical.single_key import attention_of_one_key, narrow_projections
from dcpc.trace.canonical.spellings import SPELLINGS, read_by_position, split_with_sizes

aten = torch.ops.aten


def canonicalise(gm: fx.GraphModule) -> None:
    """Rewrites the graph in place: one pass over its nodes by `_RULES`, then attention."""
    replace_random(gm.graph)
    read_by_position(gm.graph)
    join_row_losses(gm.graph)
    for node in list(gm.graph.nodes):
        if node.op != "call_function":
            continue
        if node.target in _DROPPED:
            if not node.users:
                gm.graph.erase_node(node)
            continue
        rule = _RULES.get(node.target)
        new = rule(node, Editor(node)) if rule is not None else None
        if new is not None:
            node.replace_all_uses_with(new)
            gm.graph.erase_node(node)
    gm.graph.eliminate_dead_code(is_impure_node=_keeps)
    replace_attention(gm.graph)
    gm.graph.eliminate_dead_code(is_impure_node=_keeps)
    narrow_projections(gm.graph)
    replace_routed(gm.graph)
    gm.graph.eliminate_dead_code(is_impure_node=_keeps)
    gm.graph.lint()
    gm.recompile()


def _keeps(node: fx.Node) -> bool:
    return node.op in ("placeholder", "output")


def _identity(node: fx.Node, edit: Editor) -> fx.Node | None:
    source = node.args[0]
    return source if isinstance(source, fx.Node) else None


def _dropout(node: fx.Node, edit: Editor) -> fx.Node | None:
    source, p, train = node.args
    return source if isinstance(source, fx.Node) and (not train or p == 0) else None


def _reshape(node: fx.Node, edit: Editor) -> fx.Node:
    """Replaces `view` by `reshape`: a rank's piece need not be viewable, and `reshape` may copy."""
    return edit.call(aten.reshape.default, node.args[0], node.args[1])


def _to_copy(node: fx.Node, edit: Editor) -> fx.Node | None:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    same = node.meta["val"].dtype == source.meta["val"].dtype
    return source if same and node.meta["val"].device == source.meta["val"].device else None


def _squeeze(node: fx.Node, edit: Editor) -> fx.Node:
    """Squeezes the dims whose size is the number 1. A symbolic dim stays, even where it is 1."""
    source: Any = node.args[0]
    shape = source.meta["val"].shape
    given: Any = node.args[1] if len(node.args) > 1 else list(range(len(shape)))
    dims: list[int] = [given] if isinstance(given, int) else given
    fixed = [d % len(shape) for d in dims if isinstance(shape[d], int) and shape[d] == 1]
    squeezed: fx.Node = edit.call(aten.squeeze.dims, source, fixed) if fixed else source
    return squeezed


def _batch_norm(node: fx.Node, edit: Editor) -> fx.Node:
    """Rewrites eval batch norm to (x - mean) / sqrt(var + eps) * weight + bias, channels in dim 1.

    Elementwise ops may be split along any dim. Also, the CPU kernel's result has other strides than
    its fake value, on which later kernels rely.
    """
    source: Any
    source, weight, bias, mean, var, _, eps = node.args
    shape = [-1] + [1] * (source.meta["val"].ndim - 2)
    column = {
        key: edit.call(aten.reshape.default, value, shape)
        for key, value in (("mean", mean), ("var", var), ("weight", weight), ("bias", bias))
        if value is not None
    }
    inverse = edit.call(aten.rsqrt.default, edit.call(aten.add.Scalar, column["var"], eps))
    out = edit.call(aten.mul.Tensor, edit.call(aten.sub.Tensor, source, column["mean"]), inverse)
    if weight is not None:
        out = edit.call(aten.mul.Tensor, out, column["weight"])
    if bias is not None:
        out = edit.call(aten.add.Tensor, out, column["bias"])
    for user in list(node.users):
        assert user.args[1] == 0, "the saved statistics of batch norm are not for users"
        user.replace_all_uses_with(out)
        edit.graph.erase_node(user)
    return out


def _copy(node: fx.Node, edit: Editor) -> fx.Node:
    """Replaces a functional `copy` by its source, in the dtype and shape of the target."""
    target, source = node.args[:2]
    assert isinstance(target, fx.Node)
    assert isinstance(source, fx.Node)
    have, want = source.meta["val"], node.meta["val"]
    if have.dtype != want.dtype:
        source = edit.call(aten._to_copy.default, source, dtype=want.dtype)
    if have.shape != want.shape:
        sizes = edit.shape(target)
        source = edit.call(aten.expand.default, source, sizes)
    return source


def _cat(node: fx.Node, edit: Editor) -> fx.Node | None:
    """Drops parts without elements, such as an empty key cache that a library concatenates to."""
    parts: Any = node.args[0]
    kept = [p for p in parts if not _is_empty(p.meta["val"])]
    if len(kept) == len(parts) or not kept:
        return None
    return kept[0] if len(kept) == 1 else edit.call(aten.cat.default, kept, *node.args[1:])


def _is_empty(value: Tensor) -> bool:
    return any(isinstance(size, int) and size == 0 for size in value.shape)


def _split(node: fx.Node, edit: Editor) -> fx.Node | None:
    """Replaces `getitem(split(x), i)` by `slice(x)`. The split itself becomes dead code."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    dim: Any = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim", 0)
    pieces: Any = node.meta["val"]
    dim %= source.meta["val"].ndim
    starts: list[Any] = [0]
    for piece in pieces:
        starts.append(starts[-1] + piece.shape[dim])
    if not all(isinstance(start, int) for start in starts):
        return split_with_sizes(node, edit) if _gives_sizes(node) else None
    for user in list(node.users):
        index: Any = user.args[1]
        last = index in (-1, len(pieces) - 1)
        stop = torch.iinfo(torch.int64).max if last else starts[index + 1]
        piece = edit.call(aten.slice.Tensor, source, dim, starts[index], stop)
        user.replace_all_uses_with(piece)
        edit.graph.erase_node(user)
    return source  # no user is left; the caller erases the node


def _gives_sizes(node: fx.Node) -> bool:
    return node.target is aten.split_with_sizes.default


def _unbind(node: fx.Node, edit: Editor) -> fx.Node:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    dim: Any = node.args[1] if len(node.args) > 1 else 0
    for user in list(node.users):
        piece = edit.call(aten.select.int, source, dim, user.args[1])
        user.replace_all_uses_with(piece)
        edit.graph.erase_node(user)
    return source


def _mean(node: fx.Node, edit: Editor) -> fx.Node | None:
    """Replaces a mean over symbolic dims by a sum over their global count; other means stay."""
    source: Any = node.args[0]
    value = source.meta["val"]
    if not value.is_floating_point():
        return None
    dims: Any = node.args[1] if len(node.args) > 1 else None
    dims = list(range(value.ndim)) if not dims else [d % value.ndim for d in dims]
    if node.target is aten.mean.dim and all(isinstance(value.shape[d], int) for d in dims):
        return None
    keepdim = bool(node.args[2]) if len(node.args) > 2 else bool(node.kwargs.get("keepdim", False))
    dtype: Any = node.kwargs.get("dtype")
    return edit.mean(source, dims, keepdim, dtype)


def _pooled_to_one(node: fx.Node, edit: Editor) -> fx.Node | None:
    source: Any = node.args[0]
    given: Any = node.args[1]
    sizes = [given] if isinstance(given, int) else given
    if any(not isinstance(size, int) or size != 1 for size in sizes):
        return None
    ndim = source.meta["val"].ndim
    return edit.mean(source, [*range(ndim - len(sizes), ndim)], keepdim=True)


def _convolution(node: fx.Node, edit: Editor) -> fx.Node | None:
    return patch_convolution(node, edit) or padded_convolution(node, edit)


_DROPPED = {
    aten._assert_tensor_metadata.default,
    aten._assert_scalar.default,
    aten._assert_async.msg,
    aten.sym_constrain_range_for_size.default,
}

_RULES: dict[Any, Callable[[fx.Node, Editor], fx.Node | None]] = {
    aten.alias.default: _identity,
    aten.lift_fresh_copy.default: _identity,
    aten.clone.default: _identity,
    aten.contiguous.default: _identity,
    aten.dropout.default: _dropout,
    aten.view.default: _reshape,
    aten._unsafe_view.default: _reshape,
    aten._to_copy.default: _to_copy,
    aten.copy.default: _copy,
    aten.cat.default: _cat,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
    aten.chunk.default: _split,
    aten.unbind.int: _unbind,
    aten.squeeze.default: _squeeze,
    aten.squeeze.dim: _squeeze,
    aten.squeeze.dims: _squeeze,
    aten._native_batch_norm_legit_no_training.default: _batch_norm,
    aten.scaled_dot_product_attention.default: attention_of_one_key,
    aten.conv1d.default: _convolution,
    aten.conv2d.default: _convolution,
    aten.conv3d.default: _convolution,
    aten.cumprod.default: cumprod_of_any_length,
    aten.mean.default: _mean,
    aten.mean.dim: _mean,
    aten.adaptive_avg_pool1d.default: _pooled_to_one,
    aten.adaptive_avg_pool2d.default: _pooled_to_one,
    aten.adaptive_avg_pool3d.default: _pooled_to_one,
    aten._adaptive_avg_pool2d.default: _pooled_to_one,
    aten._adaptive_avg_pool3d.default: _pooled_to_one,
    **LOSSES,
    **SPELLINGS,
}
