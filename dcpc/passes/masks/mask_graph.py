"""Reads one element of a mask, as an expression of its position, from the graph that makes it.

Nothing is computed: an index goes up the graph, through views and lookups, to the positions
(`arange`), numbers and tensors that the element is made of.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch import fx

from dcpc.ir import Program
from dcpc.passes.masks.mask_values import (
    FALSE,
    TRUE,
    Affine,
    Data,
    Magnitude,
    Truth,
    UnknownError,
    Value,
    WhereValue,
    both,
    chosen,
    combined,
    compared,
    either,
    held,
    negation,
    plus,
    positive,
    times,
    truth_of,
)
from dcpc.passes.sharding.op_kinds import arguments

aten = torch.ops.aten
Index = tuple[Affine, ...]


class MaskReader:
    """Reads masks of one program."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._memo: dict[tuple[str, Index], Value] = {}

    def read(self, node: Any, index: Index) -> Value:
        """Returns a node's element at an index; a number as it is.

        An op without a rule here gives Data: a lookup of the node at run time.
        """
        if not isinstance(node, fx.Node):
            return TRUE if node is True else FALSE if node is False else Affine(node)
        if node.name in self.program.scalars:
            return Affine(self.program.scalars[node.name])
        if node.name not in self.program.info:
            raise UnknownError  # a size that is divided, or compared
        key = (node.name, index)
        if key not in self._memo:
            self._memo[key] = self._read(node, index)
        return self._memo[key]

    def _read(self, node: fx.Node, index: Index) -> Value:
        rule = _RULES.get(getattr(node.target, "_opname", ""))
        if rule is not None:
            try:
                return held(rule(self, node, arguments(node), index), self.dtype(node))
            except UnknownError:
                pass
        value = Data(("get", node.name, index))
        return Truth("data", data=value) if self.dtype(node) == torch.bool else value

    def dtype(self, node: fx.Node) -> torch.dtype:
        """Returns the dtype of a node's value."""
        return self.program.info[node.name].dtype

    def shape(self, node: fx.Node) -> tuple[sympy.Expr, ...]:
        """Returns the sizes of a node's value."""
        return self.program.info[node.name].shape

    def number(self, x: Any) -> Any:
        """Returns a size argument as a number or an expression."""
        if not isinstance(x, fx.Node):
            return x
        if x.name not in self.program.scalars:
            raise UnknownError
        return self.program.scalars[x.name]

    def place(self, at: Any, size: sympy.Expr) -> Any:
        """Returns a position in a dim, counted from its beginning.

        Raises:
            UnknownError: it may be negative, and so count from the end.
        """
        at = sympy.sympify(at)
        at = at + size if at.is_negative else at
        if not at.is_nonnegative:
            raise UnknownError
        return int(at) if at.is_Integer else at

    def operand(self, x: Any, index: Index) -> Value:
        """Returns an operand of an elementwise op, broadcast to the result's index."""
        if not isinstance(x, fx.Node) or x.name not in self.program.info:
            return self.read(x, ())
        shape = self.shape(x)
        own = index[len(index) - len(shape) :]
        places = zip(shape, own, strict=True)
        return self.read(x, tuple(Affine(0) if n == 1 else i for n, i in places))


Rule = Callable[[MaskReader, fx.Node, dict[str, Any], Index], Value]
_RULES: dict[str, Rule] = {}


def _rule(*names: str) -> Callable[[Rule], Rule]:
    def add(function: Rule) -> Rule:
        _RULES.update(dict.fromkeys(names, function))
        return function

    return add


# --------------------------------------------------------------------------------------- sources


@_rule("arange")
def _arange(r: MaskReader, node: fx.Node, args: dict[str, Any], index: Index) -> Value:
    start, step = r.number(args.get("start", 0)), r.number(args.get("step", 1))
    return plus(times(index[0], step), Affine(start))


@_rule("full", "new_full", "full_like", "scalar_tensor")
def _full(r: MaskReader, node: fx.Node, args: dict[str, Any], index: Index) -> Value:
    number = args["s"] if "s" in args else args["fill_value"]
    return r.read(number, ())


@_rule("zeros", "zeros_like", "new_zeros")
def _zeros(r: MaskReader, node: fx.Node, args: dict[str, Any], index: Index) -> Value:
    return Affine(0)


@_rule("ones", "ones_like", "new_ones")
def _ones(r: MaskReader, node: fx.Node, args: dict[str, Any], index: Index) -> Value:
    return Affine(1)


