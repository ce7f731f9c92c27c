"""Named dims as torch.export sees them: ranges, hints, and the way back from torch's symbols."""

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
# A range for batch has room for a hint of its own; else it is what the buckets ask for, as a model
# may run other code from some batch on.
LEAST_BATCH_IN_TRACE = 7
# Elements of the inputs in a trace at a bucket's own sizes, which are made for it.
MOST_ELEMENTS = 1 << 24


class ExampleError(TraceError):
    """A trace at some example sizes is refused; one at others may be right.

    Attributes:
        least: the shortest lengths that torch suggests, by dim.
    """

    def __init__(self, text: str, least: Mapping[str, int] | None = None) -> None:
        """Says why."""
        super().__init__(text)
        self.least = least or {}


def refuse_names(buckets: Buckets) -> None:
    """Refuses names of dims that torch gives its own symbols: two symbols of one name are one.

    Raises:
        TraceError: a dim has one.
    """
    taken = [n for n in buckets.names if re.fullmatch(r"(s|u|ps|zf|zuf)\d+", n)]
    if taken:
        raise TraceError(
            f"dims: got the name {', '.join(taken)}; expected one that torch has not for its own "
            "sizes (a letter and a number, as s0 or u1); give it another name, such as "
            f"dim_{taken[0]}"
        )


def least_sizes(buckets: Buckets) -> dict[str, int]:
    """Returns the shortest length of each named dim that a trace may be for, `batch` apart.

    That is 2, or where a dim of an input (`seq - 1`) is 2; never more than the smallest bucket has.
    """
    shapes = [dim for spec in buckets.inputs.values() for dim in spec.dims]
    found: dict[str, int] = {}
    for name in buckets.names:
        low, _ = buckets.range_of(name)
        mine = [dim for dim in shapes if dim.name == name]
        sizes = (n for n in range(SMALLEST, low) if all(d.evaluate({name: n}) >= 2 for d in mine))
        if name != BATCH:
            found[name] = next(sizes, max(SMALLEST, low))
    return found


def longer_sizes(least: Mapping[str, int], error: ExampleError) -> dict[str, int]:
    """Returns the shortest lengths of the next trace: what torch suggests, or the buckets' (none).

    Args:
        least: those of a trace that was refused.
        error: the refusal.
    """
    found = {name: max(size, error.least.get(name, 0)) for name, size in least.items()}
    return found if found != least else {}


