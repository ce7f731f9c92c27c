"""`dcpc::linspace`: evenly spaced positions for a symbolic length, which torch would fix.

`aten.linspace` takes an integer for `steps`, so a trace that calls it holds at one length. The op
here takes a dim's length, and asks torch for the numbers when it runs: torch's to the bit.
"""

import torch
from torch import Tensor
from torch.types import Number


@torch.library.custom_op("dcpc::linspace", mutates_args=())
def linspace(
    start: Number, end: Number, steps: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Returns `steps` numbers from `start` to `end`, both included; floats of shape (steps,)."""
    return torch.linspace(start, end, steps, dtype=dtype, device=device)


@linspace.register_fake
def _(start: Number, end: Number, steps: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty((steps,), dtype=dtype, device=device)
