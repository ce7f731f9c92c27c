"""Ring Self-Attention as its paper has it, for tests: all scores of a rank's queries, then softmax.

Keys go round once for the scores `[b, h, s, n]`, which are held whole, values once for the output.
Memory grows with S**2 / p. Differentiated by autograd, through a shift whose transpose is the shift
back.

Source: Li et al., "Sequence Parallelism: Long Sequence Training from System Perspective", 3.2.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Shift(torch.autograd.Function):
    """Passes a tensor to a rank at some distance; `rows` is the length of what comes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: int, distance: int, group: dist.ProcessGroup) -> Tensor:
        ctx.rest = x.shape[2], -distance, group
        return _shifted(x, rows, distance, group)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        return _shifted(g, *ctx.rest), None, None, None


def _shifted(x: Tensor, rows: int, distance: int, group: dist.ProcessGroup) -> Tensor:
    p, rank = group.size(), group.rank()
    out = x.new_empty((*x.shape[:2], rows, x.shape[3]))
    works = []
    if out.numel():
        works.append(dist.irecv(out, group=group, group_src=(rank - distance) % p))
    if x.numel():
        x = x.contiguous()
        works.append(dist.isend(x, group=group, group_dst=(rank + distance) % p))
    for work in works:
        assert work is not None
        work.wait()
    return out


def attention(
    q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, scale: float, rows: list[int], group: Any
) -> Tensor:
    """Returns this rank's output.

    Args:
        q: its queries `[b, h, s, d]`.
        k: its keys `[b, h, t, d]`.
        v: its values `[b, h, t, e]`.
        hidden: which of all keys its queries do not see, `[s, n]`.
        scale: of the products.
        rows: how many keys each rank has, in order.
        group: the process group.
    """
    p, rank = group.size(), group.rank()
    order = [(rank - step) % p for step in range(p)]
    blocks: dict[int, Tensor] = {}
    for step, owner in enumerate(order):
        k = Shift.apply(k, rows[owner], 1, group) if step else k
        blocks[owner] = q @ k.transpose(-1, -2)
    scores = torch.cat([blocks[owner] for owner in range(p)], -1) * scale
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1).split(rows, -1)
    out = torch.zeros_like(q @ v.new_zeros((q.shape[3], v.shape[3])))
    for step, owner in enumerate(order):
        v = Shift.apply(v, rows[owner], 1, group) if step else v
        out = out + weights[owner] @ v
    return out
