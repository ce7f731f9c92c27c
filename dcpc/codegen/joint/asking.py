"""Symbolic sizes whose questions are noted, and fake tensors of which nothing is known yet.

While torch traces a call on fake tensors it asks things of their sizes: is this one, do these two
differ. What it traces is right wherever the answers are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import sympy
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from dcpc.errors import CodegenError
from dcpc.fx.fakes import Layout, empty, fills_its_memory, layout_of, strided
from dcpc.fx.torch_api.tracing import open_pools

# A question of sizes -> its answer: true, false or a number.
Answers: TypeAlias = Mapping[sympy.Basic, sympy.Basic]


class AskingEnv(ShapeEnv):
    """A ShapeEnv that notes what is asked of sizes, but for what is so at any sizes."""

    def __init__(self) -> None:
        """An env without symbols."""
        super().__init__()
        self._asked: dict[sympy.Basic, sympy.Basic] | None = None
        self._first_ranges: dict[sympy.Symbol, Any] = {}
        self._hints: dict[sympy.Symbol, int] = {}

    @contextmanager
    def noting(self) -> Iterator[dict[sympy.Basic, sympy.Basic]]:
        """Yields what is asked until the end of the context; then what holds anyway is dropped."""
        before, self._asked = self._asked, {}
        found = self._asked
        try:
            with open_pools():
                yield found
        finally:
            self._asked = before
        for question in [q for q in found if self._is_always_so(q)]:
            del found[question]

    def evaluate_expr(self, orig_expr: sympy.Basic, *args: Any, **kwargs: Any) -> sympy.Basic:
        """Returns the answer, as torch's."""
        answer = super().evaluate_expr(orig_expr, *args, **kwargs)
        if self._asked is not None:
            self._asked[orig_expr] = answer
        return answer

    def integer(self, name: str, hint: int) -> torch.SymInt:
        """Returns a new size.

        Args:
            name: what torch calls it in messages.
            hint: its value in the trace.
        """
        name = f"{name}_{len(self._hints)}"  # programs have names in common
        source = torch._dynamo.source.ConstantSource(name)
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

        Raises:
            CodegenError: it is of a size that is not known before a tensor's values are.
        """
        if not question.free_symbols:
            return True
        # torch may write the question in other symbols, of which it knows that they are equal.
        symbols = question.free_symbols | self.simplify(question).free_symbols
        if unknown := symbols - self._first_ranges.keys():
            raise CodegenError(
                f"got a call whose backward has a size that depends on the values in a tensor "
                f"({', '.join(map(str, unknown))}); expected sizes made of the named dims; replace "
                "boolean indexing by torch.where"
            )
        ranges = tuple((s, self._first_ranges[s]) for s in sorted(symbols, key=str))
        known = self._maybe_evaluate_static(question, axioms=(), var_to_range=ranges)
        return known is not None


def asking(mode: FakeTensorMode) -> AskingEnv:
    """Returns the env of a mode's sizes, one that notes questions."""
    assert isinstance(mode.shape_env, AskingEnv), "pieces are traced in an env that notes questions"
    return mode.shape_env


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
    if fills_its_memory(layout):
        return empty(shape, dtype, device, mode)
    memory = empty([size_bytes // dtype.itemsize], dtype, device, mode)
    return strided(memory, shape, strides, offset)
