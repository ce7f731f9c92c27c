"""Rows of a parameter: the part that each rank owns where ranks share it out.

Rows of dim 0, as torch's `Shard(0)` and `torch.chunk` divide them: all ranks have the same number,
those at the end fewer or none. A scalar is each rank's own.

    7 rows, 3 ranks      0 1 2 | 3 4 5 | 6 -
    flat, of all ranks   [rows of p, q, ...][rows of p, q, ...][rows of p, q, ...]

Several parameters travel in one flat tensor: a part for each rank, all parts of one length.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class SharedRows:
    """How ranks share out the rows of a tensor."""

    shape: torch.Size
    world: int

    @property
    def count(self) -> int:
        """Rows of all ranks but the last ones."""
        return -(-self.shape[0] // self.world) if self.shape else 1

    @property
    def row_numel(self) -> int:
        """Elements of a row."""
        return math.prod(self.shape[1:])

    @property
    def full_ranks(self) -> int:
        """Ranks that have `count` rows."""
        return self.shape[0] // self.count if self.shape and self.shape[0] else 0

    def of(self, rank: int, whole: Tensor) -> Tensor:
        """Returns the rows of a rank, a view of the whole tensor."""
        if not self.shape:
            return whole
        first = min(rank * self.count, self.shape[0])
        return whole.narrow(0, first, min(self.count, self.shape[0] - first))

    def shape_of(self, rank: int) -> torch.Size:
        """Returns the shape of a rank's rows."""
        return self.of(rank, torch.empty(self.shape, device="meta")).shape

    def write(self, parts: Tensor, whole: Tensor) -> None:
        """Writes each rank's rows to its part.

        Args:
            parts: (ranks, `count` times `row_numel`), of which the end may stay as it is.
            whole: tensor of `shape`.
        """
        if not self.shape:
            parts.copy_(whole)
            return
        rest, full = self.full_ranks * self.count, self.full_ranks
        parts[:full].copy_(whole[:rest].reshape(full, parts.shape[1]))
        if rest < self.shape[0]:
            last = whole[rest:].reshape(-1)
            parts[full, : last.numel()].copy_(last)

    def read(self, parts: Tensor, whole: Tensor) -> None:
        """Writes each rank's part to its rows; the reverse of `write`."""
        if not self.shape:
            whole.copy_(parts[0].view(()))
            return
        rest, full = self.full_ranks * self.count, self.full_ranks
        whole[:rest].copy_(parts[:full].reshape(rest, *self.shape[1:]))
        if rest < self.shape[0]:
            last = whole[rest:]
            last.copy_(parts[full, : last.numel()].view(last.shape))


@dataclass(frozen=True, slots=True)
class RowLayout:
    """Where the rows of several tensors lie in one flat tensor."""

    splits: tuple[SharedRows, ...]
    world: int

    @classmethod
    def of(cls, tensors: Sequence[Tensor], world: int) -> RowLayout:
        """Returns the layout of some tensors."""
        return cls(tuple(SharedRows(t.shape, world) for t in tensors), world)

    @property
    def numels(self) -> list[int]:
        """Elements of each tensor in the part of one rank."""
        return [s.count * s.row_numel for s in self.splits]

    @property
    def part_numel(self) -> int:
        """Elements of the part of one rank."""
        return sum(self.numels)

    def split(self, flat: Tensor) -> Sequence[Tensor]:
        """Returns the parts of each tensor, (ranks, elements)."""
        return torch.split(flat.view(self.world, self.part_numel), self.numels, dim=1)

    def own(self, part: Tensor, rank: int) -> list[Tensor]:
        """Returns a rank's rows of each tensor, views of its part."""
        shapes = [s.shape_of(rank) for s in self.splits]
        pieces = part.split(self.numels)
        return [x[: n.numel()].view(n) for x, n in zip(pieces, shapes, strict=True)]