# ------------------------------------------------------------------------------------------ views


@_rule("alias", "clone", "contiguous", "detach", "lift_fresh_copy", "_to_copy")
def _same(r: MaskReader, node: fx.Node, args: dict[str, Any], index: Index) -> Value:
    (source,) = node.all_input_nodes
    value, dtype = r.read(source, index), r.dtype(node)
    return _cast(value, dtype) if dtype not in (r.dtype(source), torch.bool) else value


def _cast(value: Value, dtype: torch.dtype) -> Value:
    """Casts values that are read from tensors; `held` handles other values."""
    if isinstance(value, Data):
        return Data(("cast", dtype, value.recipe))
    if isinstance(value, WhereValue):
        return WhereValue(value.condition, _cast(value.yes, dtype), _cast(value.no, dtype))
    return value


@_rule("expand")
def _expand(r: MaskReader, node: fx.Node, args: dict[str, Any], index: Index) -> Value:
    return r.operand(args["self"], index)


@_rule("unsqueeze")
def _unsqueeze(r: MaskReader, node: fx.Node, args: dict[str, Any], index: Index) -> Value:
    dim = args["dim"] % len(index)
    return r.read(args["self"], (*index[:dim], *index[dim + 1 :]))


@_rule("reshape", "squeeze", "view", "flatten")
def _reshape(r: MaskReader, node: fx.Node, args: dict[str, Any], index: Index) -> Value:
    """Reads through a reshape that only adds or drops dims of size 1."""
    (source, *_) = node.all_input_nodes
    old, new = r.shape(source), r.shape(node)
    kept = [i for i, n in zip(index, new, strict=True) if n != 1]
    if [n for n in old if n != 1] != [n for n in new if n != 1]:
        raise UnknownError
    queue = iter(kept)
    return r.read(source, tuple(Affine(0) if n == 1 else next(queue) for n in old))


@_rule("transpose")
def _transpose(r: MaskReader, node: fx.Node, args: dict[str, Any], index: Index) -> Value:
    own = list(index)
    a, b = (args[name] % len(own) for name in ("dim0", "dim1"))
    own[a], own[b] = own[b], own[a]
    return r.read(args["self"], tuple(own))


@_rule("t", "mT")
def _matrix_transpose(r: MaskReader, node: fx.Node, args: dict[str, Any], index: Index) -> Value:
    return r.read(args["self"], (*index[:-2], *reversed(index[-2:])))


@_rule("permute")
def _permute(r: MaskReader, node: fx.Node, args: dict[str, Any], index: Index) -> Value:
    own: list[Affine] = list(index)
    for position, dim in enumerate(args["dims"]):
        own[dim % len(own)] = index[position]
    return r.read(args["self"], tuple(own))


@_rule("slice")
def _slice(r: MaskReader, node: fx.Node, args: dict[str, Any], index: Index) -> Value:
    dim = args["dim"] % len(index)
    start = r.place(r.number(args["start"] or 0), r.shape(args["self"])[dim])
    step = r.number(args["step"])
    own = list(index)
    own[dim] = plus(times(own[dim], step), Affine(start))
    return r.read(args["self"], tuple(own))


@_rule("select")
def _select(r: MaskReader, node: fx.Node, args: dict[str, Any], index: Index) -> Value:
    source = args["self"]
    dim = args["dim"] % len(r.shape(source))
    at = r.place(r.number(args["index"]), r.shape(source)[dim])
    return r.read(source, (*index[:dim], Affine(at), *index[dim:]))


@_rule("index")
def _index(r: MaskReader, node: fx.Node, args: dict[str, Any], index: Index) -> Value:
    """Reads an indexing by tensors in all dims, or in the first ones."""
    source, indices = args["self"], list(args["indices"])
    rest = len(r.shape(source)) - len(indices)
    if any(not isinstance(x, fx.Node) for x in indices):
        raise UnknownError
    if any(r.program.info[x.name].dtype == torch.bool for x in indices):
        raise UnknownError
    place = index[: len(index) - rest]
    pairs = zip(indices, r.shape(source), strict=False)
    own = [_looked_up(r, r.operand(x, place), size) for x, size in pairs]
    return r.read(source, (*own, *index[len(index) - rest :]))


def _looked_up(r: MaskReader, at: Value, size: sympy.Expr) -> Affine:
    """Returns an index as a position; a negative number counts from the end."""
    if not isinstance(at, Affine) or any(times < 0 for _, times in at.coefficients):
        raise UnknownError
    return Affine(r.place(at.number, size)) if at.constant else _from_here(at)


