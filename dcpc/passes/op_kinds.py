"""Kinds of ops whose dims follow from their arguments: views, reductions, generators, indexing.

Each function takes a `Call` and returns its `OpSharding`. Which op is of which kind is one line of
`sharding_rules.yaml`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from dcpc.ir import TensorInfo
from dcpc.passes.factors import quotient
from dcpc.passes.rule_types import Linear, Names, OpSharding

Shape = tuple[sympy.Expr, ...]


@dataclass(frozen=True, slots=True)
class Call:
    """One call of an op: its tensor operands, its output, and its arguments by schema name."""

    node: fx.Node
    operands: tuple[TensorInfo, ...]
    output: TensorInfo
    args: dict[str, Any]
    linear: Linear = "none"
    along: str = "dim"

    @property
    def input_shape(self) -> Shape:
        """Shape of the first tensor operand."""
        return self.operands[0].shape

    def dims(self, name: str, ndim: int) -> list[int]:
        """Returns the dims an argument names, non-negative; all of them if it is None or empty."""
        value = self.args.get(name)
        if value is None or value == []:
            return list(range(ndim))
        values = [value] if isinstance(value, int) else list(value)
        return [v % ndim if ndim else 0 for v in values]


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


def _own(shape: Shape, prefix: str = "n") -> tuple[Names, dict[str, sympy.Expr]]:
    """One name a dim, () where the size is 1."""
    names = tuple((f"{prefix}{d}",) if s != 1 else () for d, s in enumerate(shape))
    return names, {f"{prefix}{d}": s for d, s in enumerate(shape) if s != 1}


def pointwise(call: Call) -> OpSharding:
    """Elementwise with broadcasting: a dim of an operand is the output's dim, or has size 1."""
    output, sizes = _own(call.output.shape)
    operands = []
    for operand in call.operands:
        skip = len(output) - len(operand.shape)
        operands.append(
            tuple(output[skip + d] if s != 1 else () for d, s in enumerate(operand.shape))
        )
    linear = call.linear
    tensors = len(call.operands)
    if linear == "all" and any(
        not isinstance(call.args.get(n), fx.Node) and call.args.get(n) not in (None, 0)
        for n in ("other", "self")
    ):
        linear = "none"  # x + 1: the 1 would be added on every rank
    if linear == "all" and tensors < 2:
        linear = "first"
    return OpSharding(tuple(operands), output, sizes, linear=linear)


def reshape(call: Call) -> OpSharding:
    """Views regroup factors: both sides are cut at every border that the other has."""
    operand, output, sizes, whole = regroup(call.input_shape, call.output.shape)
    return OpSharding((operand,), output, sizes, whole=frozenset(whole), linear="first")


def regroup(before: Shape, after: Shape) -> tuple[Names, Names, dict[str, sympy.Expr], set[str]]:
    """Returns names of both sides of a reshape, their sizes, and those without a counterpart."""
    left: list[list[str]] = [[] for _ in before]
    right: list[list[str]] = [[] for _ in after]
    sizes: dict[str, sympy.Expr] = {}
    whole: set[str] = set()
    a = [(d, s) for d, s in enumerate(before) if s != 1]
    b = [(d, s) for d, s in enumerate(after) if s != 1]
    while a and b:
        (i, x), (j, y) = a[0], b[0]
        name = f"f{len(sizes)}"
        if x == y:
            piece, a, b = x, a[1:], b[1:]
        elif (rest := quotient(x, y)) is not None:
            piece, a, b = y, [(i, rest), *a[1:]], b[1:]
        elif (rest := quotient(y, x)) is not None:
            piece, a, b = x, a[1:], [(j, rest), *b[1:]]
        else:
            break
        sizes[name] = piece
        left[i].append(name)
        right[j].append(name)
    for side, rest_dims in ((left, a), (right, b)):
        for d, s in rest_dims:
            name = f"f{len(sizes)}"
            sizes[name] = s
            side[d].append(name)
            whole.add(name)
    return tuple(map(tuple, left)), tuple(map(tuple, right)), sizes, whole


def expand(call: Call) -> OpSharding:
    """A dim of size 1 that grows is made by the op itself, on every rank its own length."""
    output, sizes = _own(call.output.shape)
    skip = len(output) - len(call.input_shape)
    operand = tuple(output[skip + d] if s != 1 else () for d, s in enumerate(call.input_shape))
    return OpSharding((operand,), output, sizes, linear="first")


