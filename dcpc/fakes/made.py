"""Fake tensors of which nothing is known yet, made below torch's mode of fake tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode
from torch._subclasses.fake_tensor import in_kernel_invocation_manager
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from dcpc.fakes.layouts import Layout
from dcpc.leaves import size_key


class KeepingEnv(ShapeEnv):
    """A ShapeEnv that keeps the memories of dense tensors, which are slow to make."""

    def __init__(self) -> None:
        """An env without symbols."""
        super().__init__()
        self._memories: dict[Layout, list[Tensor]] = {}
        self._taken: Counter[Layout] | None = None

    @contextmanager
    def taking(self, taken: Counter[Layout] | None) -> Iterator[None]:
        """Counts what is taken in its block.

        Args:
            taken: counts the memories of dense tensors that are taken. All that count in one have
                memory of their own; others may have the same.
        """
        before, self._taken = self._taken, taken
        try:
            yield
        finally:
            self._taken = before

    def dense(self, shape: Sequence[Any], dtype: torch.dtype) -> Tensor:
        """Returns a dense meta tensor of which nothing was asked, see `taking`."""
        key = (dtype, *map(size_key, shape))
        known = self._memories.setdefault(key, [])
        taken = Counter() if self._taken is None else self._taken
        if taken[key] == len(known):
            known.append(torch.empty(shape, dtype=dtype, device="meta"))
        memory = known[taken[key]]
        taken[key] += 1
        return torch.as_strided(memory, shape, memory.stride(), 0)


def is_told(value: Any) -> TypeGuard[FakeTensor]:
    """Whether a value is a fake tensor of which only the layout is known: no constant, no index."""
    return (
        isinstance(value, FakeTensor) and value.constant is None and value.layout is torch.strided
    )


def empty(
    shape: Sequence[Any], dtype: torch.dtype, device: torch.device, mode: FakeTensorMode
) -> FakeTensor:
    """Returns a dense fake tensor.

    `torch.empty` in the mode takes three times as long; of a kept memory, sixteen times.
    """
    env = mode.shape_env
    with torch._C._DisableTorchDispatch(), torch._C._AutoDispatchBelowAutograd():
        if isinstance(env, KeepingEnv):
            made = env.dense(shape, dtype)
        else:
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
