"""Cross-entropy with probabilities as targets, where torch fixes the number of rows (2.11)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from dcpc.fx.torch_api.tracing import fixes_soft_targets


def soft_targets(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """Returns the loss with probability targets, or NotImplemented to use torch's function."""
    if size_average is not None or reduce is not None:
        reduction = torch.nn._reduction.legacy_get_string(size_average, reduce)
    right = target.is_floating_point() and input.shape == target.shape and input.ndim > 0
    known = reduction in ("none", "mean", "sum") and ignore_index < 0 and 0 <= label_smoothing <= 1
    if not right or not known:
        return NotImplemented  # torch says what is wrong
    with _disable_current_modes():
        if not fixes_soft_targets():
            return NotImplemented
    dim = min(input.ndim - 1, 1)
    if label_smoothing:
        target = target * (1 - label_smoothing) + label_smoothing / input.shape[dim]
    each = input.log_softmax(dim) * target
    if weight is not None:
        each = each * weight.view([-1 if d == dim else 1 for d in range(input.ndim)])
    each = -each.sum(dim)
    if reduction == "none":
        return each
    return each.mean() if reduction == "mean" else each.sum()
