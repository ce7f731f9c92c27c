"""Rewrites a convolution whose stride equals its kernel to a linear: each window is a row.

    conv(x, w), stride == kernel   ->   linear(rows of x, w as a matrix)

The windows of a patch embedding then are factors as any others: a rank can have none of them, and
positions after the last whole window are cut off.
"""

from __future__ import annotations

import operator
from math import prod
from typing import Any

import torch
from torch import fx

from dcpc.trace.canonical.editor import Editor, expression

aten = torch.ops.aten

_ARGUMENTS = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")


def patch_convolution(node: fx.Node, edit: Editor) -> fx.Node | None:
    """Returns the linear that equals a convolution of patches; None for other convolutions."""
    given: dict[str, Any] = dict.fromkeys(_ARGUMENTS)
    given |= {**dict(zip(_ARGUMENTS, node.args, strict=False)), **node.kwargs}
    source, weight, bias = given["input"], given["weight"], given["bias"]
    if not isinstance(source, fx.Node) or not isinstance(weight, fx.Node):
        return None
    kernel = list(weight.meta["val"].shape[2:])
    if not _is_patch(source, kernel, given):
        return None
    shape = edit.shape(source)
    counts = [_count(edit, size, k) for size, k in zip(shape[2:], kernel, strict=True)]
    for d, k in enumerate(kernel):
        source = _cut(edit, source, d + 2, counts[d], k)
    split: list[Any] = shape[:2]
    windows, inside = [], []
    for count, k in zip(counts, kernel, strict=True):
        windows.append(len(split))
        split.append(count)
        if k > 1:
            inside.append(len(split))
            split.append(k)
    pieces = edit.call(aten.reshape.default, source, split)
    rows = edit.call(aten.permute.default, pieces, [0, *windows, 1, *inside])
    width = prod(weight.meta["val"].shape[1:])
    flat = edit.call(aten.reshape.default, rows, [shape[0], *counts, width])
    matrix = edit.call(aten.reshape.default, weight, [weight.meta["val"].shape[0], width])
    made = edit.call(aten.linear.default, flat, matrix, bias)
    order = [0, len(counts) + 1, *range(1, len(counts) + 1)]
    return edit.call(aten.permute.default, made, order)


def _is_patch(source: fx.Node, kernel: list[Any], given: dict[str, Any]) -> bool:
    def numbers(name: str, default: int) -> list[Any]:
        value = default if given[name] is None else given[name]
        values = list(value) if isinstance(value, (list, tuple)) else [value]
        return values * (len(kernel) if len(values) == 1 else 1)

    return (
        all(isinstance(k, int) for k in kernel)
        and prod(kernel) > 1
        and source.meta["val"].ndim == len(kernel) + 2
        and numbers("stride", 1) == kernel
        and given["padding"] in (None, 0, [0], [0] * len(kernel), "valid")
        and numbers("dilation", 1) == [1] * len(kernel)
        and given["groups"] in (None, 1)
    )


def _count(edit: Editor, size: Any, k: int) -> Any:
    """Returns the number of windows in a dim."""
    if k == 1:
        return size
    return size // k if isinstance(size, int) else edit.call(operator.floordiv, size, k)


def _cut(edit: Editor, source: fx.Node, dim: int, count: Any, k: int) -> fx.Node:
    """Drops the positions after the last whole window of a dim."""
    size = source.meta["val"].shape[dim]
    covered = (count.meta["val"] if isinstance(count, fx.Node) else count) * k
    if expression(covered) == expression(size):
        return source
    stop = count * k if isinstance(count, int) else edit.call(operator.mul, count, k)
    return edit.call(aten.slice.Tensor, source, dim, 0, stop)
