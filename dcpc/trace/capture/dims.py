"""Converts named dims to torch.export's dims, and torch's symbols back to named dims."""

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import sympy
import torch
from sympy import isprime
from torch.export import Dim
from torch.utils._sympy.functions import (
    CeilToInt,
    CleanDiv,
    FloorDiv,
    FloorToInt,
    IntTrueDiv,
    Max,
    Min,
    Mod,
    PythonMod,
    ToFloat,
    TruncToInt,
)

from dcpc.buckets import BATCH, Buckets
from dcpc.buckets.specs import DimExpr, InputSpec
from dcpc.errors import TraceError

# torch specialises sizes 0 and 1, so a symbolic dim starts at 2; a graph traced for sizes >= 2 is
# right at 1 and 0 as well (ATen's broadcasting and reductions do not look at a size that equals 1
# on both sides), which tests/codegen checks.
SMALLEST = 2
# The range of batch is at least this wide, so that its hint can differ from the other dims'. It is
# no wider than needed: a model may run other code from some batch on.
LEAST_BATCH_IN_TRACE = 7
# Largest number of input elements for a trace at a bucket's own sizes: the inputs are allocated.
MOST_ELEMENTS = 1 << 24


class SizeError(TraceError):
    """The refusal of symbolic dims, where numbers in their place may be right.

    Attributes:
        dims: dims that the trace took for numbers, as far as torch says, each with the user's line.
        where: line of the user's where it was refused, or "".
        least: shortest lengths that torch suggests, by dim.
    """

    def __init__(
        self,
        text: str,
        dims: Mapping[str, str] | None = None,
        least: Mapping[str, int] | None = None,
        where: str = "",
    ) -> None:
        """Takes the reason, with lines and lengths that torch names."""
        super().__init__(text)
        self.dims, self.least, self.where = dims or {}, least or {}, where


class ExampleError(SizeError):
    """The refusal of a trace at some example sizes, where a trace at others may be right."""


def refuse_names(buckets: Buckets) -> None:
    """Refuses dim names such as `s0` that torch gives its own symbols, as both would become one.

    Raises:
        TraceError: a dim has such a name.
    """
    taken = [n for n in buckets.names if re.fullmatch(r"(s|u|ps|zf|zuf)\d+", n)]
    if taken:
        raise TraceError(
            f"dims: got the name {', '.join(taken)}; expected one that torch has not for its own "
            "sizes (a letter and a number, as s0 or u1); give it another name, such as "
            f"dim_{taken[0]}"
        )


def least_sizes(buckets: Buckets) -> dict[str, int]:
    """Returns the shortest length of each named dim, except `batch`, that a trace can be for.

    It is 2 or more, so that every dim of an input (`seq - 1`) is at least 2, and never larger than
    the smallest bucket's length.
    """
    shapes = [dim for spec in buckets.inputs.values() for dim in spec.dims]
    found: dict[str, int] = {}
    for name in buckets.names:
        low, _ = buckets.range_of(name)
        mine = [dim for dim in shapes if dim.name == name]
        sizes = (n for n in range(SMALLEST, low) if all(d.evaluate({name: n}) >= 2 for d in mine))
        if name != BATCH and name not in buckets.static:
            found[name] = next(sizes, max(SMALLEST, low))
    return found


def longer_sizes(least: Mapping[str, int], error: ExampleError) -> dict[str, int]:
    """Returns the shortest lengths for the next trace: raised as torch suggests, or empty if not.

    Args:
        least: shortest lengths of the refused trace. Empty ones stand for the buckets' own.
        error: refusal of that trace.
    """
    found = {name: max(size, error.least.get(name, 0)) for name, size in least.items()}
    return found if found != least else {}


