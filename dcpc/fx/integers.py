"""Writes sympy expressions of integers as nodes of a graph."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import sympy
import torch
from torch import fx
from torch.utils._sympy import functions
from torch.utils._sympy.functions import (
    CeilToInt,
    FloatPow,
    FloatTrueDiv,
    FloorDiv,
    FloorToInt,
    IntTrueDiv,
    Max,
    Min,
    Mod,
    PowByNatural,
    PythonMod,
    RoundToInt,
    ToFloat,
    TruncToInt,
)

from dcpc.errors import CodegenError

_UNARY = ("sqrt", "cos", "cosh", "sin", "sinh", "tan", "tanh", "asin", "acos", "atan", "log2")
_UNARIES: dict[Any, Callable[..., Any]] = {
    getattr(functions, f"OpaqueUnaryFn_{name}"): getattr(torch, f"_sym_{name}") for name in _UNARY
}
_CALLS: dict[Any, Callable[..., Any]] = {
    **_UNARIES,
    FloorDiv: operator.floordiv,
    Mod: operator.mod,
    PythonMod: operator.mod,
    sympy.Mod: operator.mod,
    IntTrueDiv: operator.truediv,
    FloatTrueDiv: operator.truediv,
    PowByNatural: operator.pow,
    ToFloat: torch.sym_float,
    FloatPow: operator.pow,
    FloorToInt: math.floor,
    CeilToInt: math.ceil,
    TruncToInt: math.trunc,
    RoundToInt: round,
    Max: torch.sym_max,
    Min: torch.sym_min,
    sympy.Max: torch.sym_max,
    sympy.Min: torch.sym_min,
    sympy.Add: operator.add,
    sympy.Mul: operator.mul,
    sympy.Eq: operator.eq,
    sympy.Ne: operator.ne,
    sympy.Lt: operator.lt,
    sympy.Le: operator.le,
    sympy.Gt: operator.gt,
    sympy.Ge: operator.ge,
    sympy.And: operator.and_,
    sympy.Or: operator.or_,
    sympy.Not: torch.sym_not,
}
# Of these an argument such as h / 3 is no quotient of whole sizes.
_OF_REALS = (
    *_UNARIES,
    *(FloorToInt, CeilToInt, TruncToInt, RoundToInt, ToFloat, FloatPow, IntTrueDiv, FloatTrueDiv),
    *(sympy.Eq, sympy.Ne, sympy.Lt, sympy.Le, sympy.Gt, sympy.Ge),
)
_PAIRWISE = (
    *(torch.sym_max, torch.sym_min, operator.add, operator.mul),
    *(operator.and_, operator.or_),
)


def of_some(size: sympy.Basic) -> sympy.Basic:
    """Returns a stride with each Max(1, size), torch's form for dims that may be empty, as size."""

    def may_be_empty(part: sympy.Basic) -> bool:
        return isinstance(part, Max | sympy.Max) and 1 in part.args and len(part.args) == 2

    def other(part: sympy.Basic) -> sympy.Basic:
        return next(size for size in part.args if size != 1)

    return size.replace(may_be_empty, other)


class Emitter:
    """Writes expressions into a graph, each once."""

    def __init__(self, graph: fx.Graph, symbols: Mapping[sympy.Symbol, fx.Node]) -> None:
        self._graph, self._symbols = graph, symbols
        self._emitted: dict[sympy.Expr, int | float | fx.Node] = {}

    def know(self, expr: sympy.Expr, node: fx.Node) -> None:
        """Records the node of an expression."""
        self._emitted[expr] = node

    def emit(self, expr: sympy.Expr) -> Any:
        """Returns an expression as a number or a node of the graph.

        Raises:
            CodegenError: the expression has a function that no node computes.
        """
        if expr not in self._emitted:
            self._emitted[expr] = self._emit(sympy.sympify(expr))
        return self._emitted[expr]

    def _emit(self, expr: sympy.Expr) -> Any:
        if expr.is_Integer:
            return int(expr)
        if expr.is_Number:
            return float(expr)
        if expr in (sympy.true, sympy.false):
            return bool(expr)
        if expr.is_Symbol:
            return self._symbols[expr]
        if isinstance(expr, sympy.floor | sympy.ceiling):
            return self._rounded(expr)
        if isinstance(expr, sympy.Pow) and expr.exp.is_Integer and expr.exp > 0:
            return self._call(operator.pow, self.emit(expr.base), int(expr.exp))
        if expr.func not in _CALLS or _divides(expr):
            return self._quotient(expr)
        emit = self._real if expr.func in _OF_REALS else self.emit
        call, given = _CALLS[expr.func], [emit(arg) for arg in expr.args]
        if call not in _PAIRWISE:
            return self._call(call, *given)
        result = given[0]
        for value in given[1:]:
            result = self._call(call, result, value)
        return result

    def _real(self, expr: sympy.Expr) -> Any:
        """Returns a real number, without rounding fractions."""
        if not _divides(expr):
            return self.emit(expr)
        top, bottom = sympy.fraction(sympy.together(expr))
        return self._call(operator.truediv, self.emit(top), self.emit(bottom))

    def _rounded(self, expr: sympy.Expr) -> Any:
        up, inside = isinstance(expr, sympy.ceiling), expr.args[0]
        if sympy.fraction(sympy.together(inside))[1] == 1:
            return self._call(math.ceil if up else math.floor, self._real(inside))
        quotient = self._quotient(-inside if up else inside)
        return self._call(operator.mul, quotient, -1) if up else quotient

    def _quotient(self, expr: sympy.Expr) -> Any:
        top, bottom = sympy.fraction(sympy.together(expr))
        if bottom == 1:
            raise CodegenError(
                f"size {expr} is not made of +, *, //, /, %, **, min, max, rounding and "
                "comparisons; report the model's op that makes it"
            )
        return self._call(operator.floordiv, self.emit(top), self.emit(bottom))

    def _call(self, call: Callable[..., Any], *args: Any) -> Any:
        """Returns a node, with its symbolic value if its operands have theirs."""
        if not any(isinstance(a, fx.Node) for a in args):
            return call(*args)
        node = self._graph.call_function(call, args)
        values = [a.meta.get("val") if isinstance(a, fx.Node) else a for a in args]
        if all(v is not None for v in values):
            node.meta["val"] = call(*values)
        return node


def _divides(expr: sympy.Expr) -> bool:
    """Whether a sum or product has a denominator."""
    if expr.func not in (sympy.Add, sympy.Mul):
        return False
    terms = [t for a in expr.args for t in sympy.Mul.make_args(a)] + list(expr.args)
    return any(
        (t.is_Rational and not t.is_Integer) or (t.is_Pow and t.exp.is_negative) for t in terms
    )
