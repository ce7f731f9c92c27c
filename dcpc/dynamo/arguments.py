"""Classifies a captured graph's arguments: parameters, named dims, sizes and other numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn
from torch.utils._sympy.functions import FloorDiv, Mod, PythonMod

from dcpc.buckets import Buckets
from dcpc.buckets.specs import MAX_SIZE, DimExpr, InputSpec
from dcpc.dynamo.numbers import is_number, value_of
from dcpc.errors import BucketError, TraceError

SMALLEST = 2  # Dynamo takes 0 and 1 for numbers
LARGEST = 1 << 24  # of an integer that counts as a dim


@dataclass(frozen=True, slots=True)
class SizeOf:
    """The place where a size is read: a dim of a tensor argument, or an integer argument."""

    argument: int
    dim: int

    def read(self, given: Sequence[Any]) -> int:
        """Returns the size in a call; an integer may be given as a tensor of that length."""
        value = given[self.argument]
        return value.shape[self.dim] if isinstance(value, Tensor) else int(value_of(value))


@dataclass(frozen=True, slots=True)
class Arguments:
    """The arguments of a captured graph, by position.

    Attributes:
        parameters: position of an argument -> name of the parameter in `Captured`.
        inputs: position of an argument -> name of the input.
        specs: spec of each input, by name.
        sizes: name of a dim -> where its size is read.
        integers: position of an argument that is a size -> name of its dim.
        multiples: name of a dim -> number that its size is a multiple of. With 2 the size is even,
            and the dim stands for half of it.
        related: whether Dynamo found that some dims depend on others.
        ranges: name of a dim -> smallest and largest length for which Dynamo uses this graph.
        given_names: position of an argument -> its name in forward; "" if forward has no such one.
        counts: positions among `integers` of those that are no tensor's size, such as a number of
            steps. Each has a dim, and a tensor of that length represents it in `inputs`.
        constants: positions of numbers that are no sizes, such as a dropout probability. Their
            values are constants of a graph.
    """

    parameters: Mapping[int, str]
    inputs: Mapping[int, str]
    specs: Mapping[str, InputSpec]
    sizes: Mapping[str, SizeOf]
    integers: Mapping[int, str]
    multiples: Mapping[str, int]
    related: bool
    ranges: Mapping[str, tuple[int, int]]
    given_names: Mapping[int, str]
    counts: tuple[int, ...]
    constants: tuple[int, ...]

    def renamed(self, buckets: Buckets, lengths: Mapping[str, int]) -> list[dict[str, int]]:
        """Returns the sizes of buckets under this graph's names of dims."""
        names: dict[str, str] = {}
        for position, input_name in self.inputs.items():
            spec = buckets.inputs.get(self.given_names[position])
            dims = self.specs[input_name].dims
            if spec is not None and len(spec.dims) == len(dims):
                pairs = zip(dims, spec.dims, strict=True)
                names |= {own.name: dim.name for own, dim in pairs if own.name and dim.name}
        whole = self.whole(lengths)
        return [
            {n: b.sizes.get(names.get(n, ""), whole[n]) // self.multiples[n] for n in lengths}
            for b in buckets
        ]

    def numbers(self, given: Sequence[Any]) -> tuple[int | float, ...]:
        """Returns the numbers of a call that are constants of a graph."""
        return tuple(value_of(given[i]) for i in self.constants)

    def countable(self, given: Sequence[Any]) -> bool:
        """Returns whether all `counts` of a call are in the range of a dim."""
        return all(SMALLEST <= value_of(given[i]) <= LARGEST for i in self.counts)

    def shape(self, given: Sequence[Any]) -> tuple[int, ...]:
        """Returns the size of each of `sizes` in a call."""
        return tuple(at.read(given) for at in self.sizes.values())

    def lengths(self, given: Sequence[Any]) -> dict[str, int]:
        """Returns the length of each dim in a call.

        Raises:
            TraceError: a size is not a multiple of its number in `multiples`.
        """
        found: dict[str, int] = {}
        for name, size in zip(self.sizes, self.shape(given), strict=True):
            multiple = self.multiples[name]
            if size % multiple:
                raise TraceError(
                    f"a dim of the captured graph's arguments: got length {size}; expected a "
                    f"multiple of {multiple}, as in the first call"
                )
            found[name] = size // multiple
        return found

    def whole(self, lengths: Mapping[str, int]) -> dict[str, int]:
        """Returns the sizes for lengths of dims, which may be multiples."""
        return {n: length * self.multiples[n] for n, length in lengths.items()}


def arguments_of(
    gm: fx.GraphModule, examples: Sequence[Any], learns: bool, *, counts: bool = True
) -> Arguments:
    """Returns the arguments of a captured graph, with a named dim for each symbolic size.

    Args:
        gm: graph module from Dynamo.
        examples: arguments of the first call.
        learns: whether a backward may follow.
        counts: whether an integer that is no tensor's size gets a dim; else it is a constant.

    Raises:
        TraceError: an argument is no tensor or size, or a size has no form that buckets have.
    """
    parameters: dict[int, str] = {}
    inputs: dict[int, str] = {}
    specs: dict[str, InputSpec] = {}
    sizes: dict[str, SizeOf] = {}
    integers: dict[int, str] = {}
    symbols: dict[str, torch.SymInt] = {}
    constants: list[int] = []
    placeholders = gm.graph.find_nodes(op="placeholder")
    multiples = multiples_of(placeholders, _first_sizes(placeholders, examples))

    def take(position: int, dtype: torch.dtype, shape: Sequence[Any], learns: bool) -> None:
        name = inputs[position] = f"input_{position}"
        dims = tuple(_dim(placeholders[position].name, size, multiples) for size in shape)
        specs[name] = InputSpec(dtype, dims, learns)
        for d, (dim, size) in enumerate(zip(dims, shape, strict=True)):
            if isinstance(size, torch.SymInt) and dim.name and size.node.expr.is_Symbol:
                sizes.setdefault(dim.name, SizeOf(position, d))
                symbols.setdefault(dim.name, size)

    values = _values(placeholders, examples)
    for position, (node, value) in enumerate(zip(placeholders, values, strict=True)):
        if isinstance(value, torch.SymInt):
            integers[position] = named(value.node.expr)
        elif is_number(node):
            constants.append(position)
        elif isinstance(examples[position], nn.Parameter):
            parameters[position] = f"parameter_{position}"
        else:
            take(position, value.dtype, value.shape, learns and value.requires_grad)
    alone = [i for i, n in integers.items() if n not in sizes]
    for position in alone if counts else []:
        take(position, torch.bool, [values[position]], False)
    constants += [i for i, n in integers.items() if n not in sizes]
    known = {d.name for s in specs.values() for d in s.dims if d.name}
    if unread := sorted(known - sizes.keys()):
        raise TraceError(
            f"the captured graph's arguments have sizes made of {', '.join(unread)}; expected each "
            "to be the length of some tensor's dim, too; mark such a dim with "
            "torch._dynamo.mark_static"
        )
    return Arguments(
        parameters,
        inputs,
        specs,
        sizes,
        {i: n for i, n in integers.items() if n in sizes},
        {n: multiples.get(n, 1) for n in symbols},
        any(isinstance(g, sympy.Eq) and len(g.free_symbols) > 1 for g in guards_of(placeholders)),
        {n: _range(s, multiples.get(n, 1)) for n, s in symbols.items()},
        {i: _given_name(n) for i, n in enumerate(placeholders)},
        tuple(i for i in alone if i in inputs),
        tuple(constants),
    )


def _values(placeholders: Sequence[fx.Node], examples: Sequence[Any]) -> list[Any]:
    """Returns the arguments as Dynamo traced them, with symbolic sizes.

    Raises:
        TraceError: an argument is neither a tensor nor an integer.
    """
    found = []
    for node, example in zip(placeholders, examples, strict=True):
        value = node.meta.get("example_value", example)
        if not isinstance(value, Tensor | torch.SymInt):
            raise TraceError(
                f"argument '{node.name}' of the captured graph: got {type(value).__name__}; "
                "expected a tensor or a size; pass it as a constant"
            )
        found.append(value)
    return found


def _first_sizes(placeholders: Sequence[fx.Node], examples: Sequence[Any]) -> dict[str, int]:
    """Returns symbolic sizes -> their values in the first call."""
    found: dict[str, int] = {}
    for node, example in zip(placeholders, examples, strict=True):
        value = node.meta.get("example_value")
        if isinstance(value, torch.SymInt):
            found[named(value.node.expr)] = int(value_of(value))
            continue
        for d, size in enumerate(getattr(value, "shape", ())):
            if isinstance(size, torch.SymInt):
                found[named(size.node.expr)] = example.shape[d]
    return found


def _given_name(node: fx.Node) -> str:
    """Returns `x` for Dynamo's `L_x_`."""
    match = re.fullmatch(r"L_(\w+)_", str(node.target))
    return match[1] if match else ""


def named(expr: sympy.Expr) -> str:
    """Returns an expression of sizes over names of dims, `dim_s27` for torch's `s27`."""
    return re.sub(r"\b([a-z]+\d+)\b", r"dim_\1", str(expr))


def guards_of(placeholders: Sequence[fx.Node]) -> list[sympy.Basic]:
    """Returns Dynamo's guards on the sizes of a graph's arguments."""
    every = (s for n in placeholders for s in getattr(n.meta.get("example_value"), "shape", ()))
    env = next((s.node.shape_env for s in every if isinstance(s, torch.SymInt)), None)
    return [] if env is None else [guard.expr for guard in env.guards]


def multiples_of(placeholders: Sequence[fx.Node], sizes: Mapping[str, int]) -> dict[str, int]:
    """Returns the name of each size that is always a multiple of a number -> this number.

    Dynamo guards on it, or on another size being a multiple of its quotient; in the latter case the
    first call must have no remainder.
    """
    found: dict[str, int] = {}
    for guard in guards_of(placeholders):
        for symbol, number in _divided(guard):
            name = named(symbol)
            if sizes.get(name, 1) % number == 0:
                found[name] = math.lcm(found.get(name, 1), number)
    return found


def _divided(guard: sympy.Basic) -> Iterator[tuple[sympy.Symbol, int]]:
    """Yields (size, number) where a guard says that the number divides: `Eq(s, 2 * (s // 2))`."""
    if not isinstance(guard, sympy.Eq):
        return
    for one, other in (guard.args, guard.args[::-1]):
        if isinstance(one, sympy.Symbol):
            for q in other.atoms(FloorDiv):
                if q.args[1].is_Integer and other == q * q.args[1]:
                    yield from ((s, int(q.args[1])) for s in (one, q.args[0]) if s.is_Symbol)
        rest = isinstance(one, Mod | PythonMod) and isinstance(one.args[0], sympy.Symbol)
        if rest and one.args[1].is_Integer and other == 0:
            yield one.args[0], int(one.args[1])


def _dim(name: str, size: int | torch.SymInt, multiples: Mapping[str, int]) -> DimExpr:
    """Returns a dim of an argument as a bucket's expression.

    Raises:
        TraceError: the size has no form that buckets have.
    """
    if not isinstance(size, torch.SymInt):
        return DimExpr(None, offset=int(size))
    try:
        dim = DimExpr.parse(named(size.node.expr))
    except BucketError as error:
        raise TraceError(f"argument '{name}' of the captured graph: {error}") from error
    each = multiples.get(dim.name or "", 1) * dim.multiplier
    if dim.divisor > 1 and each % dim.divisor == 0:
        return replace(dim, multiplier=each // dim.divisor, divisor=1)
    return replace(dim, multiplier=each)


def _range(size: torch.SymInt, multiple: int) -> tuple[int, int]:
    """Returns the smallest and largest length for which Dynamo uses the graph."""
    symbol = size.node.expr
    bounds = size.node.shape_env.var_to_range.get(symbol)
    low, high = SMALLEST, MAX_SIZE
    if bounds is not None:
        low = max(low, int(bounds.lower)) if bounds.lower.is_Integer else low
        high = min(high, int(bounds.upper)) if bounds.upper.is_Integer else high
    return max(SMALLEST, -(-low // multiple)), high // multiple
