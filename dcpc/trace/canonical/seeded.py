"""Rewrites random ops of a captured graph to `dcpc::uniform` and `dcpc::normal`, or refuses them.

dropout(x, p)                  ->  where(uniform >= p, x / (1 - p), 0)
rand, rand_like                ->  uniform
bernoulli of p, of a tensor    ->  uniform >= 1 - p, uniform < tensor
randn, randn_like              ->  normal
attention with dropout         ->  matmul, softmax (safe where masked), dropout, matmul
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

import dcpc.ops.random  # noqa: F401 - registers the ops
from dcpc.errors import TraceError
from dcpc.trace.canonical.attention import scale_of, scaled_by_width
from dcpc.trace.canonical.editor import Editor

aten = torch.ops.aten


def replace_random(graph: fx.Graph) -> None:
    """Rewrites every random op in place.

    Raises:
        TraceError: an op draws numbers in a way that cannot be split over ranks.
    """
    for index, node in enumerate(list(graph.nodes)):
        if node.op != "call_function" or not _is_random(node):
            continue
        rule = _RULES.get(node.target)
        if rule is None:
            raise TraceError(
                f"forward draws random numbers by {node.target} (node {node.name}); expected "
                "dropout, rand, randn or bernoulli; draw them outside and pass them as an input, "
                "and give recurrent layers no dropout between them (nn.Dropout after one of each)"
            )
        rule(node, Editor(node), index)


def _is_random(node: fx.Node) -> bool:
    if node.target is aten.scaled_dot_product_attention.default:
        return _attention_dropout(node) > 0
    if node.target is aten.rrelu.default:
        return bool(node.args[3] if len(node.args) > 3 else node.kwargs.get("training", False))
    if node.target in _RECURRENT:
        layers, dropout, train = node.args[-_RECURRENT[node.target] :][:3]
        return bool(train and dropout and layers != 1)
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _attention_dropout(node: fx.Node) -> float:
    p = node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)
    assert isinstance(p, int | float)
    return float(p)


def _replace(node: fx.Node, new: fx.Node) -> None:
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)


def _draw(edit: Editor, op: Any, shape: list[Any], index: int, like: torch.Tensor) -> fx.Node:
    dtype = like.dtype if like.dtype in (torch.float32, torch.float64) else torch.float32
    return edit.call(op, shape, 0, 0, index, dtype, like.device)


def _kept(edit: Editor, x: fx.Node, p: float, index: int) -> tuple[fx.Node, fx.Node]:
    """Returns x after dropout, and the boolean mask of the elements that were kept."""
    value = x.meta["val"]
    drawn = _draw(edit, torch.ops.dcpc.uniform.default, edit.shape(x), index, value)
    kept = edit.call(aten.ge.Scalar, drawn, p)
    scaled = edit.call(aten.mul.Tensor, x, 1.0 / (1.0 - p) if p < 1 else 0.0)
    zero = edit.call(aten.zeros_like.default, scaled)
    return edit.call(aten.where.self, kept, scaled, zero), kept


def _native_dropout(node: fx.Node, edit: Editor, index: int) -> None:
    x, p = node.args[:2]
    assert isinstance(x, fx.Node)
    assert isinstance(p, int | float)
    dropped, kept = _kept(edit, x, float(p), index)
    for user in list(node.users):
        assert user.target is operator.getitem
        _replace(user, dropped if user.args[1] == 0 else kept)
    node.graph.erase_node(node)


def _dropout(node: fx.Node, edit: Editor, index: int) -> None:
    x, p, train = node.args
    assert isinstance(x, fx.Node)
    assert isinstance(p, int | float)
    _replace(node, _kept(edit, x, float(p), index)[0] if train and p > 0 else x)


def _like(op: Any) -> Callable[[fx.Node, Editor, int], None]:
    """Returns the rule of rand(_like) and randn(_like): draws of the output's shape and dtype."""

    def rule(node: fx.Node, edit: Editor, index: int) -> None:
        value = node.meta["val"]
        size: Any = node.args[0]
        shape = edit.shape(size) if isinstance(size, fx.Node) else list(size)
        drawn = _draw(edit, op, shape, index, value)
        if drawn.meta["val"].dtype != value.dtype:
            drawn = edit.call(aten._to_copy.default, drawn, dtype=value.dtype)
        _replace(node, drawn)

    return rule


