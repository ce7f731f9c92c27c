"""CTC loss as `dcpc::ctc_loss` of padded rows, whichever way targets and lengths are given.

targets [n, s]                 ->  as they are
targets [total], concatenated  ->  [n, total]: each row begins where its sample's targets do
labels[labels >= 0] [n, s]     ->  [n, s], without a size that depends on values
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dcpc.ops.ctc import ctc_loss
from dcpc.trace.formulas.chosen_rows import as_selected, mask_of
from dcpc.trace.formulas.under_autocast import in_float32


def _ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str | int = "mean",
    zero_infinity: bool = False,
) -> Any:
    batched = log_probs.ndim == 3
    scores = log_probs if batched else log_probs.unsqueeze(1)
    steps, counts = (_lengths(x, scores) for x in (input_lengths, target_lengths))
    number = torch.nn._reduction.get_enum(reduction) if isinstance(reduction, str) else reduction
    if steps is None or counts is None or scores.ndim != 3 or targets.ndim not in (1, 2):
        return NotImplemented  # torch says what is wrong
    rows = targets if targets.ndim == 2 else _rows(targets, counts)
    for x in (steps, counts, rows):
        torch._check(x.shape[0] == scores.shape[1])
    rows = rows.to(scores.device, torch.int64)
    each = ctc_loss(scores, rows, steps, counts, blank, zero_infinity)
    if zero_infinity:
        each = torch.where(each == torch.inf, 0, each)
    if number == 1:
        return (each / counts.to(each.dtype).clamp_min(1)).mean()
    return each.sum() if number == 2 else each if batched else each.squeeze(0)


def _lengths(given: Any, scores: Tensor) -> Tensor | None:
    """Returns lengths [n] as a tensor, None where they are no integers."""
    if isinstance(given, Tensor):
        whole = not given.is_floating_point() and not given.is_complex()
        return given.to(scores.device, torch.int64).reshape(-1) if whole else None
    if len(given) != scores.shape[1]:
        raise ValueError(f"got {len(given)} lengths for a CTC loss; expected one for each sample")
    return torch.stack([scores.new_full((), n, dtype=torch.int64) for n in given])


def _rows(targets: Tensor, counts: Tensor) -> Tensor:
    """Returns concatenated targets as rows, of which the first `counts` elements are a sample's."""
    width, flat = targets.shape[0], targets
    if (mask := mask_of(targets)) is not None:
        width = mask.shape[-1] if mask.ndim == 2 else mask.numel()
        flat = as_selected(targets)[torch.argsort(~mask.flatten(), stable=True)]
    first = counts.cumsum(0) - counts
    places = first.unsqueeze(1) + torch.arange(width, device=counts.device)
    return flat.to(counts.device)[places.clamp(max=flat.shape[0] - 1)]


CTC: Mapping[Any, Callable[..., Any]] = {
    F.ctc_loss: in_float32(F.ctc_loss, _ctc_loss),
    torch.ctc_loss: in_float32(torch.ctc_loss, _ctc_loss),
}