def permute(call: Call) -> OpSharding:
    """transpose, permute, t, movedim: the output's dims are the operand's in another order."""
    operand, sizes = _own(call.input_shape)
    ndim = len(operand)
    order = list(range(ndim))
    name = call.node.target._opname  # type: ignore[union-attr]
    if name == "permute":
        order = call.dims("dims", ndim)
    elif name in ("t", "numpy_T"):
        order.reverse()
    else:
        i, j = (call.dims(n, ndim)[0] for n in ("dim0", "dim1"))
        order[i], order[j] = order[j], order[i]
    return OpSharding((operand,), tuple(operand[d] for d in order), sizes, linear="first")


def slice_(call: Call) -> OpSharding:
    """A slice: other dims as they are; the cut dim stays sharded where only its ends are cut off."""
    operand, sizes = _own(call.input_shape)
    dim = call.dims("dim", len(operand))[0]
    output = list(operand)
    before, after = call.input_shape[dim], call.output.shape[dim]
    if before == after:
        return OpSharding((operand,), operand, sizes, linear="first")
    output[dim] = ("cut",) if after != 1 else ()
    sizes["cut"] = after
    start = call.args["start"] or 0
    lost = sympy.expand(before - after)
    ends_only = call.args.get("step", 1) == 1 and lost.is_Integer and not before.is_Integer
    if ends_only and isinstance(start, int) and 0 <= start <= lost and operand[dim] and after != 1:
        return OpSharding(
            (operand,), tuple(output), sizes, linear="first",
            slices={"cut": (operand[dim][0], start)},
        )  # fmt: skip
    whole = frozenset({"cut", *operand[dim]})
    return OpSharding((operand,), tuple(output), sizes, whole=whole, linear="first")


def select(call: Call) -> OpSharding:
    """One element of a dim: the other dims as they are."""
    operand, sizes = _own(call.input_shape)
    dim = call.dims("dim", len(operand))[0]
    output = tuple(n for d, n in enumerate(operand) if d != dim)
    return OpSharding((operand,), output, sizes, whole=frozenset(operand[dim]), linear="first")


def reduction(call: Call) -> OpSharding:
    """sum adds up pieces of the reduced dims; other reductions need them whole."""
    operand, sizes = _own(call.input_shape)
    reduced = call.dims("dim", len(operand))
    gone = frozenset(n for d in reduced for n in operand[d])
    keep = bool(call.args.get("keepdim", False))
    output = tuple(
        () if d in reduced else names for d, names in enumerate(operand) if keep or d not in reduced
    )
    if call.node.target._opname == "sum":  # type: ignore[union-attr]
        return OpSharding((operand,), output, sizes, summed=gone, linear="first")
    return OpSharding((operand,), output, sizes, whole=gone, linear=call.linear)


def along(call: Call) -> OpSharding:
    """softmax, cumsum, flip, roll: as elementwise, but the dims of the argument stay whole."""
    names, sizes = _own(call.output.shape)
    whole = frozenset(n for d in call.dims(call.along, len(names)) for n in names[d])
    operands = tuple(
        tuple(names[d] if s != 1 else () for d, s in enumerate(o.shape)) for o in call.operands
    )
    return OpSharding(operands, names, sizes, whole=whole, linear=call.linear)


def cat(call: Call) -> OpSharding:
    """The dim that is joined stays whole, the others are shared by all parts."""
    output, sizes = _own(call.output.shape)
    dim = call.dims("dim", len(output))[0]
    whole = set(output[dim])
    operands = []
    for i, part in enumerate(call.operands):
        names = list(output)
        names[dim] = (f"part{i}",) if part.shape[dim] != 1 else ()
        if names[dim]:
            sizes[f"part{i}"] = part.shape[dim]
            whole.add(f"part{i}")
        operands.append(tuple(names))
    return OpSharding(tuple(operands), output, sizes, whole=frozenset(whole), linear="all")


def stack(call: Call) -> OpSharding:
    """The new dim is whole, the others are shared by all parts."""
    output, sizes = _own(call.output.shape)
    dim = call.dims("dim", len(output))[0]
    part = tuple(n for d, n in enumerate(output) if d != dim)
    operands = tuple(part for _ in call.operands)
    return OpSharding(operands, output, sizes, whole=frozenset(output[dim]), linear="all")


def generator(call: Call) -> OpSharding:
    """full, zeros, ones, arange: made by the op, each rank its own piece."""
    output, sizes = _own(call.output.shape)
    operands, sizes, whole = _unrelated(call, output, sizes)
    return OpSharding(operands, output, sizes, whole=whole)


