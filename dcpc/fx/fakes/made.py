"""Makes fake tensors below torch's fake mode, which is faster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeGuard

import torch
from torch._subclasses import FakeTensor, FakeTensorMode
from torch._subclasses.fake_tensor import in_kernel_invocation_manager


def is_told(value: Any) -> TypeGuard[FakeTensor]:
    """Whether a value is a strided fake tensor without a constant value."""
    return (
        isinstance(value, FakeTensor) and value.constant is None and value.layout is torch.strided
    )


def empty(
    shape: Sequence[Any], dtype: torch.dtype, device: torch.device, mode: FakeTensorMode
) -> FakeTensor:
    """Returns a contiguous fake tensor.

    `torch.empty` in the mode takes three times as long.
    """
    with torch._C._DisableTorchDispatch(), torch._C._AutoDispatchBelowAutograd():
        made = torch.empty(shape, dtype=dtype, device="meta")
    return FakeTensor(mode, made, device)


def strided(
    source: FakeTensor, shape: Sequence[Any], strides: Sequence[Any], offset: Any
) -> FakeTensor:
    """Returns a view of a fake tensor; `as_strided` in the mode takes three times as long."""
    with (
        in_kernel_invocation_manager(source.fake_mode),
        torch._C._AutoDispatchBelowAutograd(),
    ):
        seen = torch.as_strided(source, shape, strides, offset)
    return FakeTensor(source.fake_mode, seen, source.fake_device)
