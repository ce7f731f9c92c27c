"""Draws random calls; a strategy is a function from a `Source` to a `Case`."""

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from tests.passes.sharding.rule_check import Case

aten = torch.ops.aten
DTYPES = (torch.float64, torch.int64, torch.bool)
# Sizes, those first that tell most: hypothesis starts with them and shrinks towards them.
TELLING = (3, 2, 5, 1, 4, 7, 6, 0, 8, 9)

Strategy = Callable[["Source"], Case]
CASES: dict[str, Strategy] = {}


class Source:
    """Random shapes from hypothesis (they shrink), random values from a seeded generator."""

    def __init__(self, draw: Callable[[Any], Any], op: str) -> None:
        self.draw, self.op = draw, op
        namespace, name = op.split(".")
        self.packet = getattr(getattr(torch.ops, namespace), name)
        self.generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))

    def size(self, low: int = 1, high: int = 7) -> int:
        return self.pick(*(n for n in TELLING if low <= n <= high))

    def pick(self, *options: Any) -> Any:
        return self.draw(st.sampled_from(options))

    def flag(self) -> bool:
        return self.draw(st.booleans())

    def shape(self, low: int = 1, high: int = 4, largest: int = 7) -> list[int]:
        ndim = self.size(low, high)
        return [self.size(1, largest) for _ in range(ndim)]

    def dim(self, shape: list[int]) -> int:
        d = self.draw(st.integers(0, len(shape) - 1))
        return d - len(shape) if self.flag() else d

    def broadcast(self, shape: list[int]) -> list[int]:
        """A shape that broadcasts to the given one."""
        kept = shape[self.draw(st.integers(0, len(shape))) :] if self.flag() else shape
        return [1 if self.draw(st.integers(0, 3)) == 3 else n for n in kept]

    def floats(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=self.generator)

    def below(self, stop: int, *shape: int) -> Tensor:
        return torch.randint(0, stop, shape, generator=self.generator)

    def tensor(self, *shape: int, dtypes: tuple[torch.dtype, ...] = DTYPES[:2]) -> Tensor:
        """Integers are never 0, so that they may divide."""
        dtype = self.pick(*dtypes)
        if dtype == torch.float64:
            return self.floats(*shape)
        if dtype == torch.bool:
            return self.below(2, *shape).bool()
        return (self.below(3, *shape) + 1) * (self.below(2, *shape) * 2 - 1)

    def maybe(self, value: Tensor) -> Tensor | None:
        return value if self.flag() else None


def strategy(*ops: str) -> Callable[[Strategy], Strategy]:
    """Registers a strategy for some ops, of which each has one."""

    def register(function: Strategy) -> Strategy:
        for op in ops:
            assert op not in CASES, f"{op} has two strategies"
            CASES[op] = function
        return function

    return register
