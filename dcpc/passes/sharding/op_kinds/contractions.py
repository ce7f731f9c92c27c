"""Kinds of ops that multiply and add up: matrix products, einsum, attention, embedding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import sympy
from sympy import divisors

from dcpc.passes.sharding.factors import quotient
from dcpc.passes.sharding.op_kinds.op_call import (
    NameSizes,
    OpCall,
    Shape,
    broadcast,
    broadcast_shape,
    members,
    own,
    unrelated,
)
from dcpc.passes.sharding.rule_types import Names, OpSharding, RingRule


def matmul(call: OpCall) -> OpSharding:
    """matmul, mm, bmm, mv, dot: batch dims broadcast, the inner dim is summed over."""
    a, b = (o.shape for o in call.operands)
    return _product(a, b, call.output.shape)


def _product(a: Shape, b: Shape, out: Shape) -> OpSharding:
    if not a or not b:
        raise NotImplementedError("a product with a single number")
    output, sizes = own(out)
    m = output[-2] if len(a) > 1 and len(b) > 1 else (output[-1] if len(a) > 1 else ())
    n = output[-1] if len(b) > 1 else ()
    batch = output[: len(output) - (len(a) > 1) - (len(b) > 1)]
    k: tuple[str, ...] = ("k",) if a[-1] != 1 else ()
    if k:
        sizes["k"] = a[-1]

    left = (*broadcast(batch, a[:-2]), *((m,) if len(a) > 1 else ()), k)
    right = (*broadcast(batch, b[:-2]), k, *((n,) if len(b) > 1 else ()))
    return OpSharding(
        (left, right), output, sizes, summed=frozenset(k), linear="one", multiplies=True
    )


def added_matmul(call: OpCall) -> OpSharding:
    """addmm, baddbmm, addmv: a matrix product and a tensor that is broadcast and added once."""
    product = _product(call.operands[1].shape, call.operands[2].shape, call.output.shape)
    added = broadcast(product.output, call.operands[0].shape)
    # torch 2.13: addmv of one added number and no rows returns that number.
    grown = call.op == "addmv" and added != product.output
    return OpSharding(
        (added, *product.operands), product.output, product.sizes, whole=product.summed,
        multiplies=True, nonempty=frozenset(members(product.output)) if grown else frozenset(),
    )  # fmt: skip


def einsum(call: OpCall) -> OpSharding:
    """One name a letter; letters that are not in the output are summed over."""
    text = str(call.args["equation"]).replace(" ", "")
    left, arrow, right = text.partition("->")
    inputs = left.split(",")
    if "." in text or len(inputs) != len(call.operands):
        raise NotImplementedError(f"an equation with '...' ('{text}')")
    letters = Counter("".join(inputs))
    right = right if arrow else "".join(sorted(x for x, count in letters.items() if count == 1))
    sizes: NameSizes = {}
    for names, operand in zip(inputs, call.operands, strict=True):
        for name, size in zip(names, operand.shape, strict=True):
            if size != 1:
                sizes[name] = size
    operands = tuple(
        tuple((name,) if size != 1 else () for name, size in zip(names, o.shape, strict=True))
        for names, o in zip(inputs, call.operands, strict=True)
    )
    output = tuple((name,) if name in sizes else () for name in right)
    return OpSharding(
        operands, output, sizes, summed=frozenset(sizes.keys() - set(right)),
        linear="one", multiplies=len(inputs) > 1,
    )  # fmt: skip


def tensordot(call: OpCall) -> OpSharding:
    """tensordot, inner: the dims that are paired are summed over, the others follow each other."""
    a, b = (o.shape for o in call.operands)
    if not a or not b:
        raise NotImplementedError("a product with a single number")
    pairs = call.args.get("dims_self", [-1]), call.args.get("dims_other", [-1])
    left, sizes = own(a, "a")
    right, more = own(b, "b")
    sizes |= more
    right_dims = list(right)
    gone_left = [d % len(a) for d in pairs[0]]
    gone_right = [d % len(b) for d in pairs[1]]
    for i, j in zip(gone_left, gone_right, strict=True):
        if a[i] != b[j]:
            raise NotImplementedError("a paired dim of one element")
        for name in right[j]:
            del sizes[name]
        right_dims[j] = left[i]
    output = [n for d, n in enumerate(left) if d not in gone_left]
    output += [n for d, n in enumerate(right_dims) if d not in gone_right]
    summed = frozenset(members(left[d] for d in gone_left))
    return OpSharding(
        (left, tuple(right_dims)), tuple(output), sizes, summed=summed, linear="one",
        multiplies=True,
    )  # fmt: skip


def vecdot(call: OpCall) -> OpSharding:
    """linalg_vecdot: elementwise products with broadcasting, added up along one dim."""
    shapes = [o.shape for o in call.operands]
    wide = tuple(broadcast_shape(shapes))
    names, sizes = own(wide)
    dim = call.dims("dim", len(wide))[0]
    if any(shape[dim - len(wide)] != wide[dim] for shape in shapes):
        raise NotImplementedError("the dim that is added up is broadcast")
    output = tuple(n for d, n in enumerate(names) if d != dim)
    operands = tuple(broadcast(names, shape) for shape in shapes)
    return OpSharding(operands, output, sizes, summed=frozenset(names[dim]), linear="one")


def matrices(call: OpCall) -> OpSharding:
    """inv, det, qr, solve: each matrix of a stack by itself; the last two dims stay whole."""
    shapes = [o.shape for o in call.operands]
    if any(len(shape) != len(shapes[0]) for shape in shapes):
        raise NotImplementedError("a matrix and a vector")
    lead, sizes = own(tuple(broadcast_shape([shape[:-2] for shape in shapes])))
    operands = []
    whole: set[str] = set()
    for i, shape in enumerate(shapes):
        names, more = own(shape[-2:], f"x{i}_")
        operands.append((*broadcast(lead, shape[:-2]), *names))
        sizes |= more
        whole |= more.keys()
    last, more = own(call.output.shape[len(lead) :], "out")
    free = frozenset(members(lead))
    return OpSharding(
        tuple(operands), (*lead, *last), sizes | more, whole=frozenset(whole | more.keys()),
        nonempty=free,
    )  # fmt: skip


def recurrent(call: OpCall) -> OpSharding:
    """lstm, gru, rnn: the sequence is run through step by step, each sample by itself."""
    shapes = [o.shape for o in call.operands]
    if "batch_sizes" in call.args or len(shapes[0]) != 3:
        raise NotImplementedError("packed sequences, or one without a batch")
    if call.args["train"] and call.args["dropout"]:
        raise NotImplementedError("dropout between the layers draws random numbers")
    at = 0 if call.args["batch_first"] else 1
    batch = shapes[0][at]
    states = len(call.args["hx"]) if isinstance(call.args["hx"], (list, tuple)) else 1
    named, sizes = unrelated(call)
    out, more = own(call.output.shape, "out")
    sizes |= more
    whole = set(sizes)
    for i, where in [(0, at), *((1 + state, 1) for state in range(states))]:
        named[i] = (*named[i][:where], ("batch",) if batch != 1 else (), *named[i][where + 1 :])
    where = at if call.result == 0 else 1
    output = (*out[:where], ("batch",) if batch != 1 else (), *out[where + 1 :])
    used = members([*(d for n in named for d in n), *output])
    sizes = {n: s for n, s in sizes.items() if n in used}
    sizes |= {"batch": batch} if batch != 1 else {}
    return OpSharding(
        tuple(named), output, sizes, whole=frozenset(whole & sizes.keys()), multiplies=True,
        nonempty=frozenset({"batch"} & sizes.keys()),
    )  # fmt: skip


def embedding(call: OpCall) -> OpSharding:
    """Rows of a table: the table's rows are whole, its columns and the positions are free."""
    if call.args["scale_grad_by_freq"]:
        raise NotImplementedError("the gradient is scaled by how often an index occurs")
    index, sizes = own(call.operands[1].shape)
    rows, columns = call.operands[0].shape
    v, e = (("v",) if rows != 1 else ()), (("e",) if columns != 1 else ())
    sizes |= dict.fromkeys(v, rows) | dict.fromkeys(e, columns)
    return OpSharding(((v, e), index), (*index, e), sizes, whole=frozenset(v))


