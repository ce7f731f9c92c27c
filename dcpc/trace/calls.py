"""Calls of forward that torch captures for one length or with writes, made otherwise.

    max_pool1d(x)              ->  max_pool2d of rows, as torch's own does it where x has a gradient
    pad(x, mode="circular")    ->  cat of the ends and x: torch's writes into an empty tensor

Both stay symbolic in every length and write nothing.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

Window: TypeAlias = int | list[int] | tuple[int, ...]


def _max_pool1d(
    x: Tensor,
    kernel_size: Window,
    stride: Window | None = None,
    padding: Window = 0,
    dilation: Window = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    """Returns the maxima: torch's C++ checks the length as a number."""
    if return_indices:
        return functional.max_pool1d(
            x, kernel_size, stride, padding, dilation, ceil_mode, return_indices
        )
    stride = kernel_size if stride is None or stride == () or stride == [] else stride
    sizes = (kernel_size, stride, padding, dilation)
    kernel, step, pad, spread = (s if isinstance(s, int) else s[0] for s in sizes)
    rows = x.unsqueeze(-2)
    found = torch.max_pool2d(rows, (1, kernel), (1, step), (0, pad), (1, spread), ceil_mode)
    return found.squeeze(-2)


def _pad(x: Tensor, pad: list[int], mode: str = "constant", value: float | None = None) -> Any:
    """Returns the padded tensor; circular padding of the last dims, the very last one first."""
    given = [n for n in pad if isinstance(n, int) and n >= 0]
    if mode != "circular" or len(given) < len(pad):
        return functional.pad(x, pad, mode, value)
    for i, (before, after) in enumerate(zip(pad[::2], pad[1::2], strict=True)):
        dim = x.ndim - 1 - i
        size = x.shape[dim]
        parts = [x.narrow(dim, size - before, before)] * bool(before) + [x]
        parts += [x.narrow(dim, 0, after)] * bool(after)
        x = torch.cat(parts, dim) if len(parts) > 1 else x
    return x


_INSTEAD: dict[Any, Callable[..., Any]] = {
    torch.max_pool1d: _max_pool1d,
    functional.max_pool1d: _max_pool1d,
    functional.pad: _pad,
}


class CapturedOtherwise(TorchFunctionMode):
    """Makes these calls otherwise."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Returns the call's result."""
        return _INSTEAD.get(func, func)(*args, **(kwargs or {}))
