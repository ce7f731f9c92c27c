"""Drawn attentions, run as a ring on every rank and densely on one: shared by the ring's tests."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dcpc.codegen.collectives.collectives import bind_group, wire_log
from dcpc.codegen.collectives.ring import RingCall
from dcpc.codegen.collectives.ring_swap import SwapCall
from dcpc.ops.attention import Sight
from dcpc.ops.ring_route import RowSplit, route, sent_bytes

ops = torch.ops.dcpc
GROUP = "ring under test"
SCALE = 0.4


@dataclass(frozen=True)
class Case:
    """One attention and how it is split."""

    lengths: tuple[int, int]  # of queries, of keys
    heads: tuple[int, int]
    widths: tuple[int, int] = (4, 4)
    batch: int = 2
    before: int | None = None
    after: int | None = None
    keep: bool = False
    mask: str = ""  # "bool", "numbers", "drowned", "row of keys"
    segment: str = ""  # "sorted", "repeated", "ones"
    empty: str = "zero"
    zigzag: tuple[bool, bool] = (False, False)
    shift: int = 0  # of both splits in their parents
    across: int = 1
    dtype: torch.dtype = torch.float64
    seed: int = 0

    def splits(self) -> tuple[RowSplit, RowSplit]:
        q, k = (
            RowSplit(n, n + self.shift, self.shift, z)
            for n, z in zip(self.lengths, self.zigzag, strict=True)
        )
        return q, k


@dataclass
class Whole:
    """All operands, whole."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    keep: Tensor | None
    segment: Tensor | None
    grad: Tensor


