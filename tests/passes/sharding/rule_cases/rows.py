"""Ops along some dims: norms, softmax, scans, reductions, row losses."""

from typing import Any

import torch

from tests.passes.sharding.rule_cases.source import DTYPES, Source, aten, strategy
from tests.passes.sharding.rule_check import Case

SOFTMAX = ("aten.special_softmax", "aten.special_log_softmax")


@strategy("aten.softmax", "aten.log_softmax", "aten.cumsum", "aten.cumprod", *SOFTMAX)
def with_dtype(source: Source) -> Case:
    shape = source.shape()
    op = getattr(source.packet, source.packet.overloads()[0])
    scans = "cum" in source.op
    x = source.tensor(*shape) if scans else source.floats(*shape)
    dtype = {"dtype": torch.float64} if source.flag() else {}
    if source.op == "aten.special_softmax":
        return Case(op, (x, source.dim(shape), dtype.get("dtype")))
    return Case(op, (x, source.dim(shape)), dtype)


@strategy("dcpc.cumprod")
def products(source: Source) -> Case:
    shape = source.shape()
    return Case(source.packet.default, (source.floats(*shape), source.dim(shape)))


@strategy("dcpc.ctc_loss")
def ctc(source: Source) -> Case:
    t, n, c, s = (source.size() for _ in range(4))
    targets = source.below(c + 1, n, s) + (source.below(2, 1) - 1) * (c + 1)
    steps, counts = 1 + source.below(t, n), source.below(s + 1, n)
    targets = torch.where(torch.arange(s) < counts[:, None], targets.clamp(0, c - 1), targets)
    scores = source.floats(t, n, c).log_softmax(-1)
    blank, zero = source.pick(0, c - 1), source.flag()
    return Case(source.packet.default, (scores, targets, steps, counts, blank, zero))


@strategy("aten._softmax", "aten._log_softmax")
def plain_softmax(source: Source) -> Case:
    shape = source.shape()
    return Case(source.packet.default, (source.floats(*shape), source.dim(shape), False))


@strategy("aten._safe_softmax", "aten.logcumsumexp", "aten.argsort")
def scan(source: Source) -> Case:
    shape = source.shape()
    return Case(source.packet.default, (source.floats(*shape), source.dim(shape)))


@strategy("aten.linalg_cross")
def cross(source: Source) -> Case:
    shape = source.shape(2, 3)
    dim = source.dim(shape)
    shape[dim] = 3
    return Case(aten.linalg_cross.default, tuple(numbers_like(source, shape)), {"dim": dim})


def numbers_like(source: Source, shape: list[int]) -> list[torch.Tensor]:
    return [source.floats(*shape), source.floats(*shape)]


@strategy("aten.isin")
def isin(source: Source) -> Case:
    x = source.tensor(*source.shape(), dtypes=(torch.int64,))
    return Case(aten.isin.Tensor_Tensor, (x, source.below(3, *source.shape(1, 2))))


@strategy("aten.type_as")
def type_as(source: Source) -> Case:
    x = source.tensor(*source.shape(), dtypes=DTYPES)
    return Case(aten.type_as.default, (x, source.tensor(*source.shape(), dtypes=DTYPES)))


@strategy("aten.flip")
def flip(source: Source) -> Case:
    shape = source.shape()
    return Case(aten.flip.default, (source.tensor(*shape), [source.dim(shape)]))


@strategy("aten.roll")
def roll(source: Source) -> Case:
    shape = source.shape()
    x = source.tensor(*shape)
    if source.size() == 1:
        return Case(aten.roll.default, (x, [2]))
    dims = [source.dim(shape)] if source.flag() else list(range(len(shape)))
    return Case(aten.roll.default, (x, [source.size(0, 3) for _ in dims], dims))


@strategy("aten.glu")
def glu(source: Source) -> Case:
    shape = source.shape()
    dim = source.dim(shape)
    shape[dim] *= 2
    return Case(aten.glu.default, (source.floats(*shape), dim))


@strategy("aten.tril", "aten.triu")
def triangle(source: Source) -> Case:
    x = source.tensor(*source.shape(2, 4), dtypes=DTYPES)
    return Case(source.packet.default, (x, source.pick(-1, 0, 1)))


