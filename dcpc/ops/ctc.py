"""`dcpc::ctc_loss`: torch's CTC loss, whose saved values have sizes that follow from shapes.

    dcpc::ctc_loss(log_probs, targets, input_lengths, target_lengths, blank, zero_infinity) -> loss
        dcpc::ctc_loss_forward(...)                          -> loss, log_alpha
        dcpc::ctc_loss_backward(grad, ..., loss, log_alpha)  -> gradient of log_probs

`log_probs` [t, n, c], `targets` [n, s] padded, lengths [n], loss [n]. torch's log_alpha has 2
max(target_lengths) + 1 columns, which values tell; this one 2 s + 1. Torch's kernels run on it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dcpc.errors import DataError

aten = torch.ops.aten
_TENSORS = "Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths"
_REST = "int blank, bool zero_infinity"
_SCHEMA = f"({_TENSORS}, {_REST}) -> (Tensor, Tensor)"
_BACKWARD = f"(Tensor grad, {_TENSORS}, Tensor loss, Tensor log_alpha, {_REST}) -> Tensor"


def _forward(log_probs: Tensor, targets: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """Returns the loss of each sample [n], and log_alpha [n, t, 2 s + 1]."""
    if not log_probs.numel():  # torch refuses no samples
        return _empty(log_probs, targets)
    width, classes = targets.shape[1], log_probs.shape[2]
    counted = torch.arange(width, device=targets.device) < rest[1].unsqueeze(1)
    wrong = targets[counted & ((targets < 0) | (targets >= classes))]
    if wrong.numel():
        raise DataError(
            f"ctc_loss: got the target {int(wrong[0])}; expected 0 to {classes - 1}, a class of "
            "log_probs (torch would read other memory); look at the labels, and at the lengths of "
            "the targets, which count no padding"
        )
    loss, log_alpha = aten._ctc_loss.Tensor(log_probs, targets, *rest)
    more = 2 * width + 1 - log_alpha.shape[2]
    return loss, F.pad(log_alpha, (0, more)) if more else log_alpha


def _empty(log_probs: Tensor, targets: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    t, n, _ = log_probs.shape
    return log_probs.new_empty([n]), log_probs.new_empty([n, t, 2 * targets.shape[1] + 1])


def _backward(grad: Tensor, log_probs: Tensor, *rest: Any) -> Tensor:
    """Returns the gradient of log_probs [t, n, c], contiguous."""
    if not log_probs.numel():
        return _empty_gradient(grad, log_probs)
    found: Tensor = aten._ctc_loss_backward.Tensor(grad, log_probs, *rest)
    return found


def _empty_gradient(grad: Tensor, log_probs: Tensor, *rest: Any) -> Tensor:
    return log_probs.new_empty(log_probs.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*inputs[:4], *output)
    ctx.rest = inputs[4:]


def _differentiate(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
    found = torch.ops.dcpc.ctc_loss_backward(grad, *ctx.saved_tensors, *ctx.rest)
    return found, None, None, None, None, None


forward = torch.library.custom_op(
    "dcpc::ctc_loss_forward", _forward, mutates_args=(), schema=_SCHEMA
)
forward.register_fake(_empty)
forward.register_autograd(_differentiate, setup_context=_save)
backward = torch.library.custom_op(
    "dcpc::ctc_loss_backward", _backward, mutates_args=(), schema=_BACKWARD
)
backward.register_fake(_empty_gradient)
_library = torch.library.Library("dcpc", "FRAGMENT")
_library.define(f"ctc_loss({_TENSORS}, {_REST}) -> Tensor")
_library.impl("ctc_loss", lambda *given: forward(*given)[0], "CompositeImplicitAutograd")
ctc_loss = torch.ops.dcpc.ctc_loss