def named_dims(buckets: Buckets, least: Mapping[str, int] | None = None) -> dict[str, Any]:
    """Returns a torch.export `Dim` for every named dim that can be larger than 1.

    Args:
        buckets: with the largest lengths.
        least: length of a dim -> that its range begins at; default: the smallest bucket's.
    """
    dims: dict[str, Any] = {}
    for name in buckets.names:
        low, high = buckets.range_of(name)
        if name == BATCH:
            low, high = SMALLEST, max(high, LEAST_BATCH_IN_TRACE)
        if high < SMALLEST:
            continue  # one in every bucket: a constant
        low = max(SMALLEST, min(low, high - 1, (high + 1) // 2 if low == high else low))
        low = min(low, (least or {}).get(name, low))
        dims[name] = Dim(name, min=min(low, high), max=max(high, low + 1))
    return dims


def example_sizes(buckets: Buckets, dims: Mapping[str, Any]) -> Iterator[dict[str, int]]:
    """Yields the sizes of named dims to trace at: first ones, and others if a trace is refused.

    A size may equal a constant by chance, as two strides are equal where a length is 2; or one may
    be the larger of two, and in the buckets be the smaller. Others are not, such as a bucket's own.
    """
    first = _chosen(buckets, dims, {})
    yield first
    others = [_chosen(buckets, dims, first), _own_sizes(buckets, dims)]
    yield from (sizes for i, sizes in enumerate(others) if sizes not in (first, *others[:i]))


def _own_sizes(buckets: Buckets, dims: Mapping[str, Any]) -> dict[str, int]:
    """Returns the sizes of the largest bucket that can be traced at; of none the first sizes."""
    found = [(0, _chosen(buckets, dims, {}))]
    for bucket in buckets:
        sizes = {n: bucket.sizes[n] for n in dims if n in bucket.sizes}
        if BATCH in dims and BATCH not in sizes:
            sizes[BATCH] = next(n for n in (3, 5, 7, *range(8, 999)) if n not in sizes.values())
        whole = {n: sizes.get(n, 1) for n in buckets.names}
        elements = sum(math.prod(spec.shape(whole)) for spec in buckets.inputs.values())
        apart = len({*sizes.values()}) == len(dims)  # torch takes equal sizes for one
        if apart and min(sizes.values(), default=1) >= SMALLEST and elements <= MOST_ELEMENTS:
            found.append((elements, whole))
    return max(found, key=lambda pair: pair[0])[1]


def _chosen(
    buckets: Buckets, dims: Mapping[str, Any], besides: Mapping[str, int]
) -> dict[str, int]:
    """Returns the size of each named dim in the trace: small, in range, all different, and prime.

    Different, because torch merges two symbols of one size without a word. Prime if the range has
    one, else odd: at an even height a model that pads to a multiple of 2 has nothing to pad, and
    torch would hold on to that; what it does at an odd one serves every height.

    Args:
        buckets: buckets of the trace.
        dims: names that can be larger than 1, with their ranges.
        besides: sizes not to take where the range has others.
    """
    hints: dict[str, int] = {}
    taken: set[int] = set()
    for name in buckets.names:
        if name not in dims:
            hints[name] = 1
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
    """Returns torch.export's description of one input's symbolic dims."""
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
    """Returns one distinct tensor an input (torch aliases an input that is passed twice)."""
    specs = buckets.inputs.values()
    made = [torch.ones(s.shape(hints), dtype=s.dtype, device=device) for s in specs]
    return [x.requires_grad_(s.learns) for x, s in zip(made, specs, strict=True)]


def solve_symbols(
    pairs: list[tuple[str, DimExpr, Any]],
    symbols: Mapping[str, sympy.Symbol],
    dims: Mapping[str, Any],
) -> dict[sympy.Symbol, sympy.Expr]:
    """Returns torch symbol -> expression of the named dims.

    Args:
        pairs: (place, declared dim, traced size) of every dim of every input.
        symbols: dim name -> our symbol.
        dims: the names that must have stayed symbolic.

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
    """Returns torch's expression over our symbols, in one spelling.

    Products, sums and floors alone, so that what is equal looks equal: `h + (-h) % 2` (padded to a
    multiple of 2) and `(h + 1) // 2 * 2` are both `2 * floor(h / 2 + 1 / 2)`.
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
    """Returns the largest (sign 1) or smallest (-1) of some sizes, decided where dims >= 1 do so.

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
    """Returns a // b; of a negative one the way up: `-(h // -2)` as `(h + 1) // 2`."""
    if b.is_positive and a.could_extract_minus_sign():
        return -sympy.floor(sympy.expand((b - 1 - a) / b))
    return sympy.floor(_cancelled(sympy.expand(a / b)))


def _ceiling(a: sympy.Expr) -> sympy.Expr:
    """Returns a rounded up; of a quotient of whole sizes as a floor, which `_upwards` turns."""
    over, under = sympy.fraction(sympy.together(sympy.expand(a)))
    if under.is_Integer and over.is_integer and not over.has(sympy.Float, ToFloat):
        return -sympy.floor(sympy.expand(-a))
    return sympy.ceiling(sympy.expand(a))


def _cancelled(expr: sympy.Expr) -> sympy.Expr:
    """Returns a size without divisions by sizes where they come out even.

    Rows that are padded and taken in pairs: `(h + h % 2) / ((h + h % 2) // 2)` is 2.
    """
    if any(power.exp.is_negative and power.base.free_symbols for power in expr.atoms(sympy.Pow)):
        return sympy.expand(sympy.cancel(expr))
    return expr


def _upwards(expr: sympy.Expr) -> sympy.Expr:
    """Returns a size whose floors are of nothing negative: sympy takes a sum's integers out of one.

    So where 4 - h % 4 rows are added there is a `floor(-h / 4)` of what `_floor` turned.
    """

    def turned(inside: sympy.Expr) -> sympy.Expr:
        over, under = sympy.fraction(sympy.together(inside))
        # What is no whole number (0.3 * h) has no next one down that is a quotient's.
        if under.is_Integer and over.is_integer and over.could_extract_minus_sign():
            return -sympy.floor(sympy.expand((under - 1 - over) / under))
        return sympy.floor(inside)

    return sympy.expand(expr.replace(sympy.floor, turned))
