"""Symbolic sizes whose questions are noted, and fake tensors of which nothing is known yet.

While torch traces a call on fake tensors it asks things of their sizes: is this one, do these two
differ. What it traces is right wherever the answers are the same.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import sympy
import torch
from torch import Tensor
from torch._dynamo.source import ConstantSource
from torch._subclasses import FakeTensor, FakeTensorMode
from torch._subclasses.fake_tensor import in_kernel_invocation_manager
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

# A question of sizes -> its answer: true, false or a number.
Answers: TypeAlias = Mapping[sympy.Basic, sympy.Basic]
# What says which fake tensors are alike: dtype, device, dims, then sizes, strides, offset, bytes.
Layout: TypeAlias = tuple[Any, ...]


class AskingEnv(ShapeEnv):
    """A ShapeEnv that notes what is asked of sizes, but for what is so at any sizes."""

    def __init__(self) -> None:
        """An env without symbols."""
        super().__init__()
        self._asked: dict[sympy.Basic, sympy.Basic] | None = None
        self._first_ranges: dict[sympy.Symbol, Any] = {}
        self._hints: dict[sympy.Symbol, int] = {}
        self._memories: dict[Layout, list[Tensor]] = {}
        self._taken: Counter[Layout] | None = None

    @contextmanager
    def noting(
        self, taken: Counter[Layout] | None = None
    ) -> Iterator[dict[sympy.Basic, sympy.Basic]]:
        """Yields what is asked until the end of the context; then what holds anyway is dropped.

        Args:
            taken: counts the memories of dense tensors that are taken. All that count in one have
                memory of their own; others may have the same.
        """
        before = self._asked, self._taken
        self._asked, self._taken = {}, taken
        found = self._asked
        try:
            yield found
        finally:
            self._asked, self._taken = before
        for question in [q for q in found if self._is_always_so(q)]:
            del found[question]

    def evaluate_expr(self, orig_expr: sympy.Basic, *args: Any, **kwargs: Any) -> sympy.Basic:
        """Returns the answer, as torch's."""
        answer = super().evaluate_expr(orig_expr, *args, **kwargs)
        if self._asked is not None:
            self._asked[orig_expr] = answer
        return answer

    def dense(self, shape: Sequence[Any], dtype: torch.dtype) -> Tensor:
        """Returns a dense meta tensor of which nothing was asked, see `noting`."""
        key = (dtype, *map(size_key, shape))
        known = self._memories.setdefault(key, [])
        taken = Counter() if self._taken is None else self._taken
        if taken[key] == len(known):
            known.append(torch.empty(shape, dtype=dtype, device="meta"))
        memory = known[taken[key]]
        taken[key] += 1
        return torch.as_strided(memory, shape, memory.stride(), 0)

    def integer(self, name: str, hint: int) -> torch.SymInt:
        """Returns a new size.

        Args:
            name: what torch calls it in messages.
            hint: its value in the trace.
        """
        source = ConstantSource(f"{name}_{len(self._hints)}")  # programs have names in common
        symbol = self.create_symbol(
            hint, source=source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None
        )
        self._first_ranges[symbol] = self.var_to_range[symbol]  # guards may narrow it later
        value = self.create_symintnode(symbol, hint=hint, source=source)
        assert isinstance(value, torch.SymInt), f"{name} was fixed"
        self._hints[symbol] = hint
        return value

    def hint(self, symbol: sympy.Symbol) -> int:
        """Returns the value of a symbol in the trace."""
        return self._hints[symbol]

    def _is_always_so(self, question: sympy.Basic) -> bool:
        """Whether no guard, and no other range than the first of each symbol, is behind an answer.

        As a number an answer is one of the sizes of the trace.
        """
        symbols = question.free_symbols
        if not symbols:
            return True
        ranges = tuple((s, self._first_ranges[s]) for s in sorted(symbols, key=str))
        known = self._maybe_evaluate_static(question, axioms=(), var_to_range=ranges)
        return known is not None


def asking(mode: FakeTensorMode) -> AskingEnv:
    """Returns the env of a mode's sizes, one that notes questions."""
    assert isinstance(mode.shape_env, AskingEnv), "pieces are traced in an env that notes questions"
    return mode.shape_env


def layout_of(tensor: Tensor) -> Layout:
    """Returns what tensors of one dtype, device, shape, strides and memory share."""
    sizes = (*tensor.shape, *tensor.stride(), tensor.storage_offset())
    size_bytes = size_key(tensor.untyped_storage().nbytes())
    if isinstance(size_bytes, sympy.Add):
        size_bytes = _expanded(size_bytes)
    return tensor.dtype, tensor.device, tensor.ndim, *map(size_key, sizes), size_bytes


@functools.lru_cache(maxsize=4096)
def _expanded(size: sympy.Expr) -> sympy.Expr:
    """Returns a size multiplied out: torch writes that of dense memory as n * (m - 1) + n, too."""
    return sympy.expand(size)


def size_key(value: Any) -> Any:
    """Returns the expression of a size; of anything else what equal values share."""
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return value.node.expr
    return value if type(value) is int else (type(value).__name__, repr(value))


def again(like: Tensor, mode: FakeTensorMode) -> Tensor:
    """Returns a fake tensor like another, in memory of its own, of which nothing was asked."""
    sizes = (*like.shape, *like.stride(), like.storage_offset())
    return _made(layout_of(like), sizes, like.untyped_storage().nbytes(), mode)


def again_of(layout: Layout, number: Callable[[Any], Any], mode: FakeTensorMode) -> Tensor:
    """Returns a fake tensor of a layout.

    Args:
        layout: of the tensor.
        number: gives the size of the trace that an expression is.
        mode: of the tensor.
    """
    *sizes, size_bytes = map(number, layout[3:])
    return _made(layout, sizes, size_bytes, mode)


def _made(layout: Layout, sizes: Sequence[Any], size_bytes: Any, mode: FakeTensorMode) -> Tensor:
    dtype, device, dims, *_ = layout
    shape, strides, offset = sizes[:dims], sizes[dims : 2 * dims], sizes[2 * dims]
    if _fills_its_memory(layout):
        return empty(shape, dtype, device, mode)
    memory = empty([size_bytes // dtype.itemsize], dtype, device, mode)
    return strided(memory, shape, strides, offset)


def empty(
    shape: Sequence[Any], dtype: torch.dtype, device: torch.device, mode: FakeTensorMode
) -> FakeTensor:
    """Returns a dense fake tensor; `torch.empty` in the mode takes sixteen times as long."""
    with torch._C._DisableTorchDispatch(), torch._C._AutoDispatchBelowAutograd():
        made = asking(mode).dense(shape, dtype)
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


def _fills_its_memory(layout: Layout) -> bool:
    """Whether a tensor is contiguous and all there is in its memory, told from expressions."""
    dtype, _, dims, *sizes = layout
    shape, strides, (offset, size_bytes) = sizes[:dims], sizes[dims : 2 * dims], sizes[2 * dims :]
    expected = sympy.Integer(1)
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if stride != expected:
            return False
        expected = expected * size
    return bool(offset == 0 and size_bytes == expected * dtype.itemsize)
