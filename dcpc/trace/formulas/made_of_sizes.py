"""Formulas for tensors that torch makes of a length in C++, which would fix a symbolic length.

Windows and frequencies are made of `arange`, an affine grid of `linspace`, whose positions ranks
know; a Kronecker product is one of two views.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dcpc.ops.positions import linspace


def _places(count: Any, dtype: torch.dtype | None, more: dict[str, Any]) -> Any:
    """Returns `arange(count)` in a floating dtype, or NotImplemented to use torch's function."""
    dtype = dtype or torch.get_default_dtype()
    known = {k: v for k, v in more.items() if v not in (None, False) and v is not torch.strided}
    if (
        not isinstance(count, torch.SymInt)
        or not dtype.is_floating_point
        or known.keys() - {"device"}
    ):
        return NotImplemented
    length: Any = count  # torch's annotation has no symbolic numbers
    return torch.arange(length, dtype=dtype, device=more.get("device"))


def _window(formula: Callable[..., Tensor]) -> Callable[..., Any]:
    """Returns a window function such as `torch.hann_window`, from its formula."""

    def window(
        window_length: Any,
        periodic: bool = True,
        *numbers: float,
        dtype: torch.dtype | None = None,
        layout: Any = None,
        device: Any = None,
        pin_memory: bool | None = None,
        requires_grad: bool = False,
        **named: float,
    ) -> Any:
        more = {"layout": layout, "device": device, "pin": pin_memory, "learns": requires_grad}
        places = _places(window_length, dtype, more)
        if places is NotImplemented:
            return NotImplemented
        last = window_length if periodic else window_length - 1
        return formula(places, last, *numbers, **named)

    return window


def _hann(places: Tensor, last: Any) -> Tensor:
    return _hamming(places, last, 0.5, 0.5)


def _hamming(places: Tensor, last: Any, alpha: float = 0.54, beta: float = 0.46) -> Tensor:
    found: Tensor = alpha - beta * (places * (2 * math.pi / last)).cos()
    return found


def _blackman(places: Tensor, last: Any) -> Tensor:
    turns = places * (math.pi / last)
    found: Tensor = (turns * 4).cos() * 0.08 - (turns * 2).cos() * 0.5 + 0.42
    return found


def _bartlett(places: Tensor, last: Any) -> Tensor:
    rising = places * (2 / last)
    return torch.minimum(rising, 2 - rising)


def _kaiser(places: Tensor, last: Any, beta: float = 12.0) -> Tensor:
    center = places * (2 / last) - 1
    scale = torch.full((), beta, dtype=places.dtype, device=places.device).i0()
    found: Tensor = (beta * (1 - center.square()).clamp(min=0).sqrt()).i0() / scale
    return found


def _rfftfreq(n: Any, d: float = 1.0, *, dtype: torch.dtype | None = None, **more: Any) -> Any:
    if not isinstance(n, torch.SymInt):
        return NotImplemented
    places = _places(n // 2 + 1, dtype, more)
    return places if places is NotImplemented else places * (1.0 / (n * d))


def _fftfreq(n: Any, d: float = 1.0, *, dtype: torch.dtype | None = None, **more: Any) -> Any:
    places = _places(n, dtype, more)
    if places is NotImplemented:
        return NotImplemented
    return torch.where(places < (n + 1) // 2, places, places - n) * (1.0 / (n * d))


def _kron(input: Tensor, other: Tensor) -> Any:
    """Returns the Kronecker product of two tensors, as a product of two views."""
    if not any(isinstance(n, torch.SymInt) for n in (*input.shape, *other.shape)):
        return NotImplemented
    ndim = max(input.ndim, other.ndim)
    a, b = (x[(None,) * (ndim - x.ndim)] for x in (input, other))
    for d in range(ndim):
        a, b = a.unsqueeze(2 * d + 1), b.unsqueeze(2 * d)
    found = a * b
    for d in range(ndim):
        found = found.flatten(d, d + 1)
    return found


def _affine_grid(theta: Tensor, size: Sequence[Any], align_corners: bool | None = None) -> Any:
    """Returns the sampling grid `[N, H, W, 2]` or `[N, D, H, W, 3]` of affine matrices `theta`."""
    space = list(size[2:])
    floating = isinstance(theta, Tensor) and theta.is_floating_point() and theta.ndim == 3
    if (
        not floating
        or not any(isinstance(n, torch.SymInt) for n in size)
        or len(space) not in (2, 3)
    ):
        return NotImplemented
    if theta.shape[-2] != len(space) or theta.shape[-1] != len(space) + 1:
        return NotImplemented
    ones = theta.new_ones([1] * len(space))
    axes = [
        _from_minus_one(count, bool(align_corners), theta).reshape(
            [count if k == d else 1 for k in range(len(space))]
        )
        for d, count in enumerate(space)
    ]
    base = torch.stack([x.expand(space) for x in (*axes[::-1], ones)], -1)  # x comes first
    base = base.flatten(0, -2).expand(size[0], -1, -1)
    return torch.bmm(base, theta.mT).reshape([size[0], *space, len(space)])


def _from_minus_one(count: Any, corners: bool, like: Tensor) -> Tensor:
    """Returns `count` points in [-1, 1]: from end to end, or the centres of as many equal parts."""
    if isinstance(count, int) and count <= 1:
        return like.new_zeros([count])
    at: Tensor = linspace(-1.0, 1.0, count, like.dtype, like.device)
    return at if corners else at * ((count - 1) / count)


FORMULAS: dict[Any, Callable[..., Any]] = {
    torch.hann_window: _window(_hann),
    torch.hamming_window: _window(_hamming),
    torch.blackman_window: _window(_blackman),
    torch.bartlett_window: _window(_bartlett),
    torch.kaiser_window: _window(_kaiser),
    torch.fft.rfftfreq: _rfftfreq,
    torch.fft.fftfreq: _fftfreq,
    torch.kron: _kron,
    Tensor.kron: _kron,
    torch.nn.functional.affine_grid: _affine_grid,
}
