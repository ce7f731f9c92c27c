"""Sums of sizes as vectors over monomials, so that 5,000 live-memory expressions are cheap.

A size such as `batch*(4*seq + 8)` is `4*batch*seq + 8*batch`: two entries of a vector whose
columns are the monomials met so far. Adding, comparing and evaluating many of them is then numpy,
not sympy. A function that is not a polynomial, such as `FloorDiv(height, 2)`, is a factor of its
own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import sympy
from sympy.core.function import Application
from sympy.logic.boolalg import Boolean

from dcpc.errors import ProfileError
from dcpc.ops.attention import SHORT

Integers: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float64]


class OfIntegers(sympy.Function):  # type: ignore[misc]
    """A function of integers, not negative, whose numbers `FUNCTIONS` has by its name."""

    is_integer = True
    is_nonnegative = True

    @classmethod
    def eval(cls, *sizes: sympy.Expr) -> sympy.Expr | None:
        """Returns the number at known sizes, None for unknown ones."""
        known = all(size.is_Integer for size in sizes)
        return sympy.Integer(FUNCTIONS[cls.__name__](*map(int, sizes))) if known else None


class QueryBlock(OfIntegers):
    """Queries that torch's CPU flash attention takes at a time, of a given number of queries.

    Source: aten/src/ATen/native/cpu/FlashAttentionKernel.cpp, `flash_attention_kernel_impl`.
    """


def _query_block(queries: Any) -> Any:
    block = np.where(queries >= 768, 256, np.where(queries >= 192, 64, 32))
    return np.minimum(block, queries)


class Packs(OfIntegers):
    """1 where torch's CPU flash attention in bfloat16 packs keys and values, of enough of both.

    Source: aten/src/ATen/native/cpu/FlashAttentionKernel.cpp (`thresh_size`).
    """


def _packs(queries: Any, keys: Any) -> Any:
    return np.where(np.minimum(queries, keys) >= 64, 1, 0)


class Short(OfIntegers):
    """1 where some numbers of queries and of keys are at most `dcpc.ops.attention.SHORT`."""


def _short(queries: Any, keys: Any) -> Any:
    return np.where(np.maximum(queries, keys) <= SHORT, 1, 0)


class Shares(OfIntegers):
    """1 where a mask has several rows, fewer than samples: several of these share one."""


def _shares(rows: Any, samples: Any) -> Any:
    return np.where((rows > 1) & (rows < samples), 1, 0)


class TileCount(OfIntegers):
    """Number of tiles of a number of rows, with at most so many rows each."""


def _tiles(rows: Any, most: Any) -> Any:
    return -(-rows // most)


class TileRows(OfIntegers):
    """Rows of the largest tile, of a number of rows and at most so many in each."""


def _tile_rows(rows: Any, most: Any) -> Any:
    return -(-rows // np.maximum(_tiles(rows, most), 1))


_BITWISE = ("and", "or", "xor")
_UNARY = ("sqrt", "cos", "cosh", "sin", "sinh", "tan", "tanh", "exp", "log", "log2")
_ARCS = ("sin", "cos", "tan", "sinh")

# Functions of sympy or torch.utils._sympy that sizes may hold: name -> integers or arrays of them.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "QueryBlock": _query_block,
    "Packs": _packs,
    "Short": _short,
    "Shares": _shares,
    "TileCount": _tiles,
    "TileRows": _tile_rows,
    "FloorDiv": lambda a, b: a // b,
    "CleanDiv": lambda a, b: a // b,
    "CeilDiv": lambda a, b: -(-a // b),
    "Mod": lambda a, b: a % b,
    "PythonMod": lambda a, b: a % b,
    "ToFloat": lambda a: a * 1.0,
    "CeilToInt": np.ceil,
    "FloorToInt": np.floor,
    "TruncToInt": np.trunc,
    "RoundToInt": np.round,
    "IntTrueDiv": lambda a, b: a / b,
    "FloatTrueDiv": lambda a, b: a / b,
    "PowByNatural": lambda a, b: a**b,
    "FloatPow": lambda a, b: a**b,
    "LShift": lambda a, b: a * 2**b,
    "RShift": lambda a, b: a // 2**b,
    "ModularIndexing": lambda a, b, c: (a // b) % c,
    "Where": lambda c, a, b: np.where(c, a, b),
    "Min": lambda *a: functools.reduce(np.minimum, a),
    "Max": lambda *a: functools.reduce(np.maximum, a),
    "TruncToFloat": np.trunc,
    "floor": np.floor,
    "ceiling": np.ceil,
    **{f"BitwiseFn_bitwise_{name}": getattr(np, f"bitwise_{name}") for name in _BITWISE},
    **{f"OpaqueUnaryFn_{name}": getattr(np, name) for name in _UNARY},
    **{f"OpaqueUnaryFn_a{name}": getattr(np, f"arc{name}") for name in _ARCS},
}


def each_point(function: Callable[..., int]) -> Callable[..., Any]:
    """Returns a function of integers as one of numbers or of arrays of them, for `FUNCTIONS`."""

    def at(*sizes: Any) -> Any:
        if any(isinstance(size, np.ndarray) and size.ndim for size in sizes):
            return np.vectorize(at, otypes=[np.int64])(*sizes)
        return function(*map(int, sizes))

    return at


@functools.lru_cache(maxsize=100_000)
def monomials(size: sympy.Expr) -> tuple[tuple[sympy.Expr, int | float], ...]:
    """Returns the (monomial, coefficient) pairs that a size is the sum of."""
    terms = sympy.expand(size).as_coefficients_dict().items()
    return tuple((m, int(c) if c.is_Integer else float(c)) for m, c in terms if c != 0)


@functools.lru_cache(maxsize=100_000)
def larger(*sizes: sympy.Expr) -> sympy.Expr:
    """Returns the largest of some sizes.

    As `sympy.Max` of those that none of the others surely is at least as large as; sympy itself
    compares sums with all it knows of them, milliseconds each.
    """
    left: list[sympy.Expr] = []
    for size in dict.fromkeys(map(sympy.expand, sizes)):
        if not any(_covers(other, size) for other in left):
            left = [other for other in left if not _covers(size, other)] + [size]
    return left[0] if len(left) == 1 else sympy.Max(*left, evaluate=False)


def _covers(large: sympy.Expr, small: sympy.Expr) -> bool:
    """Whether a size is at least another: no term of the difference is below 0."""
    gap = dict(monomials(large))
    for monomial, coefficient in monomials(small):
        gap[monomial] = gap.get(monomial, 0) - coefficient
    return all(coefficient >= 0 for coefficient in gap.values())


class Basis:
    """The monomials met so far, each with its column.

    Example:
        basis = Basis([4 * seq * batch, seq * (batch + 1)])
        basis.matrix([seq * batch + seq])        # [[1, 1]] over (batch*seq, seq)
    """

    def __init__(self, sizes: Iterable[sympy.Expr]) -> None:
        found = (m for size in sizes for m, _ in monomials(size))
        self.terms: tuple[sympy.Expr, ...] = tuple(dict.fromkeys(found))
        self._columns = {m: i for i, m in enumerate(self.terms)}

    def holds(self, sizes: Iterable[sympy.Expr]) -> bool:
        """Whether these sizes are sums of its monomials."""
        return all(m in self._columns for size in sizes for m, _ in monomials(size))

    def matrix(self, sizes: Sequence[sympy.Expr]) -> Floats:
        """Returns one row of coefficients for each size."""
        rows = np.zeros((len(sizes), len(self.terms)))
        for row, size in zip(rows, sizes, strict=True):
            for monomial, coefficient in monomials(size):
                row[self._columns[monomial]] += coefficient
        return rows

    def expression(self, row: Iterable[float]) -> sympy.Expr:
        """Returns the size that a row of coefficients stands for."""
        pairs = zip(row, self.terms, strict=True)
        return sympy.Add(*(_number(c) * m for c, m in pairs if c != 0))

    def compile(self, symbols: Sequence[sympy.Symbol]) -> Callable[..., list[Any]]:
        """Returns a function from the symbols' values (integers or arrays) to each monomial's.

        Raises:
            ProfileError: a size is a function that nobody has said how to compute.
        """
        terms = [_callable(m) for m in self.terms]
        function = sympy.lambdify(list(symbols), terms, modules=[FUNCTIONS, "math"])
        return function  # type: ignore[no-any-return]


def undominated(rows: Floats, basis: Basis) -> list[int]:
    """Returns the indices of the rows that can be the largest, without repeats.

    A row is dropped if another is at least as large wherever every positive symbol is at least 1
    and every other (a local length may be 0) at least 0: if their difference, written in
    `symbol - 1` for positive symbols, has no negative coefficient. Where undecided, both stay.
    """
    if not len(rows):
        return []
    shifted = rows @ _shift(basis)
    order = np.argsort(-shifted.sum(axis=1), kind="stable")
    kept: list[int] = []
    frontier = np.empty((0, shifted.shape[1]))
    for i in order:
        if not len(kept) or not (frontier >= shifted[i]).all(axis=1).any():
            kept.append(int(i))
            frontier = np.vstack([frontier, shifted[i]])
    return sorted(kept)


def _shift(basis: Basis) -> Floats:
    """Returns the matrix that rewrites coefficients of s**k as those of (s - 1)**j."""
    shifted = []
    for m in basis.terms:
        functions = {f: sympy.Dummy() for f in m.atoms(sympy.Function, sympy.Min, sympy.Max)}
        outer = m.xreplace(functions)
        free = outer.free_symbols - set(functions.values())
        grown = outer.xreplace({s: s + 1 for s in free if s.is_positive})
        shifted.append(sympy.expand(grown).xreplace({d: f for f, d in functions.items()}))
    return Basis(shifted).matrix(shifted)


def _callable(size: sympy.Expr) -> sympy.Expr:
    """Returns the size with plain functions, as lambdify prints sympy's own its own way."""
    found = size.atoms(Application) - size.atoms(Boolean)
    for f in found:
        if (name := type(f).__name__) not in FUNCTIONS:
            raise ProfileError(
                f"size {size} has {name}; expected one of {', '.join(FUNCTIONS)}; report the "
                "model's op that makes it, and compute the size outside of forward until then"
            )
    return size.replace(lambda e: e in found, lambda e: sympy.Function(type(e).__name__)(*e.args))


def _number(value: float) -> sympy.Expr:
    return sympy.Integer(int(value)) if value == int(value) else sympy.Rational(value)


def values_of(symbols: Sequence[sympy.Symbol], dims: Mapping[str, Any]) -> list[Any]:
    """Returns the value of each symbol, in order.

    Raises:
        ProfileError: a symbol has no value in `dims`.
    """
    try:
        return [dims[s.name] for s in symbols]
    except KeyError as e:
        wanted = ", ".join(s.name for s in symbols)
        raise ProfileError(
            f"profile: got sizes for {', '.join(dims) or 'no dim'}; expected one for each of "
            f"{wanted}; add {e.args[0]}"
        ) from None