def attention(call: OpCall) -> OpSharding:
    """dcpc::attention: batch, heads and queries are free; keys are whole, or go round.

    With grouped queries a head dim is (key/value head, query in its group). Where samples share
    the rows of a mask, the batch is (row, sample of it).
    """
    q, k, v = (o.shape for o in call.operands[:3])
    group = quotient(q[1], k[1])
    if group is None or v[1] != k[1]:
        raise NotImplementedError("key and value heads do not divide the query heads")
    masks = list(call.operands[3:])
    given = [name for name in ("keep", "segment") if call.args.get(name) is not None]
    by_key = [masks.pop() for _ in given]
    sizes = _samples(q[0], [mask.shape[0] for mask in masks])
    sizes |= {"h": k[1], "g": group, "q": q[2], "s": k[2], "d": q[3], "e": v[3]}
    sizes = {n: s for n, s in sizes.items() if s != 1}

    def one(*names: str) -> tuple[str, ...]:
        return tuple(n for n in names if n in sizes)

    samples, heads = one("b", "c"), one("h", "g")
    output = (samples, heads, one("q"), one("e"))
    operands: list[Names] = [
        (samples, heads, one("q"), one("d")),
        (samples, one("h"), one("s"), one("d")),
        (samples, one("h"), one("s"), one("e")),
    ]
    operands += [broadcast((one("b"), *output[1:-1], one("s")), mask.shape) for mask in masks]
    operands += [broadcast((samples, one("s")), x.shape) for x in reversed(by_key)]
    # Of the product of all names the work is the part d + e of d * e: two matmuls. Causal, it is
    # half of the pairs, by any piece: where later queries see more, pieces are zigzag.
    d, e = q[3], v[3]
    widths = float(1 / d + 1 / e) if d.is_Integer and e.is_Integer else 1.0
    work = {"": widths * (0.5 if call.args["after"] is not None else 1.0)}
    later = "q" if call.args["after"] is not None and call.args["before"] is None else ""
    return OpSharding(
        tuple(operands), output, sizes, whole=frozenset({"s", "d", "e"} & sizes.keys()),
        multiplies=True, work=work, later=later, ring=_ring(call, sizes, len(masks)),
    )  # fmt: skip