@strategy("aten.layer_norm", "aten.rms_norm")
def norm(source: Source) -> Case:
    shape = source.shape(1, 4)
    kept = shape[source.size(0, len(shape) - 1) :]
    affine = [source.floats(*kept)] if source.flag() else []
    if source.op == "aten.layer_norm" and affine and source.flag():
        affine.append(source.floats(*kept))
    return Case(source.packet.default, (source.floats(*shape), kept, *affine))


@strategy("aten.group_norm")
def group_norm(source: Source) -> Case:
    groups = source.size(1, 3)
    shape = [source.size(), groups * source.size(2, 3), *source.shape(0, 2)]
    affine = [source.floats(shape[1]) for _ in "wb"] if source.flag() else []
    return Case(aten.group_norm.default, (source.floats(*shape), groups, *affine))


@strategy("aten.batch_norm")
def batch_norm(source: Source) -> Case:
    shape = [source.size(2), source.size(), *source.shape(0, 2)]
    affine = [source.floats(shape[1]) if source.flag() else None] * 2
    training = source.flag()
    statistics = [None, None] if training else [source.floats(shape[1]).abs() for _ in "mv"]
    args = (source.floats(*shape), *affine, *statistics, training, 0.1, 1e-5, False)
    return Case(aten.batch_norm.default, args)


@strategy("aten.instance_norm")
def instance_norm(source: Source) -> Case:
    shape = [source.size(), source.size(), source.size(2), *source.shape(0, 1)]
    affine = [source.floats(shape[1]) if source.flag() else None] * 2
    own = source.flag()
    statistics = [None, None] if own else [source.floats(shape[1]).abs() for _ in "mv"]
    args = (source.floats(*shape), *affine, *statistics, own, 0.1, 1e-5, False)
    return Case(aten.instance_norm.default, args)


@strategy("aten.prelu")
def prelu(source: Source) -> Case:
    shape = source.shape(2, 4)
    weight = source.floats(source.pick(1, shape[1]))
    return Case(aten.prelu.default, (source.floats(*shape), weight))


@strategy("aten.one_hot")
def one_hot(source: Source) -> Case:
    return Case(aten.one_hot.default, (source.below(4, *source.shape()), source.pick(4, 5)))


@strategy("aten.bucketize")
def bucketize(source: Source) -> Case:
    borders = source.floats(source.size()).sort().values
    return Case(aten.bucketize.Tensor, (source.floats(*source.shape()), borders))


@strategy("aten.searchsorted")
def searchsorted(source: Source) -> Case:
    borders = source.floats(source.size()).sort().values
    return Case(aten.searchsorted.Tensor, (borders, source.floats(*source.shape())))


@strategy("aten.cosine_similarity")
def cosine_similarity(source: Source) -> Case:
    shape = source.shape(2, 3)
    x, y = source.floats(*shape), source.floats(*source.broadcast(shape))
    return Case(aten.cosine_similarity.default, (x, y, source.dim(shape)))


@strategy("aten.pairwise_distance")
def pairwise_distance(source: Source) -> Case:
    shape = source.shape(1, 3)
    x, y = source.floats(*shape), source.floats(*shape)
    return Case(aten.pairwise_distance.default, (x, y, 2.0, 1e-6, source.flag()))


@strategy("aten.cross_entropy_loss", "aten.nll_loss_nd")
def cross_entropy(source: Source) -> Case:
    rows, classes = source.shape(1, 3), source.size(2)
    shape = [rows[0], classes, *rows[1:]]
    target = source.below(classes, *rows)
    target[source.below(2, *rows).bool()] = -100
    smoothing = (source.pick(0.0, 0.1),) if "cross" in source.op else ()
    weight = source.maybe(source.floats(classes).abs())
    if smoothing and source.flag():  # a probability for each class
        target = source.floats(*shape).softmax(1)
    args = (source.floats(*shape), target, weight, 0, -100, *smoothing)
    return Case(source.packet.default, args)


