"""Random operands chosen to expose false rules when an op is tried on them.

Each kind defines how all operands of one call are drawn. Numbers come from seeded generators on the
CPU, so that every rank draws the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

# Integers are below this (or a smaller size), so that they may be indices into any dim.
INDICES = 3


def _normal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def _uniform(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.rand(shape, dtype=torch.float64, generator=generator)


def _few(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Draws few distinct numbers: many duplicates and zeros."""
    return torch.randint(-2, 3, shape, generator=generator).double()


def _sorted(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return _normal(shape, generator).flatten().sort().values.reshape(shape)


def _falling(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return -_sorted(shape, generator)


def _constant(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.full(shape, 1.5, dtype=torch.float64)


def _wide(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Draws magnitudes from 1e-6 to 1e6, of both signs."""
    return torch.pow(10.0, 12 * _uniform(shape, generator) - 6) * _normal(shape, generator).sign()


def _negative(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return -_uniform(shape, generator) - 0.1


def _spike(size: float, among_zeros: bool) -> Callable[[tuple[int, ...], torch.Generator], Tensor]:
    """Returns a draw with one outlier: ops on the whole see it, most pieces do not."""

    def draw(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        x = _normal(shape, generator) * (0.0 if among_zeros else 0.1)
        if x.numel():
            at = int(torch.randint(0, x.numel(), (), generator=generator))
            x.view(-1)[at] = size
        return x

    return draw


Draw = Callable[[tuple[int, ...], torch.Generator], Tensor]

# Most ops accept the first two; a call that refuses some of the others still has a rule.
KINDS: tuple[Draw, ...] = (
    _normal, _uniform, _few, _sorted, _falling, _constant, _wide, _negative,
    _spike(1e4, False), _spike(-1e4, False), _spike(1e4, False), _spike(3.0, True),
    _spike(-3.0, True), _spike(float("nan"), False), _spike(float("inf"), False),
)  # fmt: skip


def draw(
    kind: int,
    shapes: Sequence[tuple[int, ...]],
    dtypes: Sequence[torch.dtype],
    seed: int,
    indices: int = INDICES,
) -> list[Tensor]:
    """Returns operands of one kind, on the CPU."""
    generator = torch.Generator().manual_seed(1_000_003 * seed + kind)
    return [
        _typed(KINDS[kind](s, generator), d, indices) for s, d in zip(shapes, dtypes, strict=True)
    ]


def redraw(x: Tensor, dim: int, index: int, seed: int) -> Tensor:
    """Returns a copy with one slice replaced by other values."""
    generator = torch.Generator().manual_seed(1_000_003 * seed + 7 * dim + index)
    y = x.clone()
    part = y.select(dim, index)
    if x.dtype == torch.bool:
        new = ~part
    elif not (x.is_floating_point() or x.is_complex()):
        new = torch.where(part > 0, part - 1, part + 1)
    else:
        new = part + 1 + _uniform(tuple(part.shape), generator).to(x.dtype)
    part.copy_(new)
    return y


def _typed(x: Tensor, dtype: torch.dtype, indices: int) -> Tensor:
    """Returns drawn numbers in an operand's dtype: integers as indices, booleans by sign."""
    if dtype == torch.bool:
        return x > 0
    if dtype.is_complex:
        return torch.complex(x, x.flip(-1) if x.ndim else -x).to(dtype)
    if not dtype.is_floating_point:
        known = x.nan_to_num(1.0, 2.0, 0.0).clamp(-(10**6), 10**6)
        return (known * 7).floor().to(dtype) % max(indices, 1)
    return x.to(dtype)
