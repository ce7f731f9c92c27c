"""Kinds of ops that only move elements: views, concatenation, padding, repetition."""

from __future__ import annotations

import sympy
import torch
from torch import fx

from dcpc.passes.sharding.factors import quotient
from dcpc.passes.sharding.op_kinds.op_call import NameSizes, OpCall, Shape, all_whole, members, own
from dcpc.passes.sharding.rule_types import Names, OpSharding, RowWindow


def reshape(call: OpCall) -> OpSharding:
    """Views regroup factors: both sides are cut at every border that the other has."""
    operand, output, sizes, whole = regroup(call.input_shape, call.output.shape)
    return OpSharding((operand,), output, sizes, whole=frozenset(whole), linear="first")


def regroup(before: Shape, after: Shape) -> tuple[Names, Names, NameSizes, set[str]]:
    """Returns names of both sides of a reshape, their sizes, and those without a counterpart."""
    left: list[list[str]] = [[] for _ in before]
    right: list[list[str]] = [[] for _ in after]
    sizes: NameSizes = {}
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


def squeeze(call: OpCall) -> OpSharding:
    """Dims of size 1 vanish; a longer dim that is asked for must not become 1 on a rank."""
    operand, sizes = own(call.input_shape)
    ndim = len(operand)
    asked = call.dims("dim", ndim) if "dim" in call.args else list(range(ndim))
    if call.args.get("dim") == []:
        asked = []
    output = tuple(n for d, n in enumerate(operand) if n or d not in asked)
    whole = frozenset(members(operand[d] for d in asked))
    return OpSharding((operand,), output, sizes, whole=whole, linear="first")


def unflatten(call: OpCall) -> OpSharding:
    """The dim that is taken apart stays whole: its sizes are an argument."""
    operand, sizes = own(call.input_shape)
    dim = call.dims("dim", len(operand))[0]
    count = len(call.output.shape) - len(operand) + 1
    parts, more = own(call.output.shape[dim : dim + count], "part")
    output = (*operand[:dim], *parts, *operand[dim + 1 :])
    whole = frozenset({*operand[dim], *more})
    return OpSharding((operand,), output, sizes | more, whole=whole, linear="first")


def expand(call: OpCall) -> OpSharding:
    """A dim of size 1 that grows is made by the op itself, on every rank its own length."""
    output, sizes = own(call.output.shape)
    skip = len(output) - len(call.input_shape)
    operand = tuple(output[skip + d] if s != 1 else () for d, s in enumerate(call.input_shape))
    return OpSharding((operand,), output, sizes, linear="first")


def permute(call: OpCall) -> OpSharding:
    """transpose, permute, t, movedim: the output's dims are the operand's in another order."""
    operand, sizes = own(call.input_shape)
    probe = torch.empty([d + 2 for d in range(len(operand))], device="meta")
    others = [a for a in call.node.args[1:] if not isinstance(a, fx.Node)]
    moved = call.node.target(probe, *others, **call.node.kwargs)  # type: ignore[operator]
    output = tuple(operand[size - 2] for size in moved.shape)
    return OpSharding((operand,), output, sizes, linear="first")


def slice_(call: OpCall) -> OpSharding:
    """Other dims stay as they are; the cut dim stays sharded where only its ends are cut off."""
    operand, sizes = own(call.input_shape)
    dim = call.dims("dim", len(operand))[0]
    output = list(operand)
    before, after = call.input_shape[dim], call.output.shape[dim]
    step = call.args.get("step", 1)
    if before == after and step == 1:
        return OpSharding((operand,), operand, sizes, linear="first")
    output[dim] = ("cut",) if after != 1 else ()
    if after != 1:
        sizes["cut"] = after
    start = call.args["start"] or 0
    lost = sympy.expand(before - after)
    ends_only = step == 1 and lost.is_Integer and not before.is_Integer
    if ends_only and isinstance(start, int) and 0 <= start <= lost and operand[dim] and after != 1:
        slices = {"cut": (operand[dim][0], start)}
        return OpSharding((operand,), tuple(output), sizes, linear="first", slices=slices)
    whole = frozenset({*output[dim], *operand[dim]})
    return OpSharding((operand,), tuple(output), sizes, whole=whole, linear="first")


def select(call: OpCall) -> OpSharding:
    """One element of a dim: the other dims as they are."""
    operand, sizes = own(call.input_shape)
    dim = call.dims("dim", len(operand))[0]
    output = tuple(n for d, n in enumerate(operand) if d != dim)
    return OpSharding((operand,), output, sizes, whole=frozenset(operand[dim]), linear="first")


def diagonal(call: OpCall) -> OpSharding:
    """The two dims whose positions are compared stay whole; their diagonal is the last dim."""
    operand, sizes = own(call.input_shape)
    at = {call.dims(name, len(operand))[0] for name in ("dim1", "dim2")}
    size = call.output.shape[-1]
    last = ("diagonal",) if size != 1 else ()
    output = (*(n for d, n in enumerate(operand) if d not in at), last)
    whole = frozenset({*members(operand[d] for d in at), *last})
    sizes |= {"diagonal": size} if last else {}
    return OpSharding((operand,), output, sizes, whole=whole, linear="first")