def _from_here(at: Affine) -> Affine:
    if not sympy.sympify(at.number).is_nonnegative:
        raise UnknownError
    return at


# ---------------------------------------------------------------------------------------- algebra


@_rule("le", "lt", "ge", "gt", "eq", "ne")
def _compare(r: MaskReader, node: fx.Node, args: dict[str, Any], index: Index) -> Value:
    a, b = (r.operand(args[name], index) for name in ("self", "other"))
    return compared(node.target._opname, a, b)  # type: ignore[union-attr]


@_rule("logical_and", "__and__", "bitwise_and")
def _and(r: MaskReader, node: fx.Node, args: dict[str, Any], index: Index) -> Value:
    return both(*_truths(r, node, args, index))


@_rule("logical_or", "__or__", "bitwise_or")
def _or(r: MaskReader, node: fx.Node, args: dict[str, Any], index: Index) -> Value:
    return either(*_truths(r, node, args, index))


@_rule("logical_xor", "__xor__", "bitwise_xor")
def _xor(r: MaskReader, node: fx.Node, args: dict[str, Any], index: Index) -> Value:
    a, b = _truths(r, node, args, index)
    return either(both(a, negation(b)), both(negation(a), b))


@_rule("logical_not", "bitwise_not")
def _not(r: MaskReader, node: fx.Node, args: dict[str, Any], index: Index) -> Value:
    if r.program.info[node.name].dtype != torch.bool:
        raise UnknownError
    return negation(truth_of(r.operand(args["self"], index)))


def _truths(r: MaskReader, node: fx.Node, args: dict[str, Any], index: Index) -> list[Truth]:
    if r.program.info[node.name].dtype != torch.bool:
        raise UnknownError  # of the bits of integers
    return [truth_of(r.operand(args[name], index)) for name in ("self", "other")]


@_rule("add", "sub", "rsub")
def _add(r: MaskReader, node: fx.Node, args: dict[str, Any], index: Index) -> Value:
    a, b = (r.operand(args[name], index) for name in ("self", "other"))
    name = node.target._opname  # type: ignore[union-attr]
    a, b = (b, a) if name == "rsub" else (a, b)
    if args.get("alpha", 1) != 1:
        raise UnknownError
    sign = 1 if name == "add" else -1
    op = "add" if name == "add" else "sub"
    return combined(lambda x, y: plus(x, times(y, sign)), op, a, b)


@_rule("mul")
def _mul(r: MaskReader, node: fx.Node, args: dict[str, Any], index: Index) -> Value:
    a, b = (r.operand(args[name], index) for name in ("self", "other"))
    return combined(_product, "mul", a, b)


def _product(a: Affine, b: Affine) -> Affine:
    if not a.constant and not b.constant:
        raise UnknownError
    return times(a, b.number) if b.constant else times(b, a.number)


@_rule("neg")
def _neg(r: MaskReader, node: fx.Node, args: dict[str, Any], index: Index) -> Value:
    return combined(_product, "mul", r.operand(args["self"], index), Affine(-1))


@_rule("abs")
def _abs(r: MaskReader, node: fx.Node, args: dict[str, Any], index: Index) -> Value:
    value = r.operand(args["self"], index)
    if not isinstance(value, Affine):
        raise UnknownError
    return Magnitude(value)


@_rule("where")
def _where(r: MaskReader, node: fx.Node, args: dict[str, Any], index: Index) -> Value:
    condition = truth_of(r.operand(args["condition"], index))
    return chosen(condition, *(r.operand(args[name], index) for name in ("self", "other")))


@_rule("masked_fill")
def _masked_fill(r: MaskReader, node: fx.Node, args: dict[str, Any], index: Index) -> Value:
    hit = truth_of(r.operand(args["mask"], index))
    filled = held(r.operand(args["value"], ()), r.dtype(node))
    return chosen(hit, filled, r.operand(args["self"], index))


@_rule("tril", "triu")
def _triangle(r: MaskReader, node: fx.Node, args: dict[str, Any], index: Index) -> Value:
    diagonal = Affine(r.number(args["diagonal"]))
    below = plus(plus(index[-2], times(index[-1], -1)), diagonal)  # row >= column
    if node.target._opname == "triu":  # type: ignore[union-attr]
        below = times(below, -1)
    return chosen(positive(below), r.read(args["self"], index), held(Affine(0), r.dtype(node)))
