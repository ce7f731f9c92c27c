"""Rewrites attention, however a model spells it, to one `dcpc::attention` call.

scaled_dot_product_attention(q, k, v, mask)   ->  attention
matmul(softmax(matmul(q, k^T) ...), v)        ->  attention, where `...` scales, adds a mask, fills
                                                  with a number where a mask says so
keys and values repeated for each query head  ->  the keys and values themselves
a mask repeated for samples after each other  ->  the mask itself

Left as it is: a softmax in a lower precision than its operands (a library's float32 softmax in a
float64 model: the numbers would change), dropout, and weights that something else reads too.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from dcpc.errors import TraceError
from dcpc.ops.attention import accumulated, hides
from dcpc.trace.canonical.editor import Editor, expression

aten = torch.ops.aten

# A fill value below this is meant to hide keys, even if it need not always do so.
REMARKABLE = -1e3

PRODUCTS = {aten.matmul.default, aten.bmm.default, aten.mm.default}
SAFE = aten._safe_softmax.default
SOFTMAXES = {aten.softmax.int, aten._softmax.default, SAFE}


@dataclass(frozen=True, slots=True)
class _Found:
    """An attention that was found in the graph. Its tensors may have any number of dims.

    Attributes:
        q: `[..., s, d]`.
        k: `[..., t, d]`.
        v: `[..., t, e]`.
        scale: factor of the scores. None: one by the square root of the width, which is a named
            dim.
        mask: function that emits the mask, additive or boolean (true: visible). None: no mask.
        causal: whether query i sees keys 0 to i.
        grouped: whether there may be fewer key heads than query heads.
        empty: result of a query that sees no key, see `dcpc.ops.attention.spec.EMPTY`.
    """

    q: fx.Node
    k: fx.Node
    v: fx.Node
    scale: float | None
    mask: Callable[[Editor], fx.Node] | None = None
    causal: bool = False
    grouped: bool = False
    empty: str = "zero"


def replace_attention(graph: fx.Graph) -> None:
    """Rewrites every attention of the graph to a `dcpc::attention` call, in place."""
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        found = _fused(node) or _spelled(node)
        if found is not None:
            new = _emit(found, Editor(node), node)
            node.replace_all_uses_with(new)
            graph.erase_node(node)


# ------------------------------------------------------------------------------------ one call


def _fused(node: fx.Node) -> _Found | None:
    if node.target is not aten.scaled_dot_product_attention.default:
        return None
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given: dict[str, Any] = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    if given.get("dropout_p"):
        return None
    q, k, v, mask = given["query"], given["key"], given["value"], given.get("attn_mask")
    return _Found(
        q, k, v, scale_of(given.get("scale"), q),
        mask=None if mask is None else lambda edit: mask,
        causal=bool(given.get("is_causal")),
        grouped=bool(given.get("enable_gqa")),
    )  # fmt: skip


def scale_of(scale: Any, q: fx.Node) -> float | None:
    """Returns the factor of the scores, or None if it is 1 / sqrt(width) of a symbolic width."""
    width = q.meta["val"].shape[-1]
    if scale is None:
        return float(width) ** -0.5 if isinstance(width, int) else None
    if isinstance(scale, int | float):
        return float(scale)
    raise TraceError(
        f"attention is scaled by {scale}, which depends on a size; expected a number; multiply the "
        "queries by it, and give scale=1.0"
    )


def scaled_by_width(edit: Editor, q: fx.Node) -> fx.Node:
    """Emits the queries divided by the square root of their width, which may be symbolic."""
    dtype = q.meta["val"].dtype
    ones = edit.call(aten.ones_like.default, q, dtype=accumulated(dtype))
    root = edit.call(aten.rsqrt.default, edit.call(aten.sum.dim_IntList, ones, [-1], True))
    scaled = edit.call(aten.mul.Tensor, q, root)
    if scaled.meta["val"].dtype != dtype:
        scaled = edit.call(aten._to_copy.default, scaled, dtype=dtype)
    return scaled


# --------------------------------------------------------------------- matmul, softmax, matmul


@dataclass(frozen=True, slots=True)
class _Scores:
    """Attention scores, from the product of queries and keys to the softmax.

    Attributes:
        q: queries `[..., s, d]`.
        k: transposed keys `[..., d, t]`.
        scale: factor of the product.
        added: masks that are added to the scores, each with the factor that follows the addition.
        fills: (mask, whether true means visible, number) of each op that overwrites scores.
    """

    q: fx.Node
    k: fx.Node
    scale: float = 1.0
    added: tuple[tuple[fx.Node, float], ...] = ()
    fills: tuple[tuple[fx.Node, bool, float], ...] = ()


def _spelled(node: fx.Node) -> _Found | None:
    if node.target not in PRODUCTS:
        return None
    weights, v = node.args
    if not isinstance(weights, fx.Node) or not isinstance(v, fx.Node):
        return None
    while weights.target is aten._to_copy.default and len(weights.users) == 1:
        (weights,) = weights.all_input_nodes
    if weights.target not in SOFTMAXES or len(weights.users) != 1 or not _last_dim(weights):
        return None
    scores = _scores(weights.args[0])
    if scores is None:
        return None
    tensors = [x.meta["val"] for x in (scores.q, scores.k, v, node)]
    if any(x.ndim < 2 for x in tensors):  # the product of a matrix and a vector
        return None
    dtypes = {x.dtype for x in tensors}
    precise = len(dtypes) == 1 and _itemsize(weights) >= _itemsize(node)
    masked = _masked(scores)
    if not precise or masked is None:
        return None
    mask, empty = masked
    if weights.target is SAFE:
        if empty == "fixed":
            return None
        empty = "safe"
    return _Found(scores.q, _untransposed(scores.k, node), v, scores.scale, mask, empty=empty)


def _last_dim(softmax: fx.Node) -> bool:
    dim = softmax.args[1]
    return dim in (-1, softmax.meta["val"].ndim - 1)


def _scores(x: Any) -> _Scores | None:
    """Returns the scores that enter a softmax, or None if they are no scaled, masked product."""
    if not isinstance(x, fx.Node) or len(x.users) != 1 or x.op != "call_function":
        return None
    if x.target in PRODUCTS:
        q, k = x.args
        both = isinstance(q, fx.Node) and isinstance(k, fx.Node)
        return _Scores(q, k) if both and x.meta["val"].ndim >= 2 else None  # type: ignore[arg-type]
    if x.target is aten.baddbmm.default:
        return _baddbmm(x)
    for source, change in _steps(x):
        if _is_tensor(source) and _same_shape(source, x):
            below = _scores(source)
            if below is not None:
                return change(below)
    return None


def _baddbmm(x: fx.Node) -> _Scores | None:
    added, q, k = x.args
    assert isinstance(added, fx.Node)
    assert isinstance(q, fx.Node)
    assert isinstance(k, fx.Node)
    beta, alpha = (x.kwargs.get(name, 1) for name in ("beta", "alpha"))
    if not isinstance(beta, int | float) or not isinstance(alpha, int | float):
        return None
    beta, alpha = float(beta), float(alpha)
    return _Scores(q, k, alpha, ((added, beta),) if beta else ())


def _steps(x: fx.Node) -> Iterator[tuple[Any, Callable[[_Scores], _Scores]]]:
    """Yields (operand that may be the scores, function that applies this op to their record)."""
    args = x.args
    if x.target is aten._to_copy.default:
        source = args[0]
        wider = isinstance(source, fx.Node) and _itemsize(x) >= _itemsize(source)
        if wider and x.meta["val"].is_floating_point():
            yield source, lambda s: s
    elif x.target in (aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar):
        if isinstance(args[1], int | float):
            factor = float(args[1])
            divides = x.target in (aten.div.Tensor, aten.div.Scalar)
            if factor or not divides:
                yield args[0], lambda s: _scaled(s, 1 / factor if divides else factor)
    elif x.target is aten.add.Tensor and "alpha" not in x.kwargs:
        for one, other in ((args[0], args[1]), (args[1], args[0])):
            if _is_tensor(other):
                yield one, lambda s, m=other: replace(s, added=(*s.added, (m, 1.0)))  # type: ignore[misc]
    else:
        yield from _fill(x)


def _fill(x: fx.Node) -> Iterator[tuple[Any, Callable[[_Scores], _Scores]]]:
    """Yields the same for ops that overwrite some scores by a number."""
    args = x.args
    kinds: dict[Any, tuple[int, int, int, bool]] = {  # scores, mask, number, true is seen
        aten.masked_fill.Scalar: (0, 1, 2, False),
        aten.masked_fill.Tensor: (0, 1, 2, False),
        aten.where.ScalarOther: (1, 0, 2, True),
        aten.where.self: (1, 0, 2, True),
        aten.where.ScalarSelf: (2, 0, 1, False),
    }
    if x.target not in kinds:
        return
    at = kinds[x.target]
    mask, number = args[at[1]], _number(args[at[2]])
    if isinstance(mask, fx.Node) and number is not None:
        fill = (mask, at[3], number)
        yield args[at[0]], lambda s: replace(s, fills=(*s.fills, fill))


def _number(x: Any) -> float | None:
    """Returns a number, or the fill value of a constant tensor; None for anything else."""
    if isinstance(x, int | float):
        return float(x)
    if isinstance(x, fx.Node):
        position = {aten.full.default: 1, aten.scalar_tensor.default: 0, aten.full_like.default: 1}
        value = x.args[position[x.target]] if x.target in position else None
        return float(value) if isinstance(value, int | float) else None
    return None


def _scaled(s: _Scores, factor: float) -> _Scores:
    added = tuple((mask, times * factor) for mask, times in s.added)
    fills = tuple((mask, seen, number * factor) for mask, seen, number in s.fills)
    return replace(s, scale=s.scale * factor, added=added, fills=fills)


def _masked(scores: _Scores) -> tuple[Callable[[Editor], fx.Node] | None, str] | None:
    """Returns (function that emits the mask, `empty` rule), or None if it cannot be a mask."""
    numbers = {number for _, _, number in scores.fills}
    dtype = scores.q.meta["val"].dtype
    low = [number for number in numbers if not hides(number, dtype)]
    if any(number <= REMARKABLE for number in low):
        warnings.warn(
            f"scores are replaced by {min(low):g}, which others may reach: attention stays matmul, "
            "softmax, matmul, which takes memory with the square of the length; use float('-inf') "
            "or torch.finfo(dtype).min to hide keys", stacklevel=2,
        )  # fmt: skip
    if len(numbers) > 1 or low:
        return None
    if any(not m.meta["val"].is_floating_point() for m, _ in scores.added):
        return None
    endless = numbers == {float("-inf")}
    if numbers and scores.added and not endless:
        return None
    if not numbers and not scores.added:
        return None, "zero"

    def make(edit: Editor) -> fx.Node:
        total = None
        for mask, times in scores.added:
            one = mask if times == 1 else edit.call(aten.mul.Tensor, mask, times)
            total = one if total is None else edit.call(aten.add.Tensor, total, one)
        seen = None
        for mask, true_is_seen, _ in scores.fills:
            one = mask if true_is_seen else edit.call(aten.logical_not.default, mask)
            seen = one if seen is None else edit.call(aten.logical_and.default, seen, one)
        if total is None or seen is None:
            found = total if seen is None else seen
            assert found is not None
            return found
        return edit.call(aten.where.ScalarOther, seen, total, float("-inf"))

    return make, "nan" if endless or not numbers else "fixed"


def _untransposed(k: fx.Node, user: fx.Node) -> fx.Node:
    """Returns keys `[..., t, d]`: the operand of the transpose, or a new one before `user`."""
    ndim = k.meta["val"].ndim
    source = k.args[0] if k.args else None
    if isinstance(source, fx.Node):
        if k.target is aten.transpose.int:
            dims = {int(d) % ndim for d in k.args[1:3]}  # type: ignore[arg-type]
            if dims == {ndim - 2, ndim - 1}:
                return source
        if k.target in (aten.t.default, aten.mT.default):
            return source
    made: fx.Node = Editor(user).call(aten.transpose.int, k, -2, -1)
    return made


# ---------------------------------------------------------------------------------- the new call


def _emit(found: _Found, edit: Editor, node: fx.Node) -> fx.Node:
    """Emits the call on tensors of 4 dims, and the ops that restore the shape of the old result."""
    k, v, repeats = _unrepeated(found)
    q, mask = found.q, found.mask(edit) if found.mask is not None else None
    if found.scale is None:
        q = scaled_by_width(edit, q)
    rank = max(x.meta["val"].ndim for x in (q, k, v))
    q, k, v = (_ranked(edit, x, rank) for x in (q, k, v))
    q, k, v = _broadcast(edit, (q, k, v), found.grouped or repeats)
    lead = [q.meta["val"].shape[d] for d in range(rank - 2)]
    if mask is not None:
        mask = _ranked(edit, _unrepeated_mask(edit, mask), rank)
        mask = _mask_of_rank_4(edit, mask, q)
    tensors = [_rank_4(edit, x) for x in (q, k, v)]
    kwargs: dict[str, Any] = {"scale": 1.0 if found.scale is None else found.scale}
    if found.causal:
        kwargs["after"] = 0
    if found.empty != "zero":
        kwargs["empty"] = found.empty
    out = edit.call(torch.ops.dcpc.attention.default, *tensors, *([mask] if mask else []), **kwargs)
    if len(lead) == 2:
        return out
    if len(lead) == 1:
        return edit.call(aten.select.int, out, 1, 0)
    sizes = [*edit.sizes(q, list(range(rank - 1))), *edit.sizes(v, [rank - 1])]
    return edit.call(aten.reshape.default, out, sizes)


def _unrepeated(found: _Found) -> tuple[fx.Node, fx.Node, bool]:
    """Returns keys and values before they were repeated for the query heads of each group."""
    k, v = _repeated(found.k), _repeated(found.v)
    if k is None or v is None or found.grouped or not _same_size(k, v, 1):
        return found.k, found.v, False
    return k, v, True


def _repeated(x: fx.Node) -> fx.Node | None:
    """Returns `[b, g, t, d]` of reshape(expand(unsqueeze(x, 2))) or repeat_interleave(x, r, 1)."""
    if x.target is aten.repeat_interleave.self_int and x.meta["val"].ndim == 4:
        times, dim = x.args[1], x.args[2] if len(x.args) > 2 else x.kwargs.get("dim")
        fixed = isinstance(times, int) and dim in (1, -3)
        return x.args[0] if fixed else None  # type: ignore[return-value]
    if x.target is not aten.reshape.default or x.meta["val"].ndim != 4:
        return None
    wide = x.args[0]
    if not isinstance(wide, fx.Node) or wide.target is not aten.expand.default:
        return None
    one = wide.args[0]
    if not isinstance(one, fx.Node) or one.target is not aten.unsqueeze.default:
        return None
    source, dim = one.args
    if not isinstance(source, fx.Node) or dim not in (2, -3) or source.meta["val"].ndim != 4:
        return None
    same = all(_same_size(source, x, d) for d in (0, 2, 3))
    heads, groups = source.meta["val"].shape[1], wide.meta["val"].shape[2]
    whole = isinstance(heads, int) and isinstance(groups, int)
    return source if same and whole and x.meta["val"].shape[1] == heads * groups else None


def _ranked(edit: Editor, x: fx.Node, rank: int) -> fx.Node:
    """Returns x with dims of size 1 added in front, `rank` dims in all."""
    for _ in range(rank - x.meta["val"].ndim):
        x = edit.call(aten.unsqueeze.default, x, 0)
    return x


def _broadcast(
    edit: Editor, tensors: tuple[fx.Node, ...], grouped: bool
) -> tuple[fx.Node, fx.Node, fx.Node]:
    """Returns q, k, v with equal leading dims. There may stay fewer key heads than query heads."""
    q, k, v = tensors
    rank = q.meta["val"].ndim
    widest = [max(tensors, key=lambda x, d=d: _is_not_1(x, d)) for d in range(rank - 2)]  # type: ignore[misc]
    few = rank >= 4 and _same_size(k, v, rank - 3) and (grouped or not _is_not_1(k, rank - 3))
    made = []
    for x in (q, k, v):
        keep = {rank - 3} if few and x is not q else set()
        needed = [d for d in range(rank - 2) if d not in keep and not _same_size(x, widest[d], d)]
        if needed:
            sizes = edit.shape(x)
            for d in needed:
                sizes[d] = edit.sizes(widest[d], [d])[0]
            x = edit.call(aten.expand.default, x, sizes)
        made.append(x)
    return made[0], made[1], made[2]


def _rank_4(edit: Editor, x: fx.Node) -> fx.Node:
    """`[s, d]` -> [1, 1, s, d], `[b, s, d]` -> [b, 1, s, d], `[a, b, h, s, d]` -> [ab, h, s, d]."""
    rank = x.meta["val"].ndim
    if rank <= 3:
        return edit.call(aten.unsqueeze.default, _ranked(edit, x, 3), 1)
    if rank == 4:
        return x
    return edit.call(aten.reshape.default, x, [-1, *edit.sizes(x, [rank - 3, rank - 2, rank - 1])])


def _mask_of_rank_4(edit: Editor, mask: fx.Node, q: fx.Node) -> fx.Node:
    """Returns a mask `[m, h, s, t]`, in which consecutive samples share a row.

    A leading dim of size 1 after the mask's last larger one is not expanded: [a, 1, h, s, t] -> [a,
    h, s, t] for queries [a, b, h, s, d].
    """
    rank = mask.meta["val"].ndim
    if rank <= 4:
        return _rank_4(edit, mask)
    lead = rank - 3
    own = max((d + 1 for d in range(lead) if _is_not_1(mask, d)), default=1)
    if own < lead:
        mask = edit.call(aten.squeeze.dims, mask, list(range(own, lead)))
    if own == 1:
        return mask
    sizes = edit.shape(mask)
    sizes[:own] = edit.sizes(q, list(range(own)))
    return _rank_4(edit, edit.call(aten.expand.default, mask, sizes))


def _unrepeated_mask(edit: Editor, mask: fx.Node) -> fx.Node:
    """Returns the mask `[m, h, s, t]` that was repeated to `[b, h, s, t]` for consecutive samples.

    The repetition was reshape(expand(unsqueeze(x, 1))) or repeat_interleave(x, r, 0).
    """
    if mask.meta["val"].ndim != 4:
        return mask
    source = mask.args[0] if mask.args else None
    if not isinstance(source, fx.Node):
        return mask
    if mask.target is aten.repeat_interleave.self_int:
        dim = mask.args[2] if len(mask.args) > 2 else mask.kwargs.get("dim")
        return source if dim in (0, -4) else mask
    if mask.target is not aten.reshape.default or source.target is not aten.expand.default:
        return mask
    one, wide = source.args[0], source.meta["val"].shape
    assert isinstance(one, fx.Node), "a tensor is expanded"
    joined = len(wide) == 5 and all(_same_expr(wide[d + 1], mask, d) for d in (1, 2, 3))
    narrow = one.meta["val"]
    if not joined or narrow.ndim != 5 or _is_not_1(one, 1) or not _same_size(one, source, 0):
        return mask
    return edit.call(aten.squeeze.dims, one, [1])


def _is_tensor(x: Any) -> bool:
    """Returns whether x is a node whose value is a tensor, and not a size."""
    return isinstance(x, fx.Node) and isinstance(x.meta["val"], torch.Tensor)


def _itemsize(x: fx.Node) -> int:
    return int(x.meta["val"].dtype.itemsize)


def _is_not_1(x: fx.Node, d: int) -> bool:
    size = x.meta["val"].shape[d]
    return not (isinstance(size, int) and size == 1)


def _same_size(a: fx.Node, b: fx.Node, d: int) -> bool:
    return _same_expr(a.meta["val"].shape[d], b, d)


def _same_expr(size: Any, x: fx.Node, d: int) -> bool:
    return bool(expression(size) == expression(x.meta["val"].shape[d]))


def _same_shape(a: fx.Node, b: fx.Node) -> bool:
    return list(map(expression, a.meta["val"].shape)) == list(map(expression, b.meta["val"].shape))