@strategy("aten.cosine_embedding_loss", "aten.triplet_margin_loss", "aten.multi_margin_loss")
def row_loss(source: Source) -> Case:
    rows, width = source.size(), source.size(2)
    x, y, z = (source.floats(rows, width) for _ in "xyz")
    if source.op == "aten.cosine_embedding_loss":
        return Case(source.packet.default, (x, y, source.below(2, rows) * 2 - 1, 0.1, 0))
    if source.op == "aten.triplet_margin_loss":
        return Case(source.packet.default, (x, y, z, 1.0, 2.0, 1e-6, source.flag(), 0))
    weight = source.maybe(source.floats(width).abs())
    args = (x, source.below(width, rows), source.pick(1, 2), 1.0, weight, 0)
    return Case(aten.multi_margin_loss.default, args)


def dims_of(source: Source, shape: list[int]) -> list[int]:
    count = source.size(1, len(shape))
    return sorted({source.dim(shape) % len(shape) for _ in range(count)})


@strategy("aten.sum", "aten.mean", "aten.nansum", "aten.nanmean")
def add_up(source: Source) -> Case:
    shape = source.shape()
    floats = source.op != "aten.sum"
    x = source.floats(*shape) if floats else source.tensor(*shape, dtypes=DTYPES)
    dtype = {"dtype": torch.float64} if source.flag() else {}
    if source.flag():
        if "nan" in source.op:
            return Case(source.packet.default, (x,), dtype)
        return Case(source.packet.default, (x,), dtype)
    name = {"aten.sum": "dim_IntList", "aten.mean": "dim"}.get(source.op, "default")
    op = getattr(source.packet, name)
    return Case(op, (x, dims_of(source, shape), source.flag()), dtype)


@strategy("aten.count_nonzero")
def count_nonzero(source: Source) -> Case:
    shape = source.shape()
    x = source.below(2, *shape)
    if source.flag():
        return Case(aten.count_nonzero.dim_IntList, (x, dims_of(source, shape)))
    return Case(aten.count_nonzero.default, (x, source.dim(shape)))


LOGSUMEXP = ("aten.logsumexp", "aten.special_logsumexp")


@strategy("aten.amax", "aten.amin", *LOGSUMEXP, "aten.linalg_norm", "aten.var", "aten.std")
def over_dims(source: Source) -> Case:
    shape = source.shape()
    dims: Any = dims_of(source, shape)
    x, keep = source.floats(*shape), source.flag()
    if source.op == "aten.linalg_norm":
        return Case(aten.linalg_norm.default, (x, None, dims[:2], keep))
    if source.op in ("aten.var", "aten.std"):
        if source.flag():
            return Case(source.packet.dim, (x, dims, False, keep))
        return Case(source.packet.correction, (x, dims), {"correction": 0, "keepdim": keep})
    return Case(source.packet.default, (x, dims, keep))


@strategy("aten.norm", "aten.linalg_vector_norm")
def vector_norm(source: Source) -> Case:
    shape = source.shape()
    x, p = source.floats(*shape), source.pick(1, 2, float("inf"))
    if source.op == "aten.norm":
        return Case(aten.norm.ScalarOpt_dim, (x, p, dims_of(source, shape), source.flag()))
    dims = None if source.size() == 1 else dims_of(source, shape)
    return Case(aten.linalg_vector_norm.default, (x, p, dims, source.flag()))


@strategy("aten.all", "aten.any", "aten.prod", "aten.argmax", "aten.argmin")
def over_one_dim(source: Source) -> Case:
    shape = source.shape()
    truth = source.op in ("aten.all", "aten.any")
    x = source.tensor(*shape, dtypes=DTYPES if truth else DTYPES[:2])
    dim, keep = source.dim(shape), source.flag()
    if source.size() == 1:
        return Case(source.packet.default, (x,))
    if truth and source.flag():
        return Case(source.packet.dims, (x, dims_of(source, shape), keep))
    named = {"aten.all": "dim", "aten.any": "dim", "aten.prod": "dim_int"}
    return Case(getattr(source.packet, named.get(source.op, "default")), (x, dim, keep))


@strategy("aten.max", "aten.min")
def extremum(source: Source) -> Case:
    shape = source.shape()
    x = source.tensor(*shape)
    if source.size() == 1:
        return Case(source.packet.default, (x,))
    if source.flag():
        return Case(source.packet.dim, (x, source.dim(shape), source.flag()))
    return Case(source.packet.other, (x, source.tensor(*source.broadcast(shape))))
