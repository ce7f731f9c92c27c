"""Ops that move elements: views, concatenation, padding, indexing."""

import sys
from math import prod

import sympy
import torch

from tests.passes.sharding.rule_cases.source import DTYPES, Source, aten, strategy
from tests.passes.sharding.rule_check import Case

SEQ = sympy.Symbol("seq", integer=True, positive=True)


def regrouped(source: Source) -> tuple[list[int], list[int]]:
    """Two shapes that cut one list of sizes into dims in two ways."""
    sizes = source.shape(1, 5, 4)

    def dims() -> list[int]:
        shape: list[int] = []
        for size in sizes:
            if shape and source.flag():
                shape[-1] *= size
            else:
                shape.append(size)
        return shape

    return dims(), dims()


@strategy("aten.reshape", "aten.view")
def reshape(source: Source) -> Case:
    before, after = regrouped(source)
    if source.size() == 1:
        after = [prod(before)]
    return Case(source.packet.default, (source.tensor(*before, dtypes=DTYPES), after))


@strategy("aten.flatten")
def flatten(source: Source) -> Case:
    shape = source.shape()
    start = source.size(0, len(shape) - 1)
    end = source.size(start, len(shape) - 1)
    return Case(aten.flatten.using_ints, (source.tensor(*shape), start, end))


@strategy("aten.unsqueeze")
def unsqueeze(source: Source) -> Case:
    shape = source.shape()
    return Case(aten.unsqueeze.default, (source.tensor(*shape), source.size(0, len(shape))))


@strategy("aten.unflatten")
def unflatten(source: Source) -> Case:
    shape, parts = source.shape(1, 3), source.shape(1, 3, 3)
    dim = source.dim(shape)
    shape[dim] = prod(parts)
    return Case(aten.unflatten.int, (source.tensor(*shape), dim, parts))


@strategy("aten.squeeze")
def squeeze(source: Source) -> Case:
    shape = source.shape(1, 4, 3)
    x = source.tensor(*shape)
    name = source.pick("dim", "dims", "dim", "default")
    if name == "default":
        return Case(aten.squeeze.default, (x,))
    dim = source.dim(shape)
    return Case(getattr(aten.squeeze, name), (x, [dim] if name == "dims" else dim))


@strategy("aten.expand")
def expand(source: Source) -> Case:
    shape = source.shape()
    asked = [-1 if d and source.size() == 1 else n for d, n in enumerate(shape)]
    before = [1 if n != -1 and source.flag() else m for n, m in zip(asked, shape, strict=True)]
    if source.flag() and asked[0] != -1:
        return Case(aten.expand.default, (source.tensor(*before[1:]), asked))
    return Case(aten.expand.default, (source.tensor(*before), asked))


@strategy("aten.transpose", "aten.swapaxes")
def transpose(source: Source) -> Case:
    shape = source.shape()
    op = aten.transpose.int if source.op == "aten.transpose" else aten.swapaxes.default
    return Case(op, (source.tensor(*shape), source.dim(shape), source.dim(shape)))


@strategy("aten.movedim")
def movedim(source: Source) -> Case:
    shape = source.shape()
    x = source.tensor(*shape)
    if source.flag():
        return Case(aten.movedim.int, (x, source.dim(shape), source.dim(shape)))
    return Case(aten.movedim.intlist, (x, [0], [source.dim(shape)]))


@strategy("aten.permute")
def permute(source: Source) -> Case:
    shape = source.shape(1, 4)
    order = torch.randperm(len(shape), generator=source.generator).tolist()
    return Case(aten.permute.default, (source.tensor(*shape, dtypes=DTYPES), order))


@strategy("aten.t")
def t(source: Source) -> Case:
    return Case(aten.t.default, (source.tensor(*source.shape(1, 2)),))


@strategy("aten.slice")
def slice_(source: Source) -> Case:
    shape = source.shape()
    shape[0] = n = source.size(3, 9)
    x, dim = source.tensor(*shape), source.dim(shape)
    if source.flag():  # a dim of symbolic size, whose ends are cut off
        start = source.size(0, 2)
        end = source.pick(sys.maxsize, -1) if start < 2 else sys.maxsize
        lost = start + (end == -1)
        symbolic = {(0, 0): SEQ, (-1, 0): SEQ - lost}
        return Case(aten.slice.Tensor, (x, 0, start, end), {}, symbolic, {SEQ: n})
    start, end = source.pick(None, 0, 1, -2), source.pick(None, sys.maxsize, 2, 1)
    step = source.pick(1, 1, 2)
    return Case(aten.slice.Tensor, (x, dim, start, end, step))


@strategy("aten.select")
def select(source: Source) -> Case:
    shape = source.shape()
    return Case(aten.select.int, (source.tensor(*shape), source.dim(shape), source.pick(0, -1)))


@strategy("aten.diagonal", "aten.diag_embed")
def diagonal(source: Source) -> Case:
    shape = source.shape(2, 4, 4)
    at = source.pick((0, 1), (-1, 0), (-2, -1))
    return Case(source.packet.default, (source.tensor(*shape), source.pick(0, 1), *at))


