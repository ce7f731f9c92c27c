"""What Dynamo captured, as a module that dcpc can trace: named dims, parameters, all outputs."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn
from torch.utils._sympy.functions import FloorDiv, Mod, PythonMod

from dcpc.buckets import Buckets
from dcpc.buckets.specs import MAX_SIZE, DimExpr, InputSpec
from dcpc.dynamo.numbers import is_number, value_of, with_numbers
from dcpc.errors import BucketError, TraceError
from dcpc.trace.loss import AllOutputs

SMALLEST = 2  # Dynamo takes 0 and 1 for numbers


@dataclass(frozen=True, slots=True)
class SizeOf:
    """Where a size is read: a dim of a tensor among the arguments."""

    argument: int
    dim: int


@dataclass(frozen=True, slots=True)
class Arguments:
    """What the captured graph is called with.

    Attributes:
        parameters: position -> name in `Captured`.
        inputs: position -> name.
        specs: of each input, by name.
        sizes: name of a dim -> where it is read.
        integers: position of an argument that is a size -> its dim's name.
        multiples: name of a dim -> what a size is a multiple of: `2` where it is even, and the
            dim stands for half of it.
        related: whether Dynamo found that some dims depend on others.
        ranges: name of a dim -> least and largest length that Dynamo takes this graph for.
        given_names: position -> what forward calls an argument; "" if it is none of its own.
        constants: positions of numbers that are no sizes: a probability of dropout, an integer. A
            graph has their values in it.
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
    constants: tuple[int, ...]

    def renamed(self, buckets: Buckets, lengths: Mapping[str, int]) -> list[dict[str, int]]:
        """Returns the sizes of buckets under this graph's names of dims.

        Args:
            buckets: of the arguments of the model's forward.
            lengths: of dims that no bucket says.

        """
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
        """Returns the numbers in a call that a graph has in it."""
        return tuple(value_of(given[i]) for i in self.constants)

    def shape(self, given: Sequence[Any]) -> tuple[int, ...]:
        """Returns the size of each of `sizes` in a call."""
        return tuple(given[at.argument].shape[at.dim] for at in self.sizes.values())

    def lengths(self, given: Sequence[Any]) -> dict[str, int]:
        """Returns the length of each dim in a call.

        Raises:
            TraceError: a size is no multiple of what it was a multiple of in the first call.
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
        """Returns the sizes that some lengths of dims stand for."""
        return {n: length * self.multiples[n] for n, length in lengths.items()}


class Captured(nn.Module):
    """The captured graph as a module of its own parameters, whose forward returns all tensors.

    Args:
        gm: from Dynamo.
        arguments: what it takes.
        examples: its arguments in the first call.
        learns: whether a backward may follow.

    Attributes:
        count: of arguments.
        checked: positions of those that may lie in another way from call to call.
    """

    def __init__(
        self, gm: fx.GraphModule, arguments: Arguments, examples: Sequence[Any], learns: bool
    ) -> None:
        super().__init__()
        self.arguments = arguments
        placeholders = gm.graph.find_nodes(op="placeholder")
        made = with_numbers(gm, {i: value_of(examples[i]) for i in arguments.constants})
        for node in made.graph.find_nodes(op="get_attr"):
            name = str(node.target).partition(".")[0]
            setattr(self, name, getattr(made, name))
        # Its code alone: a GraphModule changes while it runs, and a trace would tell.
        self.code = type(made).forward
        self.count = len(placeholders)
        (returned,) = gm.graph.output_node().args
        assert isinstance(returned, tuple | list), "Dynamo returns a tuple"
        values: list[Any] = [
            n.meta["example_value"] if isinstance(n, fx.Node) else n for n in returned
        ]
        numbers = [placeholders[i] for i in arguments.constants]
        self.fixed = {
            named(n.meta["example_value"].node.expr): int(examples[i])
            for i, n in zip(arguments.constants, numbers, strict=True)
            if isinstance(n.meta["example_value"], torch.SymInt)
        }
        self.tensors = tuple(i for i, x in enumerate(values) if isinstance(x, Tensor))
        self.numbers = tuple(None if isinstance(x, Tensor) else _number(x) for x in values)
        self._strides = [[_number(n) for n in values[i].stride()] for i in self.tensors]
        for position, name in arguments.parameters.items():
            p = examples[position].detach()
            learning = learns and examples[position].requires_grad
            self.register_parameter(name, nn.Parameter(p, requires_grad=learning))
        # Dynamo guards on how a parameter lies, and on its bits: it is taken as it lies.
        bits = {i for i in arguments.parameters if examples[i].is_conj() or examples[i].is_neg()}
        self.checked = frozenset(range(self.count)) - {*arguments.parameters} | bits

    def forward(self, **inputs: Tensor) -> AllOutputs:
        """Returns all tensors that the graph returns.

        Args:
            inputs: by the names in `arguments`.
        """
        given: list[Any] = [None] * self.count
        for position, name in self.arguments.parameters.items():
            given[position] = getattr(self, name)
        for position, name in self.arguments.inputs.items():
            given[position] = inputs[name]
        sizes = dict(zip(self.arguments.sizes, self.arguments.shape(given), strict=True))
        for position, name in self.arguments.integers.items():
            given[position] = sizes[name]
        returned = self.code(self, *given)
        return AllOutputs(returned[i] for i in self.tensors)

    def numbers_at(self, shape: Sequence[int]) -> tuple[Any, ...]:
        """Returns what the captured graph returns besides tensors, in whose places None is.

        Args:
            shape: of a call, from `Arguments.shape`.
        """
        sizes = {**dict(zip(self.arguments.sizes, shape, strict=True)), **self.fixed}
        return tuple(None if number is None else number(sizes) for number in self.numbers)

    def strides_at(self, shape: Sequence[int]) -> tuple[tuple[int, ...] | None, ...]:
        """Returns how each tensor lies that the captured graph returns; None: it is not known.

        Args:
            shape: of a call, from `Arguments.shape`.
        """
        sizes = {**dict(zip(self.arguments.sizes, shape, strict=True)), **self.fixed}
        found: list[tuple[int, ...] | None] = []
        for strides in self._strides:
            try:
                found.append(tuple(stride(sizes) for stride in strides))
            except KeyError:  # a stride of an argument that no dim's length says
                found.append(None)
        return tuple(found)

    def returned(self, tensors: Sequence[Tensor], numbers: Sequence[Any]) -> tuple[Any, ...]:
        """Returns what the captured graph returns, in its order, sizes among it.

        Args:
            tensors: that it returns.
            numbers: from `numbers_at`.
        """
        found = [*numbers]
        for position, tensor in zip(self.tensors, tensors, strict=True):
            found[position] = tensor
        return tuple(found)


# What reads how a tensor lies. Dynamo answers some of it itself.
_OF_MEMORY = {"stride", "storage_offset", "as_strided", "as_strided_", torch.as_strided}


def refuse_reads_of_memory(gm: fx.GraphModule) -> None:
    """Refuses a graph that reads how values lie, where arguments do not lie one after the other.

    Graphs get contiguous inputs.

    Args:
        gm: from Dynamo.

    Raises:
        TraceError: it does.
    """
    reads = [n for n in gm.graph.nodes if n.op.startswith("call_") and n.target in _OF_MEMORY]
    values = [n.meta.get("example_value") for n in gm.graph.find_nodes(op="placeholder")]
    if reads and not all(x.is_contiguous() for x in values if isinstance(x, Tensor)):
        raise TraceError(
            f"the captured graph: got {reads[0].format_node()}, and an argument that is not "
            "contiguous; expected contiguous ones where a graph reads strides; pass x.contiguous()"
        )


def arguments_of(gm: fx.GraphModule, examples: Sequence[Any], learns: bool) -> Arguments:
    """Returns what a captured graph takes, with a name for each size that is not fixed.

    Args:
        gm: from Dynamo.
        examples: its arguments in the first call.
        learns: whether a backward may follow.

    Raises:
        TraceError: an argument is no tensor or size, or a size is not of a form that buckets have.
    """
    parameters: dict[int, str] = {}
    inputs: dict[int, str] = {}
    specs: dict[str, InputSpec] = {}
    sizes: dict[str, SizeOf] = {}
    integers: dict[int, str] = {}
    symbols: dict[str, torch.SymInt] = {}
    constants: list[int] = []
    placeholders = gm.graph.find_nodes(op="placeholder")
    first = {
        named(size.node.expr): example.shape[d]
        for node, example in zip(placeholders, examples, strict=True)
        for d, size in enumerate(getattr(node.meta.get("example_value"), "shape", ()))
        if isinstance(size, torch.SymInt)
    }
    multiples = multiples_of(placeholders, first)
    for position, (node, example) in enumerate(zip(placeholders, examples, strict=True)):
        value = node.meta.get("example_value", example)
        if isinstance(value, torch.SymInt):
            integers[position] = named(value.node.expr)
            continue
        if not isinstance(value, Tensor):
            raise TraceError(
                f"argument '{node.name}' of the captured graph: got {type(value).__name__}; "
                "expected a tensor or a size; pass it as a constant"
            )
        if is_number(node):
            constants.append(position)
            continue
        if isinstance(example, nn.Parameter):
            parameters[position] = f"parameter_{position}"
            continue
        name = f"input_{position}"
        inputs[position] = name
        dims = tuple(_dim(node.name, size, multiples) for size in value.shape)
        specs[name] = InputSpec(value.dtype, dims, learns and value.requires_grad)
        for d, (dim, size) in enumerate(zip(dims, value.shape, strict=True)):
            if isinstance(size, torch.SymInt) and dim.name and size.node.expr.is_Symbol:
                sizes.setdefault(dim.name, SizeOf(position, d))
                symbols.setdefault(dim.name, size)
    constants += [i for i, n in integers.items() if n not in sizes]
    integers = {i: n for i, n in integers.items() if n in sizes}
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
        integers,
        {n: multiples.get(n, 1) for n in symbols},
        any(isinstance(g, sympy.Eq) and len(g.free_symbols) > 1 for g in guards_of(placeholders)),
        {n: _range(s, multiples.get(n, 1)) for n, s in symbols.items()},
        {i: _given_name(n) for i, n in enumerate(placeholders)},
        tuple(constants),
    )


def _given_name(node: fx.Node) -> str:
    """Returns `x` for Dynamo's `L_x_`."""
    match = re.fullmatch(r"L_(\w+)_", str(node.target))
    return match[1] if match else ""