def diag_embed(call: OpCall) -> OpSharding:
    """The last dim becomes the diagonal of two new dims: all three stay whole."""
    output, sizes = own(call.output.shape)
    at = {call.dims(name, len(output))[0] for name in ("dim1", "dim2")}
    size = call.input_shape[-1]
    last = ("diagonal",) if size != 1 else ()
    operand = (*(n for d, n in enumerate(output) if d not in at), last)
    whole = frozenset({*members(output[d] for d in at), *last})
    sizes |= {"diagonal": size} if last else {}
    return OpSharding((operand,), output, sizes, whole=whole, linear="first")


def cat(call: OpCall) -> OpSharding:
    """The dim that is joined stays whole, the others are shared by all parts."""
    output, sizes = own(call.output.shape)
    if any(len(part.shape) != len(output) for part in call.operands):
        raise NotImplementedError("a part without elements has another number of dims")
    dim = _joined_dim(call, len(output))
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


def _joined_dim(call: OpCall, ndim: int) -> int:
    by_name = {"hstack": min(1, ndim - 1), "column_stack": 1, "vstack": 0, "row_stack": 0}
    by_name["dstack"] = 2
    return by_name[call.op] if call.op in by_name else call.dims("dim", ndim)[0]


def split(call: OpCall) -> OpSharding:
    """split, chunk, tensor_split, unbind: the dim that is cut is whole, in every part."""
    operand, sizes = own(call.input_shape)
    if len(call.operands) > 1:
        raise NotImplementedError("the places to cut at are a tensor")
    dim = call.dims("dim", len(operand))[0]
    part: list[tuple[str, ...]] = list(operand)
    whole = {*operand[dim]}
    if call.op == "unbind":
        del part[dim]
    else:
        size = call.output.shape[dim]
        part[dim] = ("part",) if size != 1 else ()
        sizes |= dict.fromkeys(part[dim], size)
        whole |= {*part[dim]}
    return OpSharding((operand,), tuple(part), sizes, whole=frozenset(whole), linear="first")


def kron(call: OpCall) -> OpSharding:
    """Each dim of the output is (dim of the first, dim of the second), aligned at the right."""
    left, sizes = own(call.operands[0].shape, "a")
    right, more = own(call.operands[1].shape, "b")
    ndim = len(call.output.shape)
    padded = [((),) * (ndim - len(side)) + side for side in (left, right)]
    output = tuple((*a, *b) for a, b in zip(*padded, strict=True))
    return OpSharding((left, right), output, sizes | more, linear="one")


def stack(call: OpCall) -> OpSharding:
    """The new dim is whole, the others are shared by all parts."""
    output, sizes = own(call.output.shape)
    dim = call.dims("dim", len(output))[0]
    part = tuple(n for d, n in enumerate(output) if d != dim)
    operands = tuple(part for _ in call.operands)
    return OpSharding(operands, output, sizes, whole=frozenset(output[dim]), linear="all")


