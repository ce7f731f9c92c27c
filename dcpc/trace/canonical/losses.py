"""Splits reduced losses into one loss an element or row, which may be sharded, and a reduction.

    mse_loss(mean) and its kin                ->  mse_loss(none), sum / a global count
    cross_entropy_loss(mean) of classes       ->  cross_entropy_loss(none), nll_loss of the rows
    the same with a weight a class            ->  two such sums, of losses and of weights
    cross_entropy_loss(mean) of probabilities ->  cross_entropy_loss(none), sum / number of rows
    nll_loss(mean)                            ->  as cross-entropy of classes

The count is **global**, so that a sharded mean is a sum of pieces.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from dcpc.trace.canonical.editor import Editor

aten = torch.ops.aten

MEAN, SUM = 1, 2  # values of ATen's `reduction` argument; 0 is none
SKIPPED = -100  # class of an ignored row: never a real class, unlike the user's ignore_index

# Losses that without a reduction have one value an element or a row, and the position of
# `reduction` in their schema.
ONE_BY_ONE = {
    aten.mse_loss.default: 2,
    aten.l1_loss.default: 2,
    aten.smooth_l1_loss.default: 2,
    aten.huber_loss.default: 2,
    aten.binary_cross_entropy.default: 3,
    aten.binary_cross_entropy_with_logits.default: 4,
    aten.kl_div.default: 2,
    aten.soft_margin_loss.default: 2,
    aten.poisson_nll_loss.default: 5,
    aten.margin_ranking_loss.default: 4,
    aten.hinge_embedding_loss.default: 3,
    aten.cosine_embedding_loss.default: 4,
    aten.triplet_margin_loss.default: 7,
    aten.multi_margin_loss.default: 5,
}


# Losses of rows: names and defaults of their arguments.
_ROW_NAMES = ["self", "target", "weight", "reduction", "ignore_index"]
_ROW_DEFAULTS: list[Any] = [None, None, None, MEAN, -100]
_OF_ROWS: dict[Any, tuple[list[str], list[Any]]] = {
    aten.nll_loss_nd.default: (_ROW_NAMES, _ROW_DEFAULTS),
    aten.cross_entropy_loss.default: (
        [*_ROW_NAMES, "label_smoothing"],
        [*_ROW_DEFAULTS, 0.0],
    ),
}


def spread_row_losses(graph: fx.Graph) -> None:
    """Rewrites unreduced losses of `[rows, classes]` to losses of `[rows, classes, 1]`.

    While making the graph functional, torch takes the result of the former for a scalar.
    `join_row_losses` restores it afterwards.
    """
    for node in list(graph.nodes):
        if node.target not in _OF_ROWS:
            continue
        logits, target, weight, reduction, *rest = _given(node, *_OF_ROWS[node.target])
        if reduction != 0 or logits.meta["val"].ndim != 2:
            continue
        edit = Editor(node)
        column = edit.call(aten.unsqueeze.default, logits, 2)
        wanted = edit.call(aten.unsqueeze.default, target, target.meta["val"].ndim)
        each = edit.call(node.target, column, wanted, weight, 0, *rest)
        node.replace_all_uses_with(edit.call(aten.squeeze.dim, each, 1))
        graph.erase_node(node)


def join_row_losses(graph: fx.Graph) -> None:
    """Undoes `spread_row_losses`."""
    for node in list(graph.nodes):
        if node.target not in _OF_ROWS or not all(map(_is_column, node.args[:2])):
            continue
        (squeezed,) = node.users if len(node.users) == 1 else (None,)
        if squeezed is None or squeezed.target != aten.squeeze.dim:
            continue
        logits, target = (operand.args[0] for operand in node.args[:2])
        squeezed.replace_all_uses_with(
            Editor(node).call(node.target, logits, target, *node.args[2:], **node.kwargs)
        )
        graph.erase_node(squeezed)
        graph.erase_node(node)


def _is_column(operand: Any) -> bool:
    """Whether an operand is `[rows, 1]` or `[rows, classes, 1]`, made by an unsqueeze."""
    assert isinstance(operand, fx.Node), f"got {operand}; expected a node"
    value = operand.meta["val"]
    if operand.target != aten.unsqueeze.default or value.ndim > 3:
        return False
    return bool(operand.args[1] in (-1, value.ndim - 1))


def _one_by_one(node: fx.Node, edit: Editor) -> fx.Node | None:
    position = ONE_BY_ONE[node.target]  # type: ignore[index]
    args, kwargs = list(node.args), dict(node.kwargs)
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    missing = schema[len(args) : position]
    args += [kwargs.pop(a.name, a.default_value) for a in missing if not a.kwarg_only]
    reduction = args[position] if len(args) > position else kwargs.get("reduction", MEAN)
    if reduction not in (MEAN, SUM):
        return None
    if len(args) > position:
        args[position] = 0
    else:
        kwargs["reduction"] = 0
    each = edit.call(node.target, *args, **kwargs)  # type: ignore[arg-type]
    return _added(edit, each, mean=bool(reduction == MEAN))


def _added(edit: Editor, each: fx.Node, mean: bool) -> fx.Node:
    dims = list(range(each.meta["val"].ndim))
    return edit.mean(each, dims) if mean else edit.call(aten.sum.dim_IntList, each, dims)


def _cross_entropy(node: fx.Node, edit: Editor) -> fx.Node | None:
    op = aten.cross_entropy_loss.default
    logits, target, weight, reduction, ignored, smoothing = _given(node, *_OF_ROWS[op])
    if reduction == 0:
        return None
    rows = edit.call(op, logits, target, weight, 0, ignored, smoothing)
    if target.meta["val"].is_floating_point():
        return _added(edit, rows, mean=reduction == MEAN)
    return _reduced(edit, rows, target, weight, reduction, ignored)


def _nll_loss(node: fx.Node, edit: Editor) -> fx.Node | None:
    op = aten.nll_loss_nd.default
    scores, target, weight, reduction, ignored = _given(node, *_OF_ROWS[op])
    if reduction == 0:
        return None
    rows = edit.call(op, scores, target, weight, 0, ignored)
    return _reduced(edit, rows, target, weight, reduction, ignored)


def _given(node: fx.Node, names: list[str], defaults: list[Any]) -> list[Any]:
    named = dict(zip(names, defaults, strict=True)) | dict(node.kwargs)
    return [*node.args, *(named[name] for name in names[len(node.args) :])]


def _reduced(
    edit: Editor, rows: fx.Node, target: fx.Node, weight: Any, reduction: int, ignored: int
) -> fx.Node:
    """Emits the sum or mean of one loss a row, added in the order of torch's kernel.

    The rows may be sharded, but not the reduction of one number a row. So the loss equals the plain
    model's to the last bit, even where a library computes it in float32. A weighted mean divides by
    the sum of the rows' weights.

    The reduction is an `nll_loss` with one class, 0; ignored rows get the class SKIPPED, as the
    user's `ignored` may be 0 itself.
    """
    flat = edit.call(aten.reshape.default, target, [-1])
    kept = edit.call(aten.ne.Scalar, flat, ignored)
    zeros = edit.call(aten.zeros_like.default, flat)
    places = edit.call(aten.where.ScalarOther, kept, zeros, SKIPPED)

    def total(each: fx.Node, how: int) -> fx.Node:
        column = edit.call(aten.reshape.default, edit.call(aten.neg.default, each), [-1, 1])
        return edit.call(aten.nll_loss_nd.default, column, places, None, how, SKIPPED)

    if weight is None or reduction == SUM:
        return total(rows, reduction)
    classes = edit.call(aten.where.self, kept, flat, zeros)
    weights = edit.call(aten.index_select.default, weight, 0, classes)
    return edit.call(aten.div.Tensor, total(rows, SUM), total(weights, SUM))


LOSSES: dict[Any, Callable[[fx.Node, Editor], fx.Node | None]] = {
    aten.cross_entropy_loss.default: _cross_entropy,
    aten.nll_loss_nd.default: _nll_loss,
    **dict.fromkeys(ONE_BY_ONE, _one_by_one),
}
