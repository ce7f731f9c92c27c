"""Turns zeros padded around a convolution's input into its `padding`, where both ends are equal.

    conv(pad(x, [a, a, b, b, 2, 0]), w)  ->  conv(pad(x, [0, 0, 0, 0, 2, 0]), w, padding=[0, b, a])

A rank that has a piece of such a dim then gets rows of its neighbours once, not for the zeros and
for the convolution, and no padded copy is kept. An end with more zeros (causal) stays as it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from dcpc.trace.canonical.editor import Editor

aten = torch.ops.aten

_ARGUMENTS = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_PADS = {aten.pad.default, aten.constant_pad_nd.default}


def padded_convolution(node: fx.Node, edit: Editor) -> fx.Node | None:
    """Returns the convolution with a larger `padding`, or None where no zeros can be moved."""
    given: dict[str, Any] = dict(zip(_ARGUMENTS, node.args, strict=False)) | dict(node.kwargs)
    source, weight = given["input"], given["weight"]
    if not isinstance(source, fx.Node) or not isinstance(weight, fx.Node):
        return None
    assert callable(node.target)
    count = weight.meta["val"].ndim - 2
    amounts = _zeros(source, count)
    own = given.get("padding", 0)
    if amounts is None or isinstance(own, str):
        return None
    padding = [*own] * (count if len(own) == 1 else 1) if isinstance(own, list) else [own] * count
    moved = False
    for d in range(count):
        at = 2 * (count - 1 - d)
        front, back = amounts[at : at + 2]
        if isinstance(front, int) and isinstance(back, int) and front == back > 0:
            padding[d], amounts[at : at + 2], moved = padding[d] + front, [0, 0], True
    if not moved:
        return None
    x = source.args[0]
    if any(not isinstance(a, int) or a for a in amounts):
        x = edit.call(aten.constant_pad_nd.default, x, amounts)
    named = {"stride": [1] * count, "dilation": [1] * count, "groups": 1} | given
    return edit.call(
        node.target, x, weight, given.get("bias"), named["stride"], padding, named["dilation"],
        named["groups"],
    )  # fmt: skip


def _zeros(source: fx.Node, count: int) -> list[Any] | None:
    """Returns `pad` of a zero padding, extended to the last `count` dims; None for any other op."""
    if source.target not in _PADS:
        return None
    names = [a.name for a in source.target._schema.arguments]
    given: dict[str, Any] = dict(zip(names, source.args, strict=False)) | dict(source.kwargs)
    if given.get("mode", "constant") != "constant" or given.get("value"):
        return None
    amounts = list(given["pad"])
    return amounts + [0] * (2 * count - len(amounts))
