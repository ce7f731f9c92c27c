"""Collectives as PyTorch ops with autograd, for pieces whose lengths may differ.

Each op's backward is its linear transpose: all-gather <-> reduce-scatter, all-to-all <-> all-to-all
with the dims swapped, narrow <-> widen, all-reduce <-> all-reduce. A piece is described by its
size, parent, shift and whether it is zigzag: see `pieces.py`. A whole dim is always in order.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dcpc.errors import CodegenError
from dcpc.fx.torch_api.torch_collectives import all_gather_single
from dcpc.ops.arguments import arguments
from dcpc.ops.pieces import Run, runs


@dataclass(slots=True)
class WireLog:
    """Counts, by collective, the bytes that this rank sends to other ranks, and the calls."""

    sent_bytes: dict[str, int] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, sent_bytes: int) -> None:
        """Adds one call of a collective."""
        self.sent_bytes[name] = self.sent_bytes.get(name, 0) + sent_bytes
        self.calls[name] = self.calls.get(name, 0) + 1

    def total_bytes(self) -> int:
        """Returns the bytes sent since the last `clear`."""
        return sum(self.sent_bytes.values())

    def clear(self) -> None:
        """Resets all counts to zero."""
        self.sent_bytes.clear()
        self.calls.clear()


wire_log = WireLog()
_groups: dict[str, dist.ProcessGroup] = {}


def bind_group(name: str, group: dist.ProcessGroup) -> None:
    """Registers a process group under the name by which compiled graphs call it."""
    _groups[name] = group


def group_named(name: str) -> dist.ProcessGroup:
    """Returns the process group that compiled graphs call by this name."""
    group = _groups.get(name)
    if group is None:
        raise CodegenError(
            f"a variant uses process group '{name}', which this process has not made; expected "
            f"one of {', '.join(_groups) or 'none'}; call it through the compiled model "
            "on every rank"
        )
    return group


class DimSplit(NamedTuple):
    """The split of a dim over the ranks, as the arguments of a collective, in this order.

    Attributes:
        dim: index of the dim.
        size: its length in the result: the whole length after a gather, the length of this rank's
            piece after a scatter.
        parent: length that is split evenly, see `pieces.py`.
        shift: position of the dim's first element in the parent.
        zigzag: whether a rank has two chunks, one from either end.
    """

    dim: int
    size: int
    parent: int
    shift: int
    zigzag: bool

    def runs(self, whole: int, p: int) -> list[tuple[Run, ...]]:
        """Returns each rank's runs of a dim of length `whole`, for p ranks."""
        return [runs(whole, self.parent, self.shift, p, r, self.zigzag) for r in range(p)]


def _lengths(every: Sequence[tuple[Run, ...]]) -> list[int]:
    return [sum(length for _, length in mine) for mine in every]


def _pack(pieces: Sequence[Tensor], like: Tensor) -> Tensor:
    """Returns all pieces flattened in one new tensor, with one copy whatever their strides."""
    packed = like.new_empty(sum(x.numel() for x in pieces))
    for part, x in zip(packed.split([x.numel() for x in pieces]), pieces, strict=True):
        part.view(x.shape).copy_(x)
    return packed


def scattered(x: Tensor, split: DimSplit, p: int) -> tuple[Tensor, ...]:
    """Returns each rank's piece of a whole dim: views of x, or copies if zigzag."""
    dim, every = split.dim, split.runs(x.shape[split.dim], p)
    if not split.zigzag:
        return tuple(torch.split(x, _lengths(every), dim))
    return tuple(torch.cat([x.narrow(dim, *run) for run in mine], dim) for mine in every)


def gathered(parts: Sequence[Tensor], split: DimSplit) -> Tensor:
    """Returns the whole dim, in order, from all ranks' pieces."""
    dim = split.dim
    if not split.zigzag:
        return joined(parts, dim)
    placed: list[tuple[Run, Tensor]] = []
    for mine, part in zip(split.runs(split.size, len(parts)), parts, strict=True):
        placed += zip(mine, part.split([length for _, length in mine], dim), strict=True)
    placed.sort(key=lambda item: item[0])
    return joined([part for _, part in placed], dim)


def joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Returns parts one after the other along a dim, laid out as a new tensor.

    Without `out`, `torch.cat` keeps the layout of channels-last parts; the ops' fakes do not.
    """
    out = parts[0].new_empty(_with_dim(parts[0], dim, sum(x.shape[dim] for x in parts)))
    torch.cat(list(parts), dim, out=out)
    return out


def exchange(
    sends: Sequence[Tensor], receive_numels: list[int], like: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, ...]:
    """Sends one piece to each rank, and returns the flat pieces received from each rank."""
    packed = _pack(sends, like)
    received = like.new_empty(sum(receive_numels))
    send_numels = [s.numel() for s in sends]
    dist.all_to_all_single(
        on_wire(received), on_wire(packed), receive_numels, send_numels, group=group
    )
    parts: tuple[Tensor, ...] = received.split(receive_numels)
    return parts


def on_wire(x: Tensor) -> Tensor:
    """Returns a dense tensor as the backend takes it: booleans as bytes, CPU memory without owner.

    Gloo's threads release the tensors that they sent some time after the collective has returned,
    which would free a layer's activations late. So on the CPU they get a tensor that does not own
    the memory. All collectives here wait until they are done, and their caller holds `x` meanwhile.
    """
    x = x.view(torch.uint8) if x.dtype == torch.bool else x
    if x.device.type != "cpu" or x.numel() == 0:
        return x
    memory = (ctypes.c_char * x.nbytes).from_address(x.data_ptr())
    return torch.frombuffer(memory, dtype=x.dtype).view(x.shape)


def _log(name: str, sends: Sequence[Tensor], rank: int) -> None:
    count = sum(s.numel() * s.element_size() for r, s in enumerate(sends) if r != rank)
    wire_log.add(name, count)


def _with_dim(x: Tensor, dim: int, length: int) -> list[int]:
    shape = list(x.shape)
    shape[dim] = length
    return shape


# ------------------------------------------------------------------------------ narrow and widen


@torch.library.custom_op("dcpc::narrow", mutates_args=())
def narrow(x: Tensor, dim: int, start: int, length: int) -> Tensor:
    """Returns a copy of x[..., start : start + length, ...]."""
    return x.narrow(dim, start, length).clone(memory_format=torch.contiguous_format)


@torch.library.custom_op("dcpc::widen", mutates_args=())
def widen(x: Tensor, dim: int, start: int, size: int) -> Tensor:
    """Returns zeros of length `size` along dim, with x at `start`."""
    out = x.new_zeros(_with_dim(x, dim, size))
    out.narrow(dim, start, x.shape[dim]).copy_(x)
    return out


def _narrow_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ctx.dim, ctx.start, _ = inputs
    ctx.size = x.shape[ctx.dim]


def _narrow_backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
    return torch.ops.dcpc.widen(g, ctx.dim, ctx.start, ctx.size), None, None, None


narrow.register_autograd(_narrow_backward, setup_context=_narrow_context)


@torch.library.custom_op("dcpc::pick", mutates_args=())
def pick(x: Tensor, dim: int, first: int, turn: int, second: int, length: int) -> Tensor:
    """Returns a zigzag piece of `length`: `turn` elements from `first`, the rest from `second`."""
    runs = (x.narrow(dim, first, turn), x.narrow(dim, second, length - turn))
    return joined(runs, dim)


@torch.library.custom_op("dcpc::spread", mutates_args=())
def spread(x: Tensor, dim: int, first: int, turn: int, second: int, size: int) -> Tensor:
    """Returns zeros of length `size` along dim, with the two runs of a zigzag piece in place."""
    out = x.new_zeros(_with_dim(x, dim, size))
    rest = x.shape[dim] - turn
    out.narrow(dim, first, turn).copy_(x.narrow(dim, 0, turn))
    out.narrow(dim, second, rest).copy_(x.narrow(dim, turn, rest))
    return out


def _pick_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ctx.dim, ctx.first, ctx.turn, ctx.second, _ = inputs
    ctx.size = x.shape[ctx.dim]


def _pick_backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
    where = (ctx.dim, ctx.first, ctx.turn, ctx.second)
    return torch.ops.dcpc.spread(g, *where, ctx.size), *(None,) * 5


pick.register_autograd(_pick_backward, setup_context=_pick_context)
for _op in (narrow, widen, pick, spread):  # their last argument is the length of the result's dim
    _op.register_fake(lambda x, dim, *places: x.new_empty(_with_dim(x, dim, places[-1])))


# -------------------------------------------------- all-gather, reduce-scatter, all-to-all

_GATHERED = arguments(DimSplit)
_SCATTERED = _GATHERED.replace("size", "length")


def _unpacked(packed: Sequence[Any]) -> tuple[list[DimSplit], str]:
    """Returns the dims of a collective's arguments, the gathered one first, and its group."""
    *numbers, group = packed
    n = len(DimSplit._fields)
    return [DimSplit(*numbers[i : i + n]) for i in range(0, len(numbers), n)], group


def _empty(x: Tensor, *packed: Any) -> Tensor:
    """Returns an empty tensor of the result's shape."""
    shape = list(x.shape)
    for split in _unpacked(packed)[0]:
        shape[split.dim] = split.size
    return x.new_empty(shape)