def _unrelated(
    call: Call, output: Names, sizes: dict[str, sympy.Expr]
) -> tuple[tuple[Names, ...], dict[str, sympy.Expr], frozenset[str]]:
    """Names of operands that are only looked at for their dtype (`new_ones(x, ...)`)."""
    operands, whole = [], set()
    for i, operand in enumerate(call.operands):
        names, more = _own(operand.shape, f"x{i}_")
        operands.append(names)
        sizes = sizes | more
        whole |= more.keys()
    return tuple(operands), sizes, frozenset(whole)


def whole(call: Call) -> OpSharding:
    """Deliberately not split: the op is small, or its result depends on the order of all elements."""
    operands, sizes, kept = _unrelated(call, (), {})
    output, more = _own(call.output.shape)
    return OpSharding(operands, output, sizes | more, whole=kept | more.keys())


def triangle(call: Call) -> OpSharding:
    """tril, triu: elementwise in the leading dims, the last two are compared by position."""
    names, sizes = _own(call.output.shape)
    whole = frozenset(n for dim in names[-2:] for n in dim)
    return OpSharding((names,), names, sizes, whole=whole, linear="first")


def norm(call: Call) -> OpSharding:
    """layer_norm, rms_norm: the normalised dims stay whole, weight and bias have only these."""
    output, sizes = _own(call.output.shape)
    count = len(call.args["normalized_shape"])
    kept = output[len(output) - count :]
    operands = (output, *(kept for _ in call.operands[1:]))
    whole = frozenset(n for names in kept for n in names)
    return OpSharding(operands, output, sizes, whole=whole)


def pad(call: Call) -> OpSharding:
    """Padded dims stay whole."""
    operand, sizes = _own(call.input_shape)
    output, whole = list(operand), set()
    for d, (before, after) in enumerate(zip(call.input_shape, call.output.shape, strict=True)):
        if before != after:
            whole |= {f"pad{d}", *operand[d]}
            sizes[f"pad{d}"] = after
            output[d] = (f"pad{d}",)
    return OpSharding((operand,), tuple(output), sizes, whole=frozenset(whole))


def gather(call: Call) -> OpSharding:
    """x.gather(dim, index): x is whole along dim; elsewhere the sizes must agree to share."""
    source, index = call.operands
    output, sizes = _own(index.shape)
    dim = call.dims("dim", len(output))[0]
    operand, whole = [], set()
    for d, (a, b) in enumerate(zip(source.shape, index.shape, strict=True)):
        if d != dim and a == b:
            operand.append(output[d])
            continue
        name = f"x{d}"
        operand.append((name,) if a != 1 else ())
        whole |= {name} if d == dim else {name, *output[d]}
        sizes[name] = a
    return OpSharding((tuple(operand), output), output, sizes, whole=frozenset(whole & sizes.keys()))


def index(call: Call) -> OpSharding:
    """x[i, j, :]: indexed dims are whole, the broadcast indices' dims and the other dims are free."""
    source = call.input_shape
    given: list[Any] = list(call.args["indices"])
    given += [None] * (len(source) - len(given))
    at = [d for d, g in enumerate(given) if g is not None]
    tensors = call.operands[1:]
    if not at or any(t.dtype in (torch.bool, torch.uint8) for t in tensors):
        raise NotImplementedError("a boolean index has a data-dependent size")
    ndim = max(len(t.shape) for t in tensors)
    position = at[0] if at == list(range(at[0], at[-1] + 1)) else 0
    output, sizes = _own(call.output.shape)
    shared = output[position : position + ndim]
    rest = list(output[:position] + output[position + ndim :])
    operand: list[tuple[str, ...]] = []
    whole: set[str] = set()
    for d, size in enumerate(source):
        if d in at:
            operand.append((f"x{d}",) if size != 1 else ())
            whole |= {f"x{d}"} if size != 1 else set()
            sizes[f"x{d}"] = size
        else:
            operand.append(rest.pop(0))
    indices = []
    for t in tensors:
        skip = ndim - len(t.shape)
        indices.append(tuple(shared[skip + d] if s != 1 else () for d, s in enumerate(t.shape)))
    return OpSharding((tuple(operand), *indices), output, sizes, whole=frozenset(whole))


