"""Contractions, attention, convolutions, pooling, interpolation."""

from typing import Any

import torch

import dcpc.ops.attention  # noqa: F401 - registers the op
from tests.passes.sharding.rule_cases.source import Source, aten, strategy
from tests.passes.sharding.rule_check import Case


@strategy("aten.linear")
def linear(source: Source) -> Case:
    lead, i, o = source.shape(0, 3), source.size(), source.size()
    x, w = source.floats(*lead, i), source.floats(o, i)
    return Case(aten.linear.default, (x, w, source.maybe(source.floats(o))))


def numbers(source: Source, *shapes: list[int]) -> list[torch.Tensor]:
    dtype = source.pick(torch.float64, torch.int64)
    return [source.tensor(*shape, dtypes=(dtype,)) for shape in shapes]


@strategy("aten.mm", "aten.bmm", "aten.mv", "aten.dot", "aten.outer", "aten.ger")
def product(source: Source) -> Case:
    b, m, k, n = (source.size() for _ in range(4))
    shapes = {
        "aten.mm": ([m, k], [k, n]), "aten.bmm": ([b, m, k], [b, k, n]), "aten.mv": ([m, k], [k]),
        "aten.dot": ([k], [k]), "aten.outer": ([m], [n]), "aten.ger": ([m], [n]),
    }[source.op]  # fmt: skip
    return Case(source.packet.default, tuple(numbers(source, *shapes)))


@strategy("aten.matmul", "aten.linalg_matmul")
def matmul(source: Source) -> Case:
    batch, m, k, n = source.shape(0, 2), source.size(), source.size(), source.size()
    left = source.pick([k], [*source.broadcast(batch), m, k], [*batch, m, k])
    right = source.pick([k], [*source.broadcast(batch), k, n], [*batch, k, n])
    return Case(source.packet.default, tuple(numbers(source, left, right)))


@strategy("aten.inner", "aten.tensordot")
def paired(source: Source) -> Case:
    k, j = source.size(), source.size()
    if source.op == "aten.inner":
        args = numbers(source, [*source.shape(0, 2, 4), k], [*source.shape(0, 2, 4), k])
        return Case(aten.inner.default, tuple(args))
    x, y = numbers(source, [source.size(), k, source.size(), j], [j, source.size(), k])
    pairs = source.pick(([1, 3], [2, 0]), ([-1], [0]), ([1], [-1]))
    return Case(aten.tensordot.default, (x, y, *pairs))


@strategy("aten.linalg_vecdot")
def vecdot(source: Source) -> Case:
    shape = source.shape(2, 3)
    x, y = source.floats(*shape), source.floats(*shape[source.size(0, 1) :])
    return Case(aten.linalg_vecdot.default, (x, y), {"dim": -1})


@strategy("aten.kron")
def kron(source: Source) -> Case:
    args = numbers(source, source.shape(1, 3, 4), source.shape(1, 3, 4))
    return Case(aten.kron.default, tuple(args))


@strategy("aten.addbmm", "aten.addr")
def added_over(source: Source) -> Case:
    b, m, k, n = (source.size() for _ in range(4))
    if source.op == "aten.addr":
        return Case(aten.addr.default, tuple(numbers(source, [source.pick(1, m), n], [m], [n])))
    args = numbers(source, [m, n], [b, m, k], [b, k, n])
    return Case(aten.addbmm.default, tuple(args))


@strategy("aten.addmm", "aten.addmv", "aten.baddbmm")
def added(source: Source) -> Case:
    b, m, k, n = (source.size() for _ in range(4))
    out, left, right = {
        "aten.addmm": ([m, n], [m, k], [k, n]), "aten.addmv": ([m], [m, k], [k]),
        "aten.baddbmm": ([b, m, n], [b, m, k], [b, k, n]),
    }[source.op]  # fmt: skip
    args = numbers(source, source.broadcast(out), left, right)
    return Case(source.packet.default, tuple(args), {"beta": source.pick(1, 2), "alpha": 2})


@strategy("aten.einsum")
def einsum(source: Source) -> Case:
    equation = source.pick(
        "bhqd,bhkd->bhqk", "bhqk,bhkd->bhqd", "nlhd,nlhr->nhdr", "nc,chw->nhw", "ij,jk", "i,j->ji",
        "bld,d->bl", "ii->i", "bij->bji", "ij->", "nctkv,kvw->nctw", "ab,bc,cd->ad",
    )  # fmt: skip
    sizes = {letter: source.size(1, 4) for letter in sorted(set(equation) - set(",->"))}
    terms = equation.split("->")[0].split(",")
    operands = numbers(source, *([sizes[x] for x in term] for term in terms))
    return Case(aten.einsum.default, (equation, operands))


