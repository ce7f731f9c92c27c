"""Packing at a fixed SP degree: sequences end to end up to a cap, attention inside each alone.

What Ulysses with variable-length attention does, on plain PyTorch: tokens of a pack are split over
the ranks of a group; one all-to-all before attention gives each rank all tokens of some heads, one
after it takes them back. Attention is called document by document, so that it costs the sum of
their squares, and the numbers are those of the samples one by one. Every block is recomputed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dcpc.codegen.collectives.collectives import DimSplit, all_to_all
from dcpc.commands.simulate.packers import best_fit
from dcpc.ops.pieces import piece
from dcpc.runtime.planner.plans import StepPlan
from examples.baselines import Dcpc
from examples.stdlib_source import IGNORE, StdlibSource
from models.gpt import GPT, Attention, Block, rope_tables, rotate


@dataclass(frozen=True, slots=True)
class Pack:
    """Documents end to end.

    Attributes:
        input_ids: int64 `[tokens]`.
        labels: int64 `[tokens]`.
        lengths: tokens of each document.
    """

    input_ids: Tensor
    labels: Tensor
    lengths: tuple[int, ...]

    @property
    def positions(self) -> Tensor:
        """Each token's position in its document."""
        return torch.cat([torch.arange(n) for n in self.lengths])


@dataclass(frozen=True, slots=True)
class Share:
    """A rank's part of a pack.

    Attributes:
        pack: the whole.
        sp: ranks of the group.
        rank: which of them.
        group: name of the process group.
    """

    pack: Pack
    sp: int
    rank: int
    group: str

    @property
    def tokens(self) -> int:
        """Of the whole pack."""
        return sum(self.pack.lengths)

    def mine(self, x: Tensor) -> Tensor:
        """Returns this rank's tokens of `[tokens, ...]`."""
        start, length = piece(self.tokens, self.tokens, 0, self.sp, self.rank)
        return x[start : start + length]


def loss_sum(model: GPT, share: Share) -> Tensor:
    """Returns the sum of the cross-entropies of this rank's tokens, a scalar.

    x is `[tokens of this rank, width]`.
    """
    x = model.embedding(share.mine(share.pack.input_ids))
    longest = x.new_empty(1, max(share.pack.lengths), 1)
    tables = rope_tables(longest, model.config.head_dim, model.config.rope_theta)
    cos, sin = (table[share.mine(share.pack.positions)] for table in tables)
    for block in model.blocks:
        x = checkpoint(_block, block, x, cos, sin, share, use_reentrant=False)
    logits = model.head(model.norm(x))
    labels = share.mine(share.pack.labels)
    return F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum")


def _block(block: Block, x: Tensor, cos: Tensor, sin: Tensor, share: Share) -> Tensor:
    x = x + _attend(block.attention, block.attention_norm(x), cos, sin, share)
    return x + block.ffn(block.ffn_norm(x))


def _attend(layer: Attention, x: Tensor, cos: Tensor, sin: Tensor, share: Share) -> Tensor:
    q, k, v = (
        p(x).unflatten(-1, (-1, layer.head_dim)).transpose(0, 1)
        for p in (layer.q, layer.k, layer.v)
    )
    assert q.shape[0] == k.shape[0], "packing is written for as many key heads as query heads"
    heads = q.shape[0]
    qkv = torch.cat((rotate(q, cos, sin), rotate(k, cos, sin), v), dim=-1)
    _, own_heads = piece(heads, heads, 0, share.sp, share.rank)
    _, own_tokens = piece(share.tokens, share.tokens, 0, share.sp, share.rank)
    qkv = _exchange(qkv, 1, share.tokens, 0, own_heads, share)
    q, k, v = qkv.chunk(3, dim=-1)
    parts = zip(*(x.split(share.pack.lengths, dim=1) for x in (q, k, v)), strict=True)
    out = torch.cat(
        [F.scaled_dot_product_attention(a[None], b[None], c[None], is_causal=True)[0]
         for a, b, c in parts],
        dim=1,
    )  # fmt: skip
    out = _exchange(out, 0, heads, 1, own_tokens, share)
    return layer.out(out.transpose(0, 1).flatten(1))


def _exchange(x: Tensor, gather: int, size: int, scatter: int, length: int, share: Share) -> Tensor:
    """Returns x whole along dim `gather` and this rank's piece of it along dim `scatter`."""
    if share.sp == 1:
        return x
    whole = x.shape[scatter]
    gathered = DimSplit(gather, size, size, 0, False)
    scattered = DimSplit(scatter, length, whole, 0, False)
    return all_to_all(x, *gathered, *scattered, share.group)


class PackedSp:
    """Packs of up to `cap` tokens, each over `sp` ranks; the samples of another system's steps."""

    def __init__(self, model: GPT, dataset: StdlibSource, source: Dcpc, cap: int, sp: int) -> None:
        self.name = f"packing, sp {sp}, full recompute"
        self.model = model
        self.cap, self.sp = cap, sp
        self._dataset, self._source = dataset, source
        self._steps: list[tuple[list[Pack], int]] = []

    def load(self, count: int, skip: int = 0) -> None:
        assert not self._source.steps or self._source.steps[0].index == skip, (
            "load the source first"
        )
        self._steps = [(self._packs(s.plan), s.tokens) for s in self._source.steps[:count]]

    def _packs(self, plan: StepPlan) -> list[Pack]:
        """Returns the packs of this rank's group, every so many of all."""
        ids = sorted({i for mb in plan.micro_batches for i in mb.sample_ids})
        bins = best_fit([self._dataset.dims(i)["seq"] for i in ids], self.cap)
        groups, own = dist.get_world_size() // self.sp, dist.get_rank() // self.sp
        return [self._pack([ids[i] for i in sorted(chosen)]) for chosen in bins[own::groups]]

    def _pack(self, ids: Sequence[int]) -> Pack:
        samples = [self._dataset[i] for i in ids]
        return Pack(
            torch.cat([s["input_ids"] for s in samples]),
            torch.cat([s["labels"] for s in samples]),
            tuple(len(s["labels"]) for s in samples),
        )

    def run(self, index: int) -> float:
        packs, tokens = self._steps[index]
        total = torch.zeros((), dtype=torch.float64)
        for pack in packs:
            share = Share(pack, self.sp, dist.get_rank() % self.sp, f"sp{self.sp}")
            loss = loss_sum(self.model, share) / tokens
            loss.backward()
            total += loss.detach().double()
        _sum_gradients(self.model)
        dist.all_reduce(total)
        return float(total)


def _sum_gradients(model: GPT) -> None:
    """Sums every gradient over all ranks, in one message."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    flat = torch.cat([
        (torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters
    ])  # fmt: skip
    dist.all_reduce(flat)
    for p, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        p.grad = part.view_as(p).clone()