def pad(call: OpCall) -> OpSharding:
    """Padded dims are whole, or their pieces move a bit; zeros around a partial sum are one."""
    operand, sizes = own(call.input_shape)
    output, whole = list(operand), set()
    amounts = list(call.args.get("pad") or call.args["padding"])
    touched = {len(operand) - 1 - i // 2 for i, amount in enumerate(amounts) if amount != 0}
    for d in touched:
        after = call.output.shape[d]
        output[d] = (f"pad{d}",) if after != 1 else ()
        whole |= {*output[d], *operand[d]}
        sizes |= {f"pad{d}": after} if after != 1 else {}
    constant = call.op == "constant_pad_nd" or call.args.get("mode") == "constant"
    zeros = constant and not call.args.get("value")
    copies = call.op != "constant_pad_nd" and not constant
    windows = {}
    for d in touched if zeros else ():
        front, back = amounts[2 * (len(operand) - 1 - d) :][:2]
        fixed = isinstance(front, int) and isinstance(back, int)
        if fixed and output[d] and operand[d]:
            windows[output[d][0]] = RowWindow(operand[d][0], before=front)
    return OpSharding(
        (operand,), tuple(output), sizes, whole=frozenset(whole), windows=windows,
        linear="first" if zeros or copies else "none",
        nonempty=_all_but_batch(operand, len(amounts) // 2) if copies else frozenset(),
    )  # fmt: skip


def _all_but_batch(operand: Names, spatial: int) -> frozenset[str]:
    """The kernels that copy elements into a border take an empty batch, but no other empty dim."""
    return frozenset(members(operand[1:] if len(operand) == spatial + 2 else operand))


def repeat(call: OpCall) -> OpSharding:
    """repeat, tile: a dim becomes (copies, old); the copies are made on every rank."""
    times = call.args.get("repeats") or call.args.get("dims") or []
    return _multiplied(call, list(times), outer=True)


def repeat_interleave(call: OpCall) -> OpSharding:
    """Each element of a dim several times: the dim becomes (old, copies)."""
    ndim = len(call.output.shape)
    if call.args.get("output_size") is not None or not isinstance(call.args["repeats"], int):
        raise NotImplementedError("the repeats or the output's size are given from outside")
    if call.args["dim"] is None:
        flat, sizes, whole = _flat_names(call)
        return OpSharding((flat,), (("n",),), sizes | {"n": call.output.shape[0]}, whole=whole)
    times = [1] * ndim
    times[call.dims("dim", ndim)[0]] = call.args["repeats"]
    return _multiplied(call, times, outer=False)


def _flat_names(call: OpCall) -> tuple[Names, NameSizes, frozenset[str]]:
    operand, sizes = own(call.input_shape, "x")
    return operand, sizes, frozenset({*sizes, "n"})


def _multiplied(call: OpCall, times: list[int], outer: bool) -> OpSharding:
    ndim = len(call.output.shape)
    times = [1] * (ndim - len(times)) + times
    before = (sympy.Integer(1),) * (ndim - len(call.input_shape)) + call.input_shape
    operand, output, whole = [], [], set()
    sizes: NameSizes = {}
    for d, (n, count) in enumerate(zip(before, times, strict=True)):
        old = (f"n{d}",) if n != 1 else ()
        copies = (f"copies{d}",) if count != 1 else ()
        sizes |= dict.fromkeys(old, n) | dict.fromkeys(copies, sympy.sympify(count))
        whole |= {*copies}
        operand.append(old)
        output.append((*copies, *old) if outer else (*old, *copies))
    return OpSharding(
        (tuple(operand[ndim - len(call.input_shape) :]),), tuple(output), sizes,
        whole=frozenset(whole), linear="first",
    )  # fmt: skip


def unfold(call: OpCall) -> OpSharding:
    """Windows along one dim: that dim and the windows stay whole."""
    operand, sizes = own(call.input_shape)
    if not operand:
        return all_whole(call)
    dim = call.dims("dimension", len(operand))[0]
    output = [*operand, ()]
    for name, d in (("windows", dim), ("window", len(operand))):
        size = call.output.shape[d]
        output[d] = (name,) if size != 1 else ()
        sizes |= {name: size} if size != 1 else {}
    whole = frozenset({*operand[dim], *output[dim], *output[-1]})
    return OpSharding((operand,), tuple(output), sizes, whole=whole, linear="first")


def complex_view(call: OpCall) -> OpSharding:
    """view_as_complex, view_as_real: the last dim (real, imaginary) stays whole."""
    wide = call.output.shape if call.op == "view_as_real" else call.input_shape
    names, sizes = own(wide[:-1])
    sizes["part"] = wide[-1]
    both = (*names, ("part",))
    operand, output = (names, both) if call.op == "view_as_real" else (both, names)
    return OpSharding((operand,), output, sizes, whole=frozenset({"part"}), linear="first")


def pixel_shuffle(call: OpCall) -> OpSharding:
    """(c r q) h w -> c (h r) (w q), and back for pixel_unshuffle."""
    down = call.op == "pixel_unshuffle"
    r = call.integer("downscale_factor" if down else "upscale_factor")
    packed_shape, spread_shape = call.input_shape, call.output.shape
    if down:
        packed_shape, spread_shape = spread_shape, packed_shape
    lead = [f"n{d}" for d in range(len(packed_shape) - 3)]
    sizes = dict(zip(lead, packed_shape, strict=False))
    sizes |= {"c": spread_shape[-3], "r": r, "q": r, "h": packed_shape[-2], "w": packed_shape[-1]}
    dims = [(n,) for n in lead]
    packed = [*dims, ("c", "r", "q"), ("h",), ("w",)]
    spread = [*dims, ("c",), ("h", "r"), ("w", "q")]
    before, after = (spread, packed) if down else (packed, spread)
    # torch 2.13 returns another shape for an empty input of pixel_unshuffle.
    return _regrouped(before, after, sizes, {"r", "q"}, nonempty=True)


def channel_shuffle(call: OpCall) -> OpSharding:
    """Groups and channels change places: n (g c) ... -> n (c g) ..."""
    shape, groups = call.input_shape, call.integer("groups")
    sizes = {f"n{d}": s for d, s in enumerate(shape) if d != 1}
    sizes |= {"g": groups, "c": sympy.cancel(shape[1] / groups)}
    rest = [(f"n{d}",) for d in range(2, len(shape))]
    before, after = [("n0",), ("g", "c"), *rest], [("n0",), ("c", "g"), *rest]
    return _regrouped(before, after, sizes, {"g"})


def _regrouped(
    before: list[tuple[str, ...]],
    after: list[tuple[str, ...]],
    sizes: NameSizes,
    kept: set[str],
    nonempty: bool = False,
) -> OpSharding:
    """Both sides by name, names of size 1 left out."""
    sizes = {n: s for n, s in sizes.items() if s != 1}
    operand, output = (
        tuple(tuple(n for n in dim if n in sizes) for dim in dims) for dims in (before, after)
    )
    return OpSharding(
        (operand,), output, sizes, whole=frozenset(kept & sizes.keys()), linear="first",
        nonempty=frozenset(sizes if nonempty else ()),
    )  # fmt: skip