def drawn(world: int, count: int, seed: int = 0) -> list[Case]:
    """Cases of all kinds: lengths below the number of ranks and not multiples of it among them."""
    source = random.Random(1000 * world + seed)
    found = []
    for i in range(count):
        length = source.choice([1, 2, world - 1, world + 1, source.randint(1, 300), 96, 300])
        across = source.choice([a for a in (1, 1, 2, 4) if world % a == 0])
        heads = source.choice([(8, 1), (8, 2), (4, 4), (1, 1), (3, 3), (2, 1)])
        if heads[0] % across or heads[1] % across:
            heads = (8, 4)
        cross = source.random() < 0.25
        band = source.choice([(None, None), (None, 0), (None, 0), (length // 3, 0), (5, 4)])
        hiding = source.choice(["", "", "keep", "bool", "numbers", "drowned", "row of keys"])
        segment = "" if cross else source.choice(["", "", "sorted", "repeated", "ones"])
        hides = hiding in ("keep", "bool", "row of keys")
        keys = source.randint(1, 200) if cross else length
        found.append(
            Case(
                (length, keys), heads, (4, 4) if source.random() < 0.8 else (4, 3), 1 + i % 2,
                *((None, None) if cross else band), hiding == "keep",
                "" if hiding == "keep" else hiding, segment,
                source.choice(["zero", "zero", "mean", "fixed"]) if hides else "zero",
                (source.random() < 0.5, source.random() < 0.5),
                source.choice([0, 0, 1]), across, seed=i,
            )
        )  # fmt: skip
    return found


def whole(case: Case) -> Whole:
    generator = torch.Generator().manual_seed(case.seed)

    def floats(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(case.dtype)

    b, (h, g), (s, t), (d, e) = case.batch, case.heads, case.lengths, case.widths
    tensors = [floats(b, h, s, d), floats(b, g, t, d), floats(b, g, t, e)]
    keep = mask = segment = None
    if case.keep:
        keep = torch.rand((b, t), generator=generator) > 0.4
        keep[0, : t // 2] = False
    if case.mask == "bool":
        mask = torch.rand((b, h, s, t), generator=generator) > 0.5
        mask[:, :, s // 2] = False
    elif case.mask == "row of keys":
        mask = torch.rand((1, 1, 1, t), generator=generator) > 0.5
    elif case.mask:
        mask = floats(1, h, s, t)
        if case.mask == "drowned":
            mask[:, :, s // 2] = torch.finfo(case.dtype).min
    if case.segment == "sorted":
        segment = torch.randint(0, 4, (b, t), generator=generator).sort(1)[0]
    elif case.segment == "repeated":
        runs = torch.randint(-2, 3, (b, t // 7 + 1), generator=generator)
        segment = runs.repeat_interleave(7, 1)[:, :t]
    elif case.segment == "ones":
        segment = torch.arange(t).flip(0)[None]
    return Whole(*tensors, mask, keep, segment, floats(b, h, s, e))


def near(case: Case) -> Tensor:
    """Which keys positions let a query see, `[s, t]`."""
    at, keys = torch.arange(case.lengths[0])[:, None], torch.arange(case.lengths[1])
    seen = torch.ones((len(at), len(keys)), dtype=torch.bool)
    if case.before is not None:
        seen &= keys >= at - case.before
    if case.after is not None:
        seen &= keys <= at + case.after
    return seen


def dense(case: Case, x: Whole) -> Tensor:
    """Attention as its formula."""
    k, v = (y.repeat_interleave(case.heads[0] // case.heads[1], 1) for y in (x.k, x.v))
    scores = x.q @ k.transpose(-1, -2) * SCALE
    seen = near(case).expand(scores.shape)
    if x.keep is not None:
        seen = seen & x.keep[:, None, None]
    if x.segment is not None:
        seen = seen & (x.segment[:, :, None] == x.segment[:, None])[:, None]
    if x.mask is not None:
        seen = seen & x.mask if x.mask.dtype == torch.bool else seen
        scores = scores if x.mask.dtype == torch.bool else scores + x.mask
    weights = scores.masked_fill(~seen, float("-inf"))
    none = ~seen.any(-1, keepdim=True)
    if case.empty == "mean":  # as if the scores had been drowned by the lowest number
        weights = torch.where(none, scores - scores.detach(), weights)
    elif case.empty == "fixed":
        weights = weights.masked_fill(none, 0.0)
    weights = weights.softmax(-1)
    return (weights.masked_fill(none, 0.0) if case.empty == "zero" else weights) @ v


def positions(split: RowSplit, world: int, across: int, rank: int) -> Tensor:
    """Which positions a rank has, or those that stand with it."""
    runs = split.runs(world, across, rank // across)
    return torch.cat([torch.arange(0), *(torch.arange(r[2], r[2] + r[1]) for r in runs)])


def ring(case: Case, x: Whole, tensors: list[Tensor], world: int, rank: int) -> Tensor:
    """This rank's output, of its rows of q, k, v: through the ring, with `swap` where hybrid."""
    queries, keys = case.splits()
    a = case.across
    mask = x.mask
    if mask is not None and mask.shape[2] > 1:
        mask = mask[:, :, positions(queries, world, a, rank)]
    if a > 1:
        if mask is not None and mask.shape[1] > 1:
            mask = mask.chunk(a, 1)[rank % a]
        made = []
        for y, rows in zip(tensors, (queries, keys, keys), strict=True):
            length = len(positions(rows, world, a, rank))
            made.append(ops.swap(y, *SwapCall.of(True, rows, length, y.shape[1], a, GROUP)))
        tensors = made
    sight = Sight(SCALE, case.before, case.after, empty=case.empty)
    how = RingCall.of(sight, queries, keys, a, GROUP)
    out = ops.ring_attention(*tensors, mask, x.keep, x.segment, **how._asdict())
    if a == 1:
        return out
    rows = len(positions(queries, world, 1, rank))
    return ops.swap(out, *SwapCall.of(False, queries, rows, case.heads[0], a, GROUP))


def error(found: Tensor, want: Tensor, largest: float) -> float:
    """Largest difference, relative to the largest value of the whole."""
    if found.shape != want.shape:
        return float("inf")
    if not found.numel():
        return 0.0
    worst = float((found - want).abs().max()) / max(largest, 1e-3)
    return worst if worst == worst else float("inf")


def check(case: Case, world: int, rank: int) -> dict[str, float]:
    """Relative errors of one rank's output and gradients, and bytes off the formula."""
    x = whole(case)
    leaves = [t.requires_grad_() for t in (x.q, x.k, x.v)]
    want = dense(case, x)
    wanted = torch.autograd.grad(want, leaves, x.grad)
    queries, keys = case.splits()
    mine = [positions(s, world, 1, rank) for s in (queries, keys, keys)]
    local = [t.detach()[:, :, at].requires_grad_() for t, at in zip(leaves, mine, strict=True)]
    wire_log.clear()
    out = ring(case, x, local, world, rank)
    forward = wire_log.sent_bytes.get("ring", 0)
    found = torch.autograd.grad(out, local, x.grad[:, :, mine[0]])
    backward = wire_log.sent_bytes.get("ring", 0) - forward
    pairs = {"out": (out.detach(), want.detach(), mine[0])}
    for name, a, b, at in zip("qkv", found, wanted, mine, strict=True):
        pairs[name] = a, b, at
    errors = {
        name: error(a, b[:, :, at], float(b.abs().max())) for name, (a, b, at) in pairs.items()
    }
    hides = case.keep or bool(case.mask) or not bool(near(case).any(-1).all())
    everywhere = case.empty in ("mean", "fixed") and hides
    way = route(queries, keys, world, case.across, case.before, case.after, everywhere)
    row = case.batch * case.heads[1] // case.across * sum(case.widths) * x.q.element_size()
    sent = sent_bytes(way, rank, row, row)
    errors["bytes"] = float(abs(sent[0] - forward) + abs(sent[1] - backward))
    return errors


def worst(
    rank: int, group: dist.ProcessGroup, cases: list[Case]
) -> list[tuple[Case, dict[str, float]]]:
    """Every case that is off, with its errors, on one rank of a group."""
    bind_group(GROUP, group)
    results: list[Any] = [(case, check(case, group.size(), rank)) for case in cases]
    return [(case, e) for case, e in results if not max(e.values()) < 1e-10]
