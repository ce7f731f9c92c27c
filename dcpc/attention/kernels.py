"""Which kernel computes an attention."""

from __future__ import annotations

import torch


def kernel_name(
    device: str,
    same_widths: bool,
    mask: torch.dtype | None,
    has_keep: bool,
    before: int | None,
    after: int | None,
    empty: str,
    has_segment: bool = False,
) -> str:
    """Returns "flash", "cuda" or "blocks": what computes attention, told without any size.

    "flash" is the CPU's; "cuda" falls back to blocks where `cuda.able` says no. Of packed sequences
    "flash" and "cuda" compute one at a time, but blocks where these are very short.

    Args:
        device: type of the tensors' device.
        same_widths: whether keys and values are equally wide.
        mask: dtype of the mask, None without one.
        has_keep: whether some keys are hidden from all queries.
        before: as in `Sight`.
        after: as in `Sight`.
        empty: as in `Sight`.
        has_segment: whether rows hold several sequences.
    """
    if device == "cuda" and mask is None and not has_keep and same_widths:
        return "cuda"
    if device != "cpu" or not same_widths or before is not None or after not in (None, 0):
        return "blocks"
    if mask is not None and (has_keep or has_segment):
        return "blocks"
    native = empty == "zero" or (mask is None and not has_keep)
    return "flash" if native else "blocks"