@strategy("aten.bilinear")
def bilinear(source: Source) -> Case:
    lead, i, j, o = source.shape(1, 2), source.size(), source.size(), source.size()
    x, y, w = source.floats(*lead, i), source.floats(*lead, j), source.floats(o, i, j)
    return Case(aten.bilinear.default, (x, y, w, source.maybe(source.floats(o))))


@strategy("aten.cdist", "aten._cdist_forward")
def cdist(source: Source) -> Case:
    batch, p, r, m = source.shape(0, 2, 3), source.size(), source.size(), source.size()
    x, y = source.floats(*batch, p, m), source.floats(*batch, r, m)
    how = (2.0, source.pick(None, 2)) if "forward" in source.op else ()
    return Case(source.packet.default, (x, y, *how))


@strategy("aten.embedding")
def embedding(source: Source) -> Case:
    v = source.size()
    args = (source.floats(v, source.size()), source.below(v, *source.shape(0, 3)))
    return Case(aten.embedding.default, (*args, source.pick(-1, 0)))


@strategy("dcpc.attention")
def attention(source: Source) -> Case:
    rows, h, g = source.size(), source.size(1, 3), source.size(1, 3)
    b = rows * source.pick(1, 1, 2, 3)
    q, s, d, e = source.size(), source.size(), source.size(), source.size()
    tensors = [source.floats(b, h * g, q, d), source.floats(b, h, s, d), source.floats(b, h, s, e)]
    mask = keep = None
    mode = source.pick("none", "truth mask", "number mask", "keep")
    if "mask" in mode:
        shape = [source.pick(1, b, rows), source.pick(1, h * g), source.pick(1, q), s]
        mask = source.floats(*shape) if mode == "number mask" else source.below(2, *shape).bool()
    elif mode == "keep":
        keep = source.below(2, source.pick(1, b), s).bool()
    band = source.pick({}, {"after": 0}, {"before": 1, "after": 0}, {"before": 2, "after": 1})
    empty = source.pick("zero", "zero", "fixed")
    op = torch.ops.dcpc.attention.default
    return Case(op, (*tensors, mask, keep), {"scale": 0.5, "empty": empty, **band})


@strategy("dcpc.attention_of_rows")
def attention_of_rows(source: Source) -> Case:
    samples, length, h, g, d, e = (source.size() for _ in range(6))
    rows = torch.arange(samples * length)[source.size(0, samples * length - 1) :]
    n = len(rows)
    tensors = [source.floats(1, h * g, n, d), source.floats(1, h, n, d), source.floats(1, h, n, e)]
    mask = source.floats(samples, source.pick(1, h * g), source.pick(1, length), length)
    op = torch.ops.dcpc.attention_of_rows.default
    return Case(op, (*tensors, mask, None, rows), {"scale": 0.5})


def window(source: Source, count: int, patch: bool) -> tuple[list[int], list[int], Any, Any]:
    """Kernel, stride, and the padding and dilation that go with them."""
    kernel = [source.size(1, 3) for _ in range(count)]
    if patch:
        return kernel, kernel, [0] * count, [1] * count
    return kernel, [source.size(1, 2)] * count, [source.size(0, 1)] * count, [source.size(1, 2)]


CONVOLUTIONS = ("aten.convolution", "aten._convolution", "aten._convolution_mode")