def named_dims(buckets: Buckets, least: Mapping[str, int] | None = None) -> dict[str, Any]:
    """Returns a torch.export `Dim` for every named dim that can be larger than 1."""
    dims: dict[str, Any] = {}
    for name in buckets.names:
        low, high = buckets.range_of(name)
        if name == BATCH:
            low, high = SMALLEST, max(high, LEAST_BATCH_IN_TRACE)
        if high < SMALLEST or name in buckets.static:
            continue  # one in every bucket, or static: a constant
        low = max(SMALLEST, min(low, high - 1, (high + 1) // 2 if low == high else low))
        low = min(low, (least or {}).get(name, low))
        dims[name] = Dim(name, min=min(low, high), max=max(high, low + 1))
    return dims


def example_sizes(buckets: Buckets, dims: Mapping[str, Any]) -> Iterator[dict[str, int]]:
    """Yields the sizes of named dims to trace at; the later ones are for when a trace is refused.

    At one size a length may equal a constant by chance (two strides at a length of 2), or be the
    larger of two where it is the smaller in the buckets. Other sizes, such as a bucket's, avoid
    that.
    """
    first = _chosen(buckets, dims, {})
    yield first
    others = [_chosen(buckets, dims, first), _own_sizes(buckets, dims)]
    yield from (sizes for i, sizes in enumerate(others) if sizes not in (first, *others[:i]))


def _own_sizes(buckets: Buckets, dims: Mapping[str, Any]) -> dict[str, int]:
    """Returns the sizes of the largest bucket that can be traced; else the first sizes."""
    found = [(0, _chosen(buckets, dims, {}))]
    for bucket in buckets:
        sizes = {n: bucket.sizes[n] for n in dims if n in bucket.sizes}
        if BATCH in dims and BATCH not in sizes:
            sizes[BATCH] = next(n for n in (3, 5, 7, *range(8, 999)) if n not in sizes.values())
        whole = {n: sizes.get(n, bucket.sizes.get(n, 1)) for n in buckets.names}
        elements = sum(math.prod(spec.shape(whole)) for spec in buckets.inputs.values())
        apart = len({*sizes.values()}) == len(dims)  # torch takes equal sizes for one
        if apart and min(sizes.values(), default=1) >= SMALLEST and elements <= MOST_ELEMENTS:
            found.append((elements, whole))
    return max(found, key=lambda pair: pair[0])[1]


def _chosen(
    buckets: Buckets, dims: Mapping[str, Any], besides: Mapping[str, int]
) -> dict[str, int]:
    """Returns small, distinct, prime sizes within their ranges, one for each named dim.

    Distinct, because torch silently merges two symbols of equal size. Prime if the range has one,
    else odd: at an even height a model that pads to a multiple of 2 pads nothing, and torch would
    assume so everywhere, while the trace of an odd height serves all heights.
    """
    hints: dict[str, int] = {}
    taken: set[int] = set()
    for name in buckets.names:
        if name not in dims:
            hints[name] = 1 if name == BATCH else buckets.range_of(name)[0]
            continue
        low, high = dims[name].min, dims[name].max
        want = max(low, 3 if name == BATCH else 11)
        choices = [size for size in range(want, min(high, want + 64) + 1) if size not in taken]
        choices += [size for size in range(low, high + 1)[:64] if size not in taken]
        choices = [size for size in choices if size != besides.get(name)] or choices
        odd = [size for size in choices if size % 2] or choices or [low]
        hints[name] = next(filter(isprime, choices), odd[0])
        taken.add(hints[name])
    return hints


def dynamic_shape(spec: InputSpec, dims: Mapping[str, Any]) -> dict[int, Any]:
    """Returns torch.export's description of an input's symbolic dims, by position."""
    shape: dict[int, Any] = {}
    for position, dim in enumerate(spec.dims):
        if dim.name is None or dim.name not in dims:
            continue
        if dim.divisor > 1:
            shape[position] = Dim.AUTO
            continue
        expr = dims[dim.name]
        expr = dim.multiplier * expr if dim.multiplier > 1 else expr
        shape[position] = expr + dim.offset if dim.offset else expr
    return shape


def example_inputs(
    buckets: Buckets, hints: Mapping[str, int], device: torch.device
) -> list[torch.Tensor]:
    """Returns a separate tensor of ones for each input, as torch aliases repeated ones."""
    specs = buckets.inputs.values()
    made = [torch.ones(s.shape(hints), dtype=s.dtype, device=device) for s in specs]
    return [x.requires_grad_(s.learns) for x, s in zip(made, specs, strict=True)]


def solve_symbols(
    pairs: list[tuple[str, DimExpr, Any]],
    symbols: Mapping[str, sympy.Symbol],
    dims: Mapping[str, Any],
) -> dict[sympy.Symbol, sympy.Expr]:
    """Returns torch's symbols as expressions of the named dims.

    Args:
        pairs: (place for messages, declared dim, traced size) of every dim of every input.
        symbols: dim name -> our symbol.
        dims: names of the dims that must have stayed symbolic.

    Raises:
        TraceError: the trace fixed a named dim to one number.
    """
    mapping: dict[sympy.Symbol, sympy.Expr] = {}
    for place, dim, size in pairs:
        if dim.name is None or dim.name not in dims:
            continue
        expr = size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)
        free = expr.free_symbols - mapping.keys()
        if not expr.free_symbols:
            raise ExampleError(
                f"dim '{dim}' of {place} was fixed to {size} by the trace; expected it to stay "
                "symbolic; look for a Python int(), .item(), list length or comparison on this "
                "size in forward, or declare the dim as a number"
            )
        if len(free) == 1:
            (symbol,) = free
            solution = sympy.solve(sympy.Eq(expr.subs(mapping), dim.sympy(symbols)), symbol)
            if solution:
                mapping[symbol] = solution[0]
    return mapping


def plain(expr: sympy.Expr, mapping: Mapping[sympy.Symbol, sympy.Expr]) -> sympy.Expr:
    """Returns torch's size expression over our symbols, in one spelling.

    It has products, sums and floors alone, so that equal sizes look equal: `h + (-h) % 2` (padded
    to a multiple of 2) and `(h + 1) // 2 * 2` both become `2 * floor(h / 2 + 1 / 2)`.
    """
    expr = expr.replace(CleanDiv, lambda a, b: a / b)
    expr = expr.replace(IntTrueDiv, lambda a, b: a / b)
    expr = expr.replace(CeilToInt, _ceiling)
    for whole in (FloorToInt, TruncToInt):  # sizes are not negative
        expr = expr.replace(whole, lambda a: sympy.floor(sympy.expand(a)))
    for remainder in (Mod, PythonMod, sympy.Mod):
        expr = expr.replace(remainder, lambda a, b: a - b * _floor(a, b))
    expr = expr.replace(FloorDiv, _floor)
    expr = _upwards(_cancelled(sympy.expand(expr.subs(mapping))))
    return expr.replace(Max, lambda *a: _largest(a, 1)).replace(Min, lambda *a: _largest(a, -1))


def _largest(sizes: tuple[sympy.Expr, ...], sign: int) -> sympy.Expr:
    """Returns the largest (sign 1) or smallest (-1) size, simplified where dims >= 1 decide it.

    A library writes max(0, length - 1) where it cannot know that a length is at least 1.
    """
    kept: list[sympy.Expr] = []
    for size in sizes:
        if any(_never_below(sign * (other - size)) for other in kept):
            continue
        kept = [other for other in kept if not _never_below(sign * (size - other))] + [size]
    return (sympy.Max if sign > 0 else sympy.Min)(*kept)


def _never_below(size: sympy.Expr) -> bool:
    """Whether a polynomial of the dims is at least 0 wherever all of them are at least 1."""
    more = {s: s + 1 for s in size.free_symbols}
    terms = sympy.expand(size.xreplace(more)).as_coefficients_dict()
    factors = {f for term in terms for f in sympy.Mul.make_args(term)}
    known = all(f.is_Symbol or f.is_Pow or f == 1 for f in factors)
    return known and all(coefficient >= 0 for coefficient in terms.values())


def _floor(a: sympy.Expr, b: sympy.Expr) -> sympy.Expr:
    """Returns a // b. A negative quotient becomes a ceiling: `-(h // -2)` is `(h + 1) // 2`."""
    if b.is_positive and a.could_extract_minus_sign():
        return -sympy.floor(sympy.expand((b - 1 - a) / b))
    return sympy.floor(_cancelled(sympy.expand(a / b)))


def _ceiling(a: sympy.Expr) -> sympy.Expr:
    """Returns a rounded up. For a quotient of integers it is a floor, for `_upwards`."""
    over, under = sympy.fraction(sympy.together(sympy.expand(a)))
    if under.is_Integer and over.is_integer and not over.has(sympy.Float, ToFloat):
        return -sympy.floor(sympy.expand(-a))
    return sympy.ceiling(sympy.expand(a))


def _cancelled(expr: sympy.Expr) -> sympy.Expr:
    """Returns a size without divisions by sizes that cancel.

    For rows padded to pairs, `(h + h % 2) / ((h + h % 2) // 2)` becomes 2.
    """
    if any(power.exp.is_negative and power.base.free_symbols for power in expr.atoms(sympy.Pow)):
        return sympy.expand(sympy.cancel(expr))
    return expr


def _upwards(expr: sympy.Expr) -> sympy.Expr:
    """Returns a size without floors of negative sizes, which sympy makes as it pulls integers out.

    For example, where 4 - h % 4 rows are added, it rewrites `floor(-h / 4)`.
    """

    def turned(inside: sympy.Expr) -> sympy.Expr:
        over, under = sympy.fraction(sympy.together(inside))
        # A multiple such as 0.3 * h is no quotient of integers, so the formula does not apply.
        if under.is_Integer and over.is_integer and over.could_extract_minus_sign():
            return -sympy.floor(sympy.expand((under - 1 - over) / under))
        return sympy.floor(inside)

    return sympy.expand(expr.replace(sympy.floor, turned))
