"""A ShapeEnv that records torch's questions about sizes, and fresh fake tensors.

While torch traces a call on fake tensors it asks questions about their sizes: is this one 1, do
these two differ. The trace is valid wherever the answers are the same.
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
    """A ShapeEnv that records the questions about sizes whose answers depend on the sizes."""

    def __init__(self) -> None:
        """Creates an env without symbols."""
        super().__init__()
        self._asked: dict[sympy.Basic, sympy.Basic] | None = None
        self._first_ranges: dict[sympy.Symbol, Any] = {}
        self._hints: dict[sympy.Symbol, int] = {}

    @contextmanager
    def noting(self) -> Iterator[dict[sympy.Basic, sympy.Basic]]:
        """Yields a record of questions; at the end, answers that hold at any sizes are dropped."""
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
        """Returns torch's answer, and records it."""
        answer = super().evaluate_expr(orig_expr, *args, **kwargs)
        if self._asked is not None:
            self._asked[orig_expr] = answer
        return answer

    def integer(self, name: str, hint: int) -> torch.SymInt:
        """Returns a new symbolic size."""
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
        """Whether an answer follows from the initial ranges of the symbols, without any guard.

        As a number an answer is one of the sizes of the trace.

        Raises:
            CodegenError: the question is about a size that depends on a tensor's values.
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
    """Returns a fake mode's ShapeEnv, which must be an `AskingEnv`."""
    assert isinstance(mode.shape_env, AskingEnv), "pieces are traced in an env that notes questions"
    return mode.shape_env


def again(like: Tensor, mode: FakeTensorMode) -> Tensor:
    """Returns a fake tensor laid out like another, in new memory, without earlier questions."""
    sizes = (*like.shape, *like.stride(), like.storage_offset())
    return _made(layout_of(like), sizes, like.untyped_storage().nbytes(), mode)


def again_of(layout: Layout, number: Callable[[Any], Any], mode: FakeTensorMode) -> Tensor:
    """Returns a fake tensor of a given layout."""
    *sizes, size_bytes = map(number, layout[3:])
    return _made(layout, sizes, size_bytes, mode)


def _made(layout: Layout, sizes: Sequence[Any], size_bytes: Any, mode: FakeTensorMode) -> Tensor:
    dtype, device, dims, *_ = layout
    shape, strides, offset = sizes[:dims], sizes[dims : 2 * dims], sizes[2 * dims]
    if fills_its_memory(layout):
        return empty(shape, dtype, device, mode)
    memory = empty([size_bytes // dtype.itemsize], dtype, device, mode)
    return strided(memory, shape, strides, offset)