def named(expr: sympy.Expr) -> str:
    """Returns an expression of sizes by names of dims, `dim_s27` for torch's `s27`."""
    return re.sub(r"\b([a-z]+\d+)\b", r"dim_\1", str(expr))


def guards_of(placeholders: Sequence[fx.Node]) -> list[sympy.Basic]:
    """Returns what Dynamo found to hold for the sizes of a graph's arguments."""
    every = (s for n in placeholders for s in getattr(n.meta.get("example_value"), "shape", ()))
    env = next((s.node.shape_env for s in every if isinstance(s, torch.SymInt)), None)
    return [] if env is None else [guard.expr for guard in env.guards]


def multiples_of(placeholders: Sequence[fx.Node], sizes: Mapping[str, int]) -> dict[str, int]:
    """Returns the sizes that are a multiple of a number -> this number.

    Dynamo says so; or it says that another size is so many times a quotient, which then has no
    rest in the first call.

    Args:
        placeholders: of a captured graph.
        sizes: in the first call.
    """
    found: dict[str, int] = {}
    for guard in guards_of(placeholders):
        for symbol, number in _divided(guard):
            name = named(symbol)
            if sizes.get(name, 1) % number == 0:
                found[name] = math.lcm(found.get(name, 1), number)
    return found


def _divided(guard: sympy.Basic) -> Iterator[tuple[sympy.Symbol, int]]:
    """Yields which size a guard says a number divides: `Eq(s, 2 * (s // 2))`."""
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
    """Returns a dim of an argument.

    Args:
        name: of the argument.
        size: of the dim.
        multiples: what sizes are multiples of.

    Raises:
        TraceError: it is no expression that buckets have.
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
    """Returns the lengths that Dynamo takes the graph for."""
    symbol = size.node.expr
    bounds = size.node.shape_env.var_to_range.get(symbol)
    low, high = SMALLEST, MAX_SIZE
    if bounds is not None:
        low = max(low, int(bounds.lower)) if bounds.lower.is_Integer else low
        high = min(high, int(bounds.upper)) if bounds.upper.is_Integer else high
    return max(SMALLEST, -(-low // multiple)), high // multiple


def _number(value: Any) -> Callable[[Mapping[str, int]], Any]:
    """Returns what gives a number that the graph returns, of the lengths of the dims."""
    if not isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return lambda lengths: value
    expr = value.node.expr
    kind = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}[type(value)]
    symbols = {named(s): s for s in expr.free_symbols}

    def of(sizes: Mapping[str, int]) -> Any:
        return kind(expr.xreplace({s: sympy.Integer(sizes[n]) for n, s in symbols.items()}))

    return of