@torch.library.custom_op(
    "dcpc::all_gather", mutates_args=(), schema=f"(Tensor x, {_GATHERED}, str group) -> Tensor"
)
def all_gather(x: Tensor, *packed: Any) -> Tensor:
    """Returns the whole dim from all ranks' pieces."""
    (split,), group = _unpacked(packed)
    pg = group_named(group)
    p, rank = pg.size(), pg.rank()
    lengths = _lengths(split.runs(split.size, p))
    wire_log.add("all_gather", (p - 1) * x.numel() * x.element_size())
    # Every rank sends as much as the longest piece: gathering equal parts is what all backends do
    # well, and pieces differ by one element of the dim.
    # This rank's piece is written where it will be in the result, so that no second copy is alive.
    every = x.new_empty((p, *_with_dim(x, split.dim, max(lengths))))
    mine = every[rank]
    mine.narrow(split.dim, 0, lengths[rank]).copy_(x)
    all_gather_single(on_wire(every.view(-1)), on_wire(mine.view(-1)), group=pg)
    parts = [every[r].narrow(split.dim, 0, n) for r, n in enumerate(lengths)]
    return gathered(parts, split)


@torch.library.custom_op(
    "dcpc::reduce_scatter", mutates_args=(), schema=f"(Tensor x, {_SCATTERED}, str group) -> Tensor"
)
def reduce_scatter(x: Tensor, *packed: Any) -> Tensor:
    """Returns this rank's piece of the sum of x over all ranks."""
    (split,), group = _unpacked(packed)
    pg = group_named(group)
    p, rank = pg.size(), pg.rank()
    sends = scattered(x, split, p)
    _log("reduce_scatter", sends, rank)
    received = exchange(sends, [sends[rank].numel()] * p, x, pg)
    out = received[0].clone()
    for piece_of_rank in received[1:]:
        out += piece_of_rank
    return out.view(sends[rank].shape)


@torch.library.custom_op(
    "dcpc::all_to_all",
    mutates_args=(),
    schema=f"(Tensor x, {arguments(DimSplit, 'gather_')}, "
    f"{arguments(DimSplit, 'scatter_').replace('size', 'length')}, str group) -> Tensor",
)
def all_to_all(x: Tensor, *packed: Any) -> Tensor:
    """Returns x whole along the gathered dim, and this rank's piece along the scattered dim.

    Args:
        x: this rank's piece along the gathered dim, whole along the scattered one.
        packed: fields of a `DimSplit` for each of the two dims, and the name of the process group.
    """
    (gather, scatter), group = _unpacked(packed)
    pg = group_named(group)
    p, rank = pg.size(), pg.rank()
    sends = scattered(x, scatter, p)
    _log("all_to_all", sends, rank)
    lengths = _lengths(gather.runs(gather.size, p))
    shapes = [_with_dim(sends[rank], gather.dim, length) for length in lengths]
    received = exchange(sends, [math.prod(s) for s in shapes], x, pg)
    parts = [r.view(s) for r, s in zip(received, shapes, strict=True)]
    return gathered(parts, gather)


def _context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Saves the arguments of the transpose, in which gathered dims are scattered and vice versa."""
    x, *packed = inputs
    splits, group = _unpacked(packed)
    back = [split._replace(size=x.shape[split.dim]) for split in splits]
    ctx.back = (*(field for split in reversed(back) for field in split), group)


def transposed(name: str) -> Callable[[Any, Tensor], tuple[Any, ...]]:
    """Returns the backward of an op: its transpose of this name, by the arguments in `ctx.back`."""

    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        return getattr(torch.ops.dcpc, name)(g, *ctx.back), *(None,) * len(ctx.back)

    return backward


for _op, _transpose in (
    (all_gather, "reduce_scatter"), (reduce_scatter, "all_gather"), (all_to_all, "all_to_all"),
):  # fmt: skip
    _op.register_fake(_empty)
    _op.register_autograd(transposed(_transpose), setup_context=_context)


# ------------------------------------------------------------------------------------ all-reduce


@torch.library.custom_op("dcpc::all_reduce", mutates_args=())
def all_reduce(x: Tensor, group: str) -> Tensor:
    """Returns the sum of all ranks' x."""
    pg = group_named(group)
    out = x.clone(memory_format=torch.contiguous_format)
    p = pg.size()
    wire_log.add("all_reduce", 2 * out.numel() * out.element_size() * (p - 1) // p)
    dist.all_reduce(on_wire(out), group=pg)
    return out


@all_reduce.register_fake
def _(x: Tensor, group: str) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _reduce_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.group = inputs[1]


def _reduce_backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
    return torch.ops.dcpc.all_reduce(g, ctx.group), None


all_reduce.register_autograd(_reduce_backward, setup_context=_reduce_context)