def _bernoulli(node: fx.Node, edit: Editor, index: int) -> None:
    x = node.args[0]
    assert isinstance(x, fx.Node)
    value = node.meta["val"]
    drawn = _draw(edit, torch.ops.dcpc.uniform.default, edit.shape(x), index, value)
    if node.target is aten.bernoulli.p:  # `bernoulli_(p)` as well: torch's dropout draws by it
        p: Any = node.args[1] if len(node.args) > 1 else node.kwargs["p"]
        rest = edit.call(operator.sub, 1, p) if isinstance(p, fx.Node) else 1 - p
        hit = edit.call(aten.ge.Scalar, drawn, rest)
    else:
        hit = edit.call(aten.lt.Tensor, drawn, x)
    _replace(node, edit.call(aten._to_copy.default, hit, dtype=value.dtype))


def _attention(node: fx.Node, edit: Editor, index: int) -> None:
    """Spells out attention with dropout on its weights, as flash kernels take no seed."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    q, k, v, mask = (given.get(n) for n in names[:4])
    assert isinstance(q, fx.Node)
    assert isinstance(k, fx.Node)
    assert isinstance(v, fx.Node)
    queries, keys = q.meta["val"], k.meta["val"]
    groups = queries.shape[-3] // keys.shape[-3] if given.get("enable_gqa") else 1
    if groups != 1:
        k, v = (repeat_heads(edit, x, groups) for x in (k, v))
    scale = scale_of(given.get("scale"), q)
    if scale is None:
        q, scale = scaled_by_width(edit, q), 1.0
    scores = edit.call(aten.matmul.default, q, edit.call(aten.transpose.int, k, -2, -1))
    scores = edit.call(aten.mul.Tensor, scores, scale)
    if given.get("is_causal"):
        mask = _causal(edit, q, k)
    if isinstance(mask, fx.Node) and mask.meta["val"].dtype == torch.bool:
        scores = edit.call(aten.where.ScalarOther, mask, scores, float("-inf"))
    elif isinstance(mask, fx.Node):
        scores = edit.call(aten.add.Tensor, scores, mask)
    # For a query that sees no key torch's weights are 0, where a plain softmax gives NaN.
    softmax = aten.softmax.int if mask is None else aten._safe_softmax.default
    weights = edit.call(softmax, scores, -1)
    if weights.meta["val"].dtype != queries.dtype:  # a float32 mask of half precision
        weights = edit.call(aten._to_copy.default, weights, dtype=queries.dtype)
    weights = _kept(edit, weights, _attention_dropout(node), index)[0]
    _replace(node, edit.call(aten.matmul.default, weights, v))


def repeat_heads(edit: Editor, x: fx.Node, groups: int) -> fx.Node:
    """Returns keys or values `[..., heads, length, width]`, each head repeated `groups` times."""
    *batch, heads, length, width = edit.shape(x)
    wide = edit.call(aten.unsqueeze.default, x, -3)
    wide = edit.call(aten.expand.default, wide, [*batch, heads, groups, length, width])
    return edit.call(aten.reshape.default, wide, [*batch, heads * groups, length, width])


def _causal(edit: Editor, q: fx.Node, k: fx.Node) -> fx.Node:
    device = q.meta["val"].device
    rows = edit.call(aten.arange.default, edit.shape(q)[-2], device=device)
    columns = edit.call(aten.arange.default, edit.shape(k)[-2], device=device)
    return edit.call(aten.le.Tensor, columns, edit.call(aten.unsqueeze.default, rows, 1))


# Recurrent ops, which draw numbers only for dropout between layers: how far from the end of the
# arguments the number of layers stands.
_RECURRENT = {
    getattr(getattr(aten, name), overload): behind
    for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")
    for overload, behind in (("input", 5), ("data", 4))
}

_RULES: dict[Any, Callable[[fx.Node, Editor, int], None]] = {
    aten.native_dropout.default: _native_dropout,
    aten.dropout.default: _dropout,
    aten.rand.default: _like(torch.ops.dcpc.uniform.default),
    aten.rand_like.default: _like(torch.ops.dcpc.uniform.default),
    aten.randn.default: _like(torch.ops.dcpc.normal.default),
    aten.randn_like.default: _like(torch.ops.dcpc.normal.default),
    aten.bernoulli.default: _bernoulli,
    aten.bernoulli.p: _bernoulli,
    aten.scaled_dot_product_attention.default: _attention,
}