@strategy("aten.conv1d", "aten.conv2d", "aten.conv3d", *CONVOLUTIONS)
def convolution(source: Source) -> Case:
    any_count = source.op in CONVOLUTIONS
    count = source.size(1, 3) if any_count else int(source.op[-2])
    groups, o, c = source.pick(1, 1, 2), source.size(1, 4), source.size(1, 4)
    kernel, stride, padding, dilation = window(source, count, source.flag())
    space = [k * source.size(2, 4) for k in kernel]
    lead = [source.size(1, 4)] if source.flag() or any_count else []
    x = source.floats(*lead, groups * c, *space)
    w, bias = source.floats(groups * o, c, *kernel), source.maybe(source.floats(groups * o))
    if source.op in CONVOLUTIONS[:2]:
        args = (x, w, bias, stride, padding, dilation, False, [0] * count, groups)
        flags = (False, False, True, True) if source.op == "aten._convolution" else ()
        return Case(source.packet.default, (*args, *flags))
    if source.op == "aten._convolution_mode":
        args = (x, w, bias, stride, "valid", dilation * (count // len(dilation)), groups)
        return Case(source.packet.default, args)
    if source.size() == 1:
        how = source.pick("same", "valid")
        stride = [1] * count if how == "same" else stride
        return Case(source.packet.padding, (x, w, bias, stride, how, dilation, groups))
    return Case(source.packet.default, (x, w, bias, stride, padding, dilation, groups))


@strategy(*(f"aten.conv_transpose{n}d" for n in (1, 2, 3)))
def transposed(source: Source) -> Case:
    count = int(source.op[-2])
    kernel, stride, padding, _ = window(source, count, source.flag())
    o, c = source.size(1, 4), source.size(1, 4)
    x = source.floats(source.size(1, 4), c, *(source.size(3, 4) for _ in kernel))
    w, bias = source.floats(c, o, *kernel), source.maybe(source.floats(o))
    op = getattr(source.packet, source.packet.overloads()[0])
    return Case(op, (x, w, bias, stride, padding))


@strategy(*(f"aten.{kind}_pool{n}d" for kind in ("avg", "max") for n in (1, 2, 3)))
def pooling(source: Source) -> Case:
    count = int(source.op[-2])
    kernel, stride, padding, _ = window(source, count, source.flag())
    padding = [min(p, k // 2) for p, k in zip(padding, kernel, strict=True)]
    space = [k * source.size(1, 3) for k in kernel]
    lead = [source.size(2, 4), *([source.size(1, 4)] if source.flag() else [])]
    given = (kernel,) if source.flag() and "max" in source.op else (kernel, stride, padding)
    return Case(source.packet.default, (source.floats(*lead, *space), *given))


ADAPTIVE = ("aten._adaptive_avg_pool2d", "aten._adaptive_avg_pool3d")


@strategy(*(f"aten.adaptive_avg_pool{n}d" for n in (1, 2, 3)), *ADAPTIVE)
def adaptive(source: Source) -> Case:
    count = int(source.op[-2])
    shape = [*source.shape(2, 2), *(source.size() for _ in range(count))]
    return Case(source.packet.default, (source.floats(*shape), [source.size(1, 3)] * count))


UPSAMPLE = {
    "nearest": (1, 2, 3), "linear": (1,), "bilinear": (2,), "trilinear": (3,), "bicubic": (2,)
}  # fmt: skip


EXACT = tuple(f"aten._upsample_nearest_exact{n}d" for n in (1, 2, 3))
SMOOTHED = ("aten._upsample_bilinear2d_aa", "aten._upsample_bicubic2d_aa")
PLAIN = tuple(f"aten.upsample_{kind}{n}d" for kind, ndims in UPSAMPLE.items() for n in ndims)


@strategy(*PLAIN, *EXACT, *SMOOTHED)
def upsample(source: Source) -> Case:
    count = int(source.op.removesuffix("_aa")[-2])
    x = source.floats(*source.shape(2, 2), *(source.size(1, 4) for _ in range(count)))
    corners = () if "nearest" in source.op else (source.flag(),)
    if source.flag():
        return Case(source.packet.vec, (x, None, *corners, [2.0] * count))
    return Case(source.packet.vec, (x, [source.size(1, 5)] * count, *corners, None))


@strategy("aten.grid_sampler", "aten.grid_sampler_2d", "aten.grid_sampler_3d")
def grid_sampler(source: Source) -> Case:
    given = {"aten.grid_sampler_2d": (2,), "aten.grid_sampler_3d": (3,)}.get(source.op, (2, 3))
    count, n, c = source.pick(*given), source.size(1, 4), source.size(1, 4)
    x = source.floats(n, c, *(source.size(1, 4) for _ in range(count)))
    grid = source.floats(n, *(source.size(1, 4) for _ in range(count)), count)
    return Case(source.packet.default, (x, grid, 0, 0, source.flag()))


@strategy("aten.im2col")
def im2col(source: Source) -> Case:
    x = source.floats(*source.shape(2, 2, 4), source.size(3, 5), source.size(3, 5))
    return Case(aten.im2col.default, (x, [2, 2], [1, 1], [0, 1], [1, 2]))