def matmul(call: Call) -> OpSharding:
    """matmul, mm, bmm: batch dims broadcast, the inner dim is summed over."""
    a, b = (o.shape for o in call.operands)
    output, sizes = _own(call.output.shape)
    m = output[-2] if len(a) > 1 and len(b) > 1 else (output[-1] if len(a) > 1 else ())
    n = output[-1] if len(b) > 1 else ()
    batch = output[: len(output) - (len(a) > 1) - (len(b) > 1)]
    k: tuple[str, ...] = ("k",) if a[-1] != 1 else ()
    if k:
        sizes["k"] = a[-1]

    def leading(shape: Shape) -> Names:
        count = max(len(shape) - 2, 0)
        names = batch[len(batch) - count :]
        return tuple(x if s != 1 else () for x, s in zip(names, shape[:count], strict=True))

    left = (*leading(a), *((m,) if len(a) > 1 else ()), k)
    right = (*leading(b), k, *((n,) if len(b) > 1 else ()))
    return OpSharding(
        (left, right), output, sizes, summed=frozenset(k), linear="one", multiplies=True
    )


def attention(call: Call) -> OpSharding:
    """Scaled dot-product attention: heads and batch are free; keys are whole; queries are free.

    With grouped queries a head dim is (key/value head, query in its group).
    """
    q, k, v = (o.shape for o in call.operands[:3])
    batch = tuple((f"b{d}",) if s != 1 else () for d, s in enumerate(q[:-3]))
    sizes = {f"b{d}": s for d, s in enumerate(q[:-3]) if s != 1}
    sizes |= {"h": q[-3] if len(q) > 2 else sympy.Integer(1), "q": q[-2], "s": k[-2]}
    sizes |= {"d": q[-1], "e": v[-1], "g": sympy.Integer(1)}
    if len(q) > 2 and k[-3] != q[-3]:
        group = quotient(q[-3], k[-3])
        if group is None or v[-3] != k[-3]:
            raise NotImplementedError("key and value heads do not divide the query heads")
        sizes |= {"h": k[-3], "g": group}

    def one(*names: str) -> tuple[str, ...]:
        return tuple(n for n in names if sizes[n] != 1)

    heads_q = (one("h", "g"),) if len(q) > 2 else ()
    heads_k = (one("h"),) if len(q) > 2 else ()
    operands = [
        (*batch, *heads_q, one("q"), one("d")),
        (*batch, *heads_k, one("s"), one("d")),
        (*batch, *heads_k, one("s"), one("e")),
    ]
    output = (*batch, *heads_q, one("q"), one("e"))
    for mask in call.operands[3:]:
        full = (*batch, *heads_q, one("q"), one("s"))
        skip = len(full) - len(mask.shape)
        operands.append(tuple(full[skip + d] if s != 1 else () for d, s in enumerate(mask.shape)))
    whole = {"s", "d", "e"}
    if len(q) < 3:
        whole.add("q")
    sizes = {n: s for n, s in sizes.items() if s != 1}
    return OpSharding(
        tuple(operands), output, sizes, whole=frozenset(whole & sizes.keys()), multiplies=True,
        work={"": 0.5, "q": 1.0} if call.args.get("is_causal") else {},
    )  # fmt: skip


def cross_entropy(call: Call) -> OpSharding:
    """Cross-entropy of class indices, one loss a row: rows are free, classes are whole."""
    logits, target = call.operands[0].shape, call.operands[1].shape
    if call.args["reduction"] != 0 or len(call.operands) > 2 or len(target) >= len(logits):
        raise NotImplementedError("reduced, weighted or soft-target cross-entropy is not split")
    rows, sizes = _own(target)
    sizes["c"] = logits[1] if len(logits) > 1 else logits[0]
    left = (rows[0], ("c",), *rows[1:]) if len(logits) > 1 else (("c",),)
    return OpSharding((left, rows), rows, sizes, whole=frozenset({"c"}))


KINDS: dict[str, Callable[[Call], OpSharding]] = {
    "pointwise": pointwise,
    "reshape": reshape,
    "expand": expand,
    "permute": permute,
    "slice": slice_,
    "select": select,
    "reduction": reduction,
    "along": along,
    "cat": cat,
    "stack": stack,
    "generator": generator,
    "triangle": triangle,
    "whole": whole,
    "norm": norm,
    "pad": pad,
    "gather": gather,
    "index": index,
    "matmul": matmul,
    "attention": attention,
    "cross_entropy": cross_entropy,
}

VIEW_KINDS = {"reshape", "expand", "permute", "slice", "select"}
