"""Input specs: dtype and named dims of one argument, parsed from `int64[batch, seq]`."""

import difflib
import keyword
import re
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Self

import sympy
import torch

from dcpc.errors import BucketError

Sizes = Mapping[str, int]  # of dims, by their names

# A dim is stored in 64 bits, and products of two dims must fit as well.
MAX_SIZE = (1 << 31) - 1

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
        *("float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32", "float64"),
        *("complex64", "complex128"),
    )
}

_GRAMMAR = "name, integer, name*2, name//2, name+1 or name-1"
_SPEC = re.compile(
    r"\s*(?P<dtype>\w+)\s*\[(?P<dims>[^\[\]]*)\]\s*(?P<learns>requires_grad)?\s*", re.ASCII
)
_DIM = re.compile(
    r"\s*(?:(?P<left>\d+)\s*\*\s*)?(?P<name>[A-Za-z_]\w*)\s*"
    r"(?:\*\s*(?P<right>\d+)\s*)?(?://\s*(?P<divisor>\d+)\s*)?"
    r"(?:(?P<sign>[+-])\s*(?P<offset>\d+)\s*)?",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class DimExpr:
    """One dim of an input: `name * multiplier // divisor + offset`; without a name, `offset`."""

    name: str | None
    multiplier: int = 1
    divisor: int = 1
    offset: int = 0

    @classmethod
    def parse(cls, text: str) -> Self:
        """Returns the dim that a text such as `seq`, `77`, `seq*2` or `seq+1` stands for.

        Raises:
            BucketError: the text is not of this grammar.
        """
        if re.fullmatch(r"\s*\d+\s*", text, re.ASCII):
            return cls(None, offset=_constant(text, text))
        match = _DIM.fullmatch(text)
        if not match or (match["left"] and match["right"]) or keyword.iskeyword(match["name"]):
            raise BucketError(f"got dim '{text.strip()}'; expected {_GRAMMAR}; rewrite this dim")
        multiplier = match["left"] or match["right"] or "1"
        offset = _constant(match["offset"], text) if match["offset"] else 0
        return cls(
            match["name"],
            multiplier=_constant(multiplier, text),
            divisor=_constant(match["divisor"] or "1", text),
            offset=-offset if match["sign"] == "-" else offset,
        )

    def evaluate(self, sizes: Mapping[str, int]) -> int:
        """Returns this dim's length, given the length of every name."""
        if self.name is None:
            return self.offset
        return sizes[self.name] * self.multiplier // self.divisor + self.offset

    def sympy(self, symbols: Mapping[str, sympy.Expr]) -> sympy.Expr:
        """Returns this dim's length as an expression, given a symbol for every name."""
        if self.name is None:
            return sympy.Integer(self.offset)
        product = symbols[self.name] * self.multiplier
        return (sympy.floor(product / self.divisor) if self.divisor > 1 else product) + self.offset

    def solve(self, value: int, least: int = 1) -> int | None:
        """Returns the one length >= `least` of `name` that makes this dim `value`.

        None where there is none, or where it is not determined: a constant, or a `//`.
        """
        if self.name is None or self.divisor > 1:
            return None
        size, rest = divmod(value - self.offset, self.multiplier)
        return size if rest == 0 and size >= least else None

    def __str__(self) -> str:
        if self.name is None:
            return str(self.offset)
        text = self.name
        text += f"*{self.multiplier}" if self.multiplier > 1 else ""
        text += f"//{self.divisor}" if self.divisor > 1 else ""
        return text + (f"{self.offset:+d}" if self.offset else "")


@dataclass(frozen=True, slots=True)
class InputSpec:
    """dtype and dims of one keyword argument of the model's forward.

    Attributes:
        dtype: element type.
        dims: size of each dim.
        learns: whether the input receives a gradient, as the output of another module.
    """

    dtype: torch.dtype
    dims: tuple[DimExpr, ...]
    learns: bool = False

    @classmethod
    def parse(cls, text: str) -> Self:
        """Returns the spec that a text such as `int64[batch, seq]` or `float32[]` stands for.

        With `float32[batch, seq, 64] requires_grad` the input receives a gradient.

        Raises:
            BucketError: the text is not of this grammar, names no dtype of torch, or one that has
                no gradient.
        """
        match = _SPEC.fullmatch(text)
        if not match:
            raise BucketError(
                f"got '{text}'; expected dtype[dim, ...] such as int64[batch, seq] or float32[]; "
                "rewrite this spec"
            )
        dtype = getattr(torch, match["dtype"], None)  # torch.long is int64
        if dtype is None or dtype not in DTYPES.values():
            close = difflib.get_close_matches(match["dtype"], DTYPES, n=1, cutoff=0.5)
            hint = f"write {close[0]}" if close else "use one of these"
            raise BucketError(
                f"got dtype '{match['dtype']}'; expected one of {', '.join(DTYPES)}; {hint}"
            )
        learns = match["learns"] is not None
        if learns and not (dtype.is_floating_point or dtype.is_complex):
            raise BucketError(
                f"got '{text}'; expected a floating dtype of what requires a gradient; leave "
                "requires_grad out"
            )
        dims = match["dims"]
        parsed = tuple(map(DimExpr.parse, dims.split(","))) if dims.strip() else ()
        return cls(dtype, parsed, learns)

    def renamed(self, names: Mapping[str, str]) -> Self:
        """Returns the spec with other names of dims."""
        dims = (replace(d, name=None if d.name is None else names[d.name]) for d in self.dims)
        return replace(self, dims=tuple(dims))

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Returns the shape, given the length of every name."""
        return tuple(dim.evaluate(sizes) for dim in self.dims)

    def __str__(self) -> str:
        more = " requires_grad" if self.learns else ""
        return f"{str(self.dtype).removeprefix('torch.')}[{', '.join(map(str, self.dims))}]{more}"


def _constant(text: str, dim: str) -> int:
    # The length bound keeps int() from its own limit of 4300 digits.
    if len(text.strip()) > 10 or not 1 <= int(text) <= MAX_SIZE:
        raise BucketError(
            f"got dim '{reprlib.repr(dim.strip())[1:-1]}'; expected integers from 1 to {MAX_SIZE} "
            "in it; rewrite this dim"
        )
    return int(text)


def completed(
    specs: Mapping[str, InputSpec], given: Mapping[str, Any], smallest: Sizes
) -> dict[str, Any]:
    """Returns inputs, with an empty tensor for each that is lacking or None and may be empty."""
    found, sizes, device = dict(given), dict(smallest), None
    lacking = [name for name in specs if given.get(name) is None]
    for name, x in given.items() if lacking else ():
        if name in specs and isinstance(x, torch.Tensor):
            device = x.device
            own = zip(specs[name].dims, x.shape, strict=False)
            sizes |= {d.name: n for d, size in own if d.name and (n := d.solve(size)) is not None}
    for name in lacking:
        if 0 in (shape := specs[name].shape(sizes)):
            found[name] = torch.empty(shape, dtype=specs[name].dtype, device=device)
    return found


def tokens_of(lengths: Iterable[int]) -> int:
    """Returns the tokens of a sample: the product of its lengths, of which 0 counts as 1."""
    return prod(max(1, n) for n in lengths)


def shapes_and_dtypes(
    inputs: Mapping[str, torch.Tensor],
) -> tuple[dict[str, tuple[int, ...]], dict[str, torch.dtype]]:
    """Returns the shapes and the dtypes of inputs by name, as `Buckets.match` takes them."""
    return {n: tuple(x.shape) for n, x in inputs.items()}, {n: x.dtype for n, x in inputs.items()}
