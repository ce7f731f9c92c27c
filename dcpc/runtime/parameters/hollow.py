"""Parameters that have a shape and no memory yet, in place of those of the meta device.

    meta          shape, dtype; no device       as the user made it
    hollow        shape, dtype, device, 0 bytes  a store is made of these
    with memory   a store gives it: all of it, or what all ranks map

The way in between lets each store decide whose memory it is, and no rank need hold all of it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def hollow(p: nn.Parameter, device: torch.device) -> nn.Parameter:
    """Returns a parameter like one of the meta device, on a device, without memory.

    Args:
        p: parameter on the meta device, whose shape, strides, dtype and attributes it gets.
        device: device on which its memory will be.
    """
    empty = torch.empty_strided(p.shape, p.stride(), dtype=p.dtype, device=device)
    empty.untyped_storage().resize_(0)
    made = nn.Parameter(empty, p.requires_grad)
    vars(made).update(vars(p))
    return made


def is_hollow(p: Tensor) -> bool:
    """Whether a tensor has elements and no memory for them."""
    return p.numel() > 0 and p.untyped_storage().nbytes() == 0


def memory_bytes(p: Tensor) -> int:
    """Returns the bytes of a tensor's memory, for a hollow one those that it needs."""
    if not is_hollow(p):
        return int(p.untyped_storage().nbytes())
    last = sum((size - 1) * stride for size, stride in zip(p.shape, p.stride(), strict=True))
    return int(p.storage_offset() + last + 1) * p.itemsize


def give_memory(p: Tensor) -> None:
    """Gives a hollow tensor memory of this rank, of any content; others stay as they are."""
    if is_hollow(p):
        p.untyped_storage().resize_(memory_bytes(p))