@strategy("aten.unfold")
def unfold(source: Source) -> Case:
    shape = source.shape()
    dim = source.dim(shape)
    window = source.size(1, shape[dim])
    return Case(aten.unfold.default, (source.tensor(*shape), dim, window, source.size(1, 3)))


@strategy("aten.view_as_complex")
def view_as_complex(source: Source) -> Case:
    return Case(aten.view_as_complex.default, (source.floats(*source.shape(1, 3), 2),))


@strategy("aten._conj")
def conj(source: Source) -> Case:
    x = torch.view_as_complex(source.floats(*source.shape(1, 3), 2))
    return Case(source.packet.default, (x,))


@strategy("aten.view_as_real")
def view_as_real(source: Source) -> Case:
    x = torch.view_as_complex(source.floats(*source.shape(1, 3), 2))
    return Case(aten.view_as_real.default, (x,))


@strategy("aten.pixel_shuffle", "aten.pixel_unshuffle")
def pixel_shuffle(source: Source) -> Case:
    r, lead = source.size(1, 3), source.shape(0, 2, 4)
    c, h, w = source.size(1, 4), source.size(1, 4), source.size(1, 4)
    shape = [c * r * r, h, w] if source.op == "aten.pixel_shuffle" else [c, h * r, w * r]
    return Case(source.packet.default, (source.tensor(*lead, *shape), r))


@strategy("aten.channel_shuffle", "aten.native_channel_shuffle")
def channel_shuffle(source: Source) -> Case:
    groups = source.size(1, 3)
    shape = [source.size(), groups * source.size(), *source.shape(1, 2)]
    return Case(source.packet.default, (source.floats(*shape), groups))


JOINS = {"hstack": 1, "column_stack": 1, "vstack": 0, "row_stack": 0, "dstack": 2}


@strategy(*(f"aten.{name}" for name in JOINS))
def join(source: Source) -> Case:
    shape = source.shape(3 if source.op == "aten.dstack" else 2, 4)
    dim, parts = JOINS[source.op.removeprefix("aten.")], []
    for _ in range(source.size(1, 3)):
        shape[dim] = source.size()
        parts.append(source.tensor(*shape, dtypes=DTYPES))
    return Case(source.packet.default, (parts,))


@strategy("aten.cat", "aten.stack", "aten.concat", "aten.concatenate")
def cat(source: Source) -> Case:
    shape, count = source.shape(), source.size(1, 3)
    dim = source.dim(shape)
    parts = []
    for _ in range(count):
        part = list(shape)
        part[dim] = part[dim] if source.op == "aten.stack" else source.size()
        parts.append(source.tensor(*part, dtypes=DTYPES))
    return Case(source.packet.default, (parts, dim))


@strategy("aten.repeat", "aten.tile")
def repeat(source: Source) -> Case:
    shape = source.shape(0, 3)
    fewer = source.size(0, len(shape)) if source.op == "aten.tile" else 0
    times = [source.size(1, 3) for _ in range(len(shape) + source.size(0, 1) - fewer)]
    times = times if source.op == "aten.tile" else [1] * (len(shape) - len(times)) + times
    return Case(source.packet.default, (source.tensor(*shape), times))


@strategy("aten.repeat_interleave")
def repeat_interleave(source: Source) -> Case:
    shape = source.shape()
    dim = None if source.size() == 1 else source.dim(shape)
    return Case(aten.repeat_interleave.self_int, (source.tensor(*shape), source.size(1, 3), dim))


@strategy("aten.constant_pad_nd", "aten.pad")
def pad(source: Source) -> Case:
    shape = source.shape()
    shape[-1] += 1
    amounts = [source.size(0, 2) for _ in range(2 * source.size(1, len(shape)))]
    amounts[-1] = source.pick(amounts[-1], -1) if len(amounts) == 2 else amounts[-1]
    x, value = source.floats(*shape), source.pick(0, 1)
    if source.op == "aten.constant_pad_nd":
        return Case(aten.constant_pad_nd.default, (x, amounts, value))
    mode = source.pick("constant", "reflect", "replicate", "circular")
    if mode == "constant":
        return Case(aten.pad.default, (x, amounts, mode, value))
    shape = [*source.shape(2, 2), source.size(3)]
    return Case(aten.pad.default, (source.floats(*shape), [source.size(0, 2), 1], mode))


@strategy("aten._pad_circular", "aten._pad_enum")
def pad_by_number(source: Source) -> Case:
    x = source.floats(*source.shape(2, 2), source.size(3))
    amounts = [source.size(0, 2), 1]
    if source.op == "aten._pad_circular":
        return Case(source.packet.default, (x, amounts))
    return Case(source.packet.default, (x, amounts, source.pick(0, 1, 2, 3)))


@strategy(*(f"aten.{kind}_pad{n}d" for kind in ("reflection", "replication") for n in (1, 2, 3)))
def pad_copies(source: Source) -> Case:
    count = int(source.op[-2])
    shape = [*source.shape(1, 2), *(source.size(3, 5) for _ in range(count))]
    if len(shape) == count + 1:
        shape[0] += 1
    return Case(source.packet.default, (source.floats(*shape), [source.size(0, 2)] * 2 * count))
