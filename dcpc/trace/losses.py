"""Takes reduced losses apart: one loss an element or a row, which may be sharded, and a reduction.

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
from torch import Tensor, fx

from dcpc.trace.editor import Editor, evaluated

aten = torch.ops.aten

MEAN, SUM = 1, 2  # values of ATen's `reduction` argument; 0 is none

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


def correct_row_losses(graph: fx.Graph) -> None:
    """Gives losses of rows that are not reduced the shape they have, and what is made of them.

    Functionalising, torch writes down a scalar for cross-entropy of `[rows, classes]`.
    """
    wrong: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if node.target in _OF_ROWS or not wrong.isdisjoint(node.all_input_nodes):
            value = evaluated(node)
            if _shape(value) != _shape(node.meta["val"]):
                node.meta["val"] = value
                wrong.add(node)


def _shape(value: Any) -> Any:
    return tuple(value.shape) if isinstance(value, Tensor) else None


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
    total = edit.call(aten.sum.dim_IntList, each, dims)
    if not mean:
        return total
    return edit.call(aten.div.Tensor, total, edit.product(edit.sizes(each, dims)))


def _cross_entropy(node: fx.Node, edit: Editor) -> fx.Node | None:
    names = ["self", "target", "weight", "reduction", "ignore_index", "label_smoothing"]
    logits, target, weight, reduction, ignored, smoothing = _given(
        node, names, [None, None, None, MEAN, -100, 0.0]
    )
    if reduction == 0:
        return None
    op = aten.cross_entropy_loss.default
    rows = edit.call(op, logits, target, weight, 0, ignored, smoothing)
    if target.meta["val"].is_floating_point():
        return _added(edit, rows, mean=reduction == MEAN)
    return _reduced(edit, rows, target, weight, reduction, ignored)


def _nll_loss(node: fx.Node, edit: Editor) -> fx.Node | None:
    names = ["self", "target", "weight", "reduction", "ignore_index"]
    scores, target, weight, reduction, ignored = _given(node, names, [None, None, None, MEAN, -100])
    if reduction == 0:
        return None
    rows = edit.call(aten.nll_loss_nd.default, scores, target, weight, 0, ignored)
    return _reduced(edit, rows, target, weight, reduction, ignored)


def _given(node: fx.Node, names: list[str], defaults: list[Any]) -> list[Any]:
    named = dict(zip(names, defaults, strict=True)) | dict(node.kwargs)
    return [*node.args, *(named[name] for name in names[len(node.args) :])]


def _reduced(
    edit: Editor, rows: fx.Node, target: fx.Node, weight: Any, reduction: int, ignored: int
) -> fx.Node:
    """The sum or mean of one loss a row, in the order of torch's kernel.

    The rows are what may be sharded; the reduction of one number a row is not, so that the loss is
    the plain model's to the last bit even where a library computes it in float32. A weighted mean
    is over the sum of the rows' weights.
    """
    flat = edit.call(aten.reshape.default, target, [-1])
    kept = edit.call(aten.ne.Scalar, flat, ignored)
    zeros = edit.call(aten.zeros_like.default, flat)
    places = edit.call(aten.where.ScalarOther, kept, zeros, ignored)

    def total(each: fx.Node, how: int) -> fx.Node:
        column = edit.call(aten.reshape.default, edit.call(aten.neg.default, each), [-1, 1])
        return edit.call(aten.nll_loss_nd.default, column, places, None, how, ignored)

    if weight is None or reduction == SUM:
        return total(rows, reduction)
    classes = edit.call(aten.where.self, kept, flat, zeros)
    weights = edit.call(aten.index_select.default, weight, 0, classes)
    return edit.call(aten.div.Tensor, total(rows, SUM), total(weights, SUM))


_OF_ROWS = (aten.cross_entropy_loss.default, aten.nll_loss_nd.default)
LOSSES: dict[Any, Callable[[fx.Node, Editor], fx.Node | None]] = {
    aten.cross_entropy_loss.default: _cross_entropy,
    aten.nll_loss_nd.default: _nll_loss,
    **dict.fromkeys(ONE_BY_ONE, _one_by_one),
}