def attention_of_rows(call: OpCall) -> OpSharding:
    """dcpc::attention_of_rows: heads are free; rows are whole, as each reads those of its sample.

    Operands are queries, keys, values, the mask of all positions, and which row each is.
    """
    q, k, v, mask, _ = (o.shape for o in call.operands)
    group = quotient(q[1], k[1])
    if group is None or v[1] != k[1] or mask[1] not in (1, q[1]):
        raise NotImplementedError("heads of keys, of values or of the mask are not those of rows")
    sizes = {"h": k[1], "g": group, "r": q[2], "d": q[3], "e": v[3]}
    sizes |= {"m": mask[0], "n": mask[2], "s": mask[3]}
    sizes = {n: s for n, s in sizes.items() if s != 1}

    def one(*names: str) -> tuple[str, ...]:
        return tuple(n for n in names if n in sizes)

    heads, shared = one("h", "g"), one("h")
    operands = (
        ((), heads, one("r"), one("d")),
        ((), shared, one("r"), one("d")),
        ((), shared, one("r"), one("e")),
        (one("m"), heads if mask[1] != 1 else (), one("n"), one("s")),
        (one("r"),),
    )
    output = ((), heads, one("r"), one("e"))
    whole = frozenset(sizes.keys() - set(heads))
    return OpSharding(
        operands, output, sizes, whole=whole, multiplies=True, nonempty=frozenset(heads)
    )


def _samples(samples: sympy.Expr, rows: Sequence[sympy.Expr]) -> NameSizes:
    """Returns (mask rows, samples of each row) by name, given the batch dims of the masks."""
    own = next((n for n in rows if n not in (1, samples)), samples)
    sharers = sympy.Integer(1) if own == samples else quotient(samples, own)
    if sharers is None:
        raise NotImplementedError("the rows of a mask do not divide the samples")
    return {"b": own, "c": sharers}


def _ring(call: OpCall, sizes: NameSizes, masks: int) -> RingRule | None:
    """Returns the ring rule of an attention, or None if keys and values cannot go round.

    A mask's gradient is the sum over all ranks, and a single key (or query) has no pieces.
    """
    q, k = (o.shape for o in call.operands[:2])
    if not {"q", "s"} <= sizes.keys() or any(o.requires_grad for o in call.operands[3:]):
        return None
    given = [o.shape for o in call.operands[3 : 3 + masks]]
    rows = ["q" if shape[-2] != 1 else "" for shape in given]
    others = [""] * (len(call.operands) - 3 - masks)
    across = [1]
    if q[1].is_Integer and k[1].is_Integer and not given:
        across += divisors(int(q[1]))[1:]
    heads = (int(q[1]), int(k[1])) if len(across) > 1 else (1, 1)
    operands = ("q", "s", "s", *rows, *others)
    return RingRule(operands, "q", (1, 2), heads, tuple(across))
