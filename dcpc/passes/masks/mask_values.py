"""Expressions for an element of a mask, as a function of its position.

    i, j, i - j + 3                  Affine
    j <= i                           Truth: j - i is at most 0
    attention_mask[b, j] != 0        Truth of Data
    where(j <= i, 0, -inf)           WhereValue

Positions are integers, so `i < j` is `i + 1 <= j`, and every comparison is some Affine >= 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import floor, isfinite
from typing import Any, TypeAlias

import sympy
import torch

Number: TypeAlias = Any  # int, float, or a sympy expression of the dims


class UnknownError(Exception):
    """Raised where no expression here represents a value."""


@dataclass(frozen=True, slots=True)
class Affine:
    """A sum of positions and a number: `coefficients[v]` times position v of the mask."""

    number: Number
    coefficients: tuple[tuple[str, int], ...] = ()

    @staticmethod
    def of(number: Number, coefficients: Mapping[str, int]) -> Affine:
        """Returns the sum without zero coefficients, positions in order."""
        return Affine(number, tuple(sorted((v, c) for v, c in coefficients.items() if c)))

    @property
    def constant(self) -> bool:
        """Whether it contains no position."""
        return not self.coefficients


@dataclass(frozen=True, slots=True)
class Magnitude:
    """The absolute value of an Affine."""

    inner: Affine


@dataclass(frozen=True, slots=True)
class Data:
    """A value read from tensors: an expression as in `ir.Recipe`, whose indices are Affine."""

    recipe: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Truth:
    """A boolean expression.

    Attributes:
        kind: "all" or "any" of the members, "positive" (`affine` >= 0), "data" (`data` is true) or
            "not data".
        members: operands of "all" and "any"; without operands these are true and false.
        affine: expression of "positive".
        data: value of "data" and "not data".
    """

    kind: str
    members: tuple[Truth, ...] = ()
    affine: Affine | None = None
    data: Data | None = None


@dataclass(frozen=True, slots=True)
class WhereValue:
    """One value where a condition holds, another one elsewhere."""

    condition: Truth
    yes: Value
    no: Value


Value: TypeAlias = "Affine | Magnitude | Data | Truth | WhereValue"

TRUE, FALSE = Truth("all"), Truth("any")


def both(*truths: Truth) -> Truth:
    """Returns the conjunction."""
    return _joined("all", truths, FALSE)


def either(*truths: Truth) -> Truth:
    """Returns the disjunction."""
    return _joined("any", truths, TRUE)


def _joined(kind: str, truths: Sequence[Truth], settled: Truth) -> Truth:
    """Returns truths joined as "all" or "any"; the result is `settled` if one member is."""
    found: list[Truth] = []
    for truth in truths:
        if truth == settled:
            return settled
        found += truth.members if truth.kind == kind else [truth]
    unique = tuple(dict.fromkeys(found))
    return unique[0] if len(unique) == 1 else Truth(kind, unique)


def negation(truth: Truth) -> Truth:
    """Returns the negation."""
    if truth.kind in ("all", "any"):
        other = "any" if truth.kind == "all" else "all"
        members = tuple(map(negation, truth.members))
        return both(*members) if other == "all" else either(*members)
    if truth.kind == "positive":
        assert truth.affine is not None
        return positive(plus(times(truth.affine, -1), Affine(-1)))
    return Truth("not data" if truth.kind == "data" else "data", data=truth.data)


def positive(affine: Affine) -> Truth:
    """Returns whether an Affine of positions is at least 0."""
    number = affine.number
    if affine.constant and isinstance(number, int | float | sympy.Number):
        return TRUE if number >= 0 else FALSE
    if isinstance(number, float):
        if not isfinite(number):
            return TRUE if number > 0 else FALSE
        number = floor(number)
    return Truth("positive", affine=Affine(number, affine.coefficients))


def plus(a: Affine, b: Affine) -> Affine:
    """Returns the sum."""
    total = dict(a.coefficients)
    for name, count in b.coefficients:
        total[name] = total.get(name, 0) + count
    return Affine.of(a.number + b.number, total)


def times(a: Affine, number: Number) -> Affine:
    """Returns an Affine times a number.

    Raises:
        UnknownError: the coefficients of positions would not be integers.
    """
    if a.constant:
        return Affine(a.number * number)
    known = isinstance(number, int | float | sympy.Number)
    if not known or not isfinite(number) or int(number) != number:
        raise UnknownError
    return Affine.of(a.number * number, {v: c * int(number) for v, c in a.coefficients})


def truth_of(value: Value) -> Truth:
    """Returns whether a value is not 0."""
    if isinstance(value, Truth):
        return value
    if isinstance(value, WhereValue):
        return branch(value.condition, truth_of(value.yes), truth_of(value.no))
    if isinstance(value, Data):
        return Truth("data", data=value)
    if isinstance(value, Affine) and value.constant:
        return TRUE if value.number != 0 else FALSE
    return compared("ne", value, Affine(0))


def branch(condition: Truth, yes: Truth, no: Truth) -> Truth:
    """Returns `yes` where a condition holds, else `no`."""
    return either(both(condition, yes), both(negation(condition), no))


def chosen(condition: Truth, yes: Value, no: Value) -> Value:
    """Returns `yes` where a condition holds, else `no`."""
    if condition == TRUE or yes == no:
        return yes
    if condition == FALSE:
        return no
    if isinstance(yes, Truth) and isinstance(no, Truth):
        return branch(condition, yes, no)
    return WhereValue(condition, yes, no)


def compared(op: str, a: Value, b: Value) -> Truth:
    """Returns `a op b`, op one of lt, le, gt, ge, eq, ne.

    Raises:
        UnknownError: these values have no comparison by position.
    """
    if isinstance(a, WhereValue):
        return branch(a.condition, compared(op, a.yes, b), compared(op, a.no, b))
    if isinstance(b, WhereValue):
        return branch(b.condition, compared(op, a, b.yes), compared(op, a, b.no))
    if isinstance(a, Truth) or isinstance(b, Truth):
        return _compared_truths(op, a, b)
    if isinstance(a, Data) or isinstance(b, Data):
        return Truth("data", data=Data((op, _recipe(a), _recipe(b))))
    if op in ("gt", "lt", "ne"):
        return negation(compared({"gt": "le", "lt": "ge", "ne": "eq"}[op], a, b))
    if op == "eq":
        return both(compared("le", a, b), compared("ge", a, b))
    if op == "le":
        return compared("ge", b, a)
    if isinstance(b, Magnitude):  # a >= |x|
        return both(compared("ge", a, b.inner), compared("ge", a, times(b.inner, -1)))
    if isinstance(a, Magnitude):  # |x| >= b
        return either(compared("ge", a.inner, b), compared("ge", times(a.inner, -1), b))
    return positive(plus(a, times(b, -1)))


def _compared_truths(op: str, a: Value, b: Value) -> Truth:
    """Returns a comparison with a truth value, which counts as 1 or 0."""
    if isinstance(a, Truth) and isinstance(b, Truth) and op in ("eq", "ne"):
        same = branch(a, b, negation(b))
        return same if op == "eq" else negation(same)
    a, b = (WhereValue(x, Affine(1), Affine(0)) if isinstance(x, Truth) else x for x in (a, b))
    return compared(op, a, b)


# Integers up to 2**24 and more: positions in a row are exact. Others round them, or wrap.
_HOLD_POSITIONS = (torch.int64, torch.int32, torch.float64, torch.float32)


def held(value: Value, dtype: torch.dtype) -> Value:
    """Returns a value as stored in a dtype.

    Raises:
        UnknownError: the dtype would round or wrap positions, or a number is NaN.
    """
    if dtype == torch.bool:
        return truth_of(value)
    if isinstance(value, WhereValue):
        return WhereValue(value.condition, held(value.yes, dtype), held(value.no, dtype))
    if isinstance(value, Truth):
        return chosen(value, Affine(1), Affine(0))
    if isinstance(value, Magnitude):
        return Magnitude(_held(value.inner, dtype))
    return _held(value, dtype) if isinstance(value, Affine) else value


def _held(value: Affine, dtype: torch.dtype) -> Affine:
    number = value.number
    known = isinstance(number, int | float)
    if not (known and value.constant) and dtype not in _HOLD_POSITIONS:
        raise UnknownError
    if known and number != number:
        raise UnknownError
    if not dtype.is_floating_point:
        if isinstance(number, float):
            if not number.is_integer():
                raise UnknownError
            number = int(number)
        if not known and not sympy.sympify(number).is_integer:
            raise UnknownError
        limits = torch.iinfo(dtype)
        if known and not limits.min <= number <= limits.max:
            raise UnknownError
    elif known and value.constant:
        number = float(torch.tensor(number, dtype=dtype))
    return Affine(number, value.coefficients)


def combined(op: Callable[[Affine, Affine], Affine], name: str, a: Value, b: Value) -> Value:
    """Returns an arithmetic op of two values, applied within each branch of a WhereValue.

    Raises:
        UnknownError: no expression represents the result.
    """
    if isinstance(a, WhereValue):
        return chosen(a.condition, combined(op, name, a.yes, b), combined(op, name, a.no, b))
    if isinstance(b, WhereValue):
        return chosen(b.condition, combined(op, name, a, b.yes), combined(op, name, a, b.no))
    if isinstance(a, Truth):
        return combined(op, name, WhereValue(a, Affine(1), Affine(0)), b)
    if isinstance(b, Truth):
        return combined(op, name, a, WhereValue(b, Affine(1), Affine(0)))
    if isinstance(a, Affine) and isinstance(b, Affine):
        return op(a, b)
    if isinstance(a, Data) or isinstance(b, Data):
        return Data((name, _recipe(a), _recipe(b)))
    raise UnknownError


def _recipe(value: Value) -> Any:
    if isinstance(value, Data):
        return value.recipe
    if isinstance(value, Affine) and value.constant and isinstance(value.number, int | float):
        return value.number
    raise UnknownError
