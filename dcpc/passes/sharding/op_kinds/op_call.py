"""The call of an op on which every kind works, and helpers that name dims."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import sympy
from torch import fx

from dcpc.ir import TensorInfo
from dcpc.passes.sharding.rule_types import Linear, Names, OpSharding

Shape = tuple[sympy.Expr, ...]
NameSizes = dict[str, sympy.Expr]


@dataclass(frozen=True, slots=True)
class OpCall:
    """One call of an op: its tensor operands, its output, and its arguments by schema name.

    Where it returns several tensors, `output` is the `result`-th of them.
    """

    node: fx.Node
    operands: tuple[TensorInfo, ...]
    output: TensorInfo
    args: dict[str, Any]
    linear: Linear = "none"
    along: str = "dim"
    result: int = 0

    @property
    def input_shape(self) -> Shape:
        """Shape of the first tensor operand."""
        return self.operands[0].shape

    @property
    def op(self) -> str:
        """The op's name without namespace and overload."""
        return str(self.node.target._opname)  # type: ignore[union-attr]

    def dims(self, name: str, ndim: int) -> list[int]:
        """Returns the dims an argument names, non-negative; all of them if it is None or empty."""
        value = self.args.get(name)
        if value is None or value == [] or ndim == 0:
            return list(range(ndim))
        values = [value] if isinstance(value, int) else list(value)
        return [v % ndim for v in values]

    def numbers(self, name: str, count: int) -> list[int]:
        """Returns an argument that is one number or `count` of them, as `count` numbers."""
        value = self.args[name]
        values = list(value) if isinstance(value, (list, tuple)) else [value]
        if not all(isinstance(v, int) for v in values):
            raise NotImplementedError(f"{name} depends on a size")
        return [int(v) for v in values] * (count if len(values) == 1 else 1)

    def integer(self, name: str) -> sympy.Integer:
        """Returns an argument that is one number."""
        return sympy.Integer(self.numbers(name, 1)[0])


def arguments(node: fx.Node) -> dict[str, Any]:
    """Returns an op's arguments by the names of its schema, defaults filled in."""
    schema = node.target._schema  # type: ignore[union-attr]
    bound: dict[str, Any] = {}
    for i, argument in enumerate(schema.arguments):
        if i < len(node.args):
            bound[argument.name] = node.args[i]
        elif argument.name in node.kwargs:
            bound[argument.name] = node.kwargs[argument.name]
        else:
            bound[argument.name] = argument.default_value
    return bound


def own(shape: Shape, prefix: str = "n") -> tuple[Names, NameSizes]:
    """Returns a name for each dim, () where the size is 1, and their sizes."""
    names = tuple((f"{prefix}{d}",) if s != 1 else () for d, s in enumerate(shape))
    return names, {f"{prefix}{d}": s for d, s in enumerate(shape) if s != 1}


def broadcast(names: Names, shape: Shape) -> Names:
    """Returns the names of an operand broadcast to a tensor with these names, right-aligned."""
    skip = len(names) - len(shape)
    if skip < 0:
        raise NotImplementedError("an operand has more dims than the output")
    return tuple(names[skip + d] if s != 1 else () for d, s in enumerate(shape))


def broadcast_shape(shapes: Iterable[Shape]) -> list[sympy.Expr]:
    """Returns the shape that some shapes broadcast to, aligned at the right."""
    shapes = list(shapes)
    wide: list[sympy.Expr] = [sympy.Integer(1)] * max(map(len, shapes))
    for shape in shapes:
        for d, s in enumerate(shape, len(wide) - len(shape)):
            wide[d] = s if wide[d] == 1 else wide[d]
    return wide


def members(dims: Iterable[tuple[str, ...]]) -> set[str]:
    """Returns every name that occurs in some dims."""
    return {name for dim in dims for name in dim}


def unrelated(call: OpCall, first: int = 0) -> tuple[list[Names], NameSizes]:
    """Returns distinct names for the operands from `first` on, shared with no other tensor."""
    operands: list[Names] = []
    sizes: NameSizes = {}
    for i, operand in enumerate(call.operands[first:], first):
        names, more = own(operand.shape, f"x{i}_")
        operands.append(names)
        sizes |= more
    return operands, sizes


def all_whole(call: OpCall) -> OpSharding:
    """Returns a rule that splits nothing: each rank computes the whole op."""
    operands, sizes = unrelated(call)
    output, more = own(call.output.shape)
    return OpSharding(tuple(operands), output, sizes | more, whole=frozenset(sizes | more))
