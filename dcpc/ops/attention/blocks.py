"""Attention by matmuls over runs of queries, for cases that no fused kernel of the device covers.

One sample and ROWS queries at a time are computed, against the keys that these can see: a window
costs only its keys, and no more than ROWS rows of scores exist at once, forward and backward.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from dcpc.ops.attention.rectangles import Ids
from dcpc.ops.attention.spec import Attended, Sight, accumulated, empty_gradient, empty_outputs

ROWS = 128  # queries at a time
LOG2_E = math.log2(math.e)


class _QueryRun:
    """A run of queries of one sample, and the keys that they can see, for all heads."""

    def __init__(
        self,
        tensors: tuple[Tensor, Tensor, Tensor],
        mask: Tensor | None,
        keep: Tensor | None,
        sight: Sight,
        ids: Ids | None,
        at: tuple[int, int, int],
    ) -> None:
        q, k, v = tensors
        self.sample, self.first, self.rows = at
        self.samples = q.shape[0]
        self.groups = q.shape[1] // k.shape[1]
        self.sight, self.ids = sight, ids
        self.keys = sight.keys(self.first, self.rows, k.shape[2])
        if ids is not None:
            self.keys = ids.within(self.keys, at)
        self.dtype = accumulated(q.dtype)
        self.q = self.grouped(q)
        self.k = k[self.sample, :, slice(*self.keys)].to(self.dtype)
        self.v = v[self.sample, :, slice(*self.keys)].to(self.dtype)
        self.mask, self.keep = mask, keep

    def grouped(self, x: Tensor) -> Tensor:
        """Returns this block's rows of x `[b, h, s, d]` as `[key heads, group * rows, d]`."""
        mine = x[self.sample, :, self.first : self.first + self.rows].to(self.dtype)
        if self.groups == 1:
            return mine
        return mine.reshape(-1, self.groups * self.rows, x.shape[-1])

    def heads(self, x: Tensor) -> Tensor:
        """Returns `[key heads, group * rows, n]` as `[heads, rows, n]`."""
        heads = x.shape[0] * x.shape[1] // self.rows
        return x.view(heads, self.rows, x.shape[-1]) if self.groups > 1 else x

    def flat(self, x: Tensor) -> Tensor:
        """Returns `[heads, rows, n]` as `[key heads, group * rows, n]`."""
        return x.view(self.k.shape[0], self.groups * self.rows, x.shape[-1])

    def scores(self) -> Tensor:
        """Returns the scores `[heads, rows, keys]`, -inf where a key is hidden."""
        scores = self.heads(torch.bmm(self.q, self.k.transpose(1, 2)).mul_(self.sight.scale))
        if self.mask is not None:
            mask = self.part(self.mask)
            if mask.dtype == torch.bool:
                scores.masked_fill_(mask.logical_not(), float("-inf"))
            else:
                scores.add_(mask)
        if self.keep is not None:
            keep = self.keep[self.sample if self.keep.shape[0] > 1 else 0, slice(*self.keys)]
            scores.masked_fill_(keep.logical_not(), float("-inf"))
        if self.sight.banded:
            hidden = self.sight.hidden(self.first, self.rows, self.keys, scores.device)
            scores.masked_fill_(hidden, float("-inf"))
        if self.ids is not None:
            hidden = self.ids.hidden(self.keys, (self.sample, self.first, self.rows))
            scores.masked_fill_(hidden, float("-inf"))
        return scores

    def part(self, mask: Tensor) -> Tensor:
        """Returns this block's part of a mask `[m, h, s, t]`, broadcast dims as they are."""
        rows = slice(self.first, self.first + self.rows) if mask.shape[2] > 1 else slice(None)
        keys = slice(*self.keys) if mask.shape[3] > 1 else slice(None)
        return mask[self.sample * mask.shape[0] // self.samples, :, rows, keys]


def _blocks(
    tensors: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None,
    keep: Tensor | None,
    sight: Sight,
    ids: Ids | None,
) -> Iterator[_QueryRun]:
    for at in _places(tensors[0], sight):
        yield _QueryRun(tensors, mask, keep, sight, ids, at)


def _places(q: Tensor, sight: Sight) -> Iterator[tuple[int, int, int]]:
    """Yields each block's sample, first query and number of queries."""
    for sample in range(q.shape[0]):
        for run in sight.runs(q.shape[2]):
            stop = run.at + run.length
            for first in range(run.at, stop, ROWS):
                yield sample, first, min(ROWS, stop - first)


def widest(q: Tensor, keys: int, sight: Sight, ids: Ids) -> int:
    """Returns the largest number of keys of a block, for packed sequences."""
    found = [ids.within(sight.keys(*at[1:], keys), at) for at in _places(q, sight)]
    return max((high - low for low, high in found), default=0)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    keep: Tensor | None,
    sight: Sight,
    ids: Ids | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns out `[b, h, s, e]` and logsumexp `[b, h, s]`."""
    out, lse = empty_outputs(q, v)
    for block in _blocks((q, k, v), mask, keep, sight, ids):
        _forward(block, v, out, (lse,))
    return out, lse


def statistics(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    keep: Tensor | None,
    sight: Sight,
    ids: Ids | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns out, each row's largest score, and the logarithm of its sum of exp(score - largest).

    Rows that see no key have 0, -inf and 0. There are two numbers, as their sum would lose the
    smaller one where a mask adds the lowest number of the dtype.
    """
    out, largest = empty_outputs(q, v)
    total = torch.empty_like(largest)
    for block in _blocks((q, k, v), mask, keep, sight, ids):
        _forward(block, v, out, (largest, total))
    return out, largest, total


def _forward(block: _QueryRun, v: Tensor, out: Tensor, into: tuple[Tensor, ...]) -> None:
    mine = block.sample, slice(None), slice(block.first, block.first + block.rows)
    weights = block.scores()
    if weights.shape[-1]:
        largest = weights.amax(-1, keepdim=True)
    else:
        largest = weights.new_full((*weights.shape[:-1], 1), float("-inf"))
    none = largest == float("-inf")
    _exp(weights.sub_(largest.masked_fill_(none, 0.0)))
    total = weights.sum(-1, keepdim=True)
    if block.sight.empty != "nan":
        total.masked_fill_(none, 1.0)
    found = block.heads(torch.bmm(block.flat(weights), block.v))
    found.div_(total)
    if block.sight.empty in ("mean", "fixed") and none.any():
        mean = v[block.sample].to(block.dtype).mean(1, keepdim=True)
        mean = mean.repeat_interleave(block.groups, 0)
        found = torch.where(none, mean, found)
    out[mine].copy_(found)
    total = total.log_()
    if len(into) > 1:
        into[0][mine].copy_(largest.masked_fill_(none, float("-inf")).squeeze(-1))
        into[1][mine].copy_(total.squeeze(-1))
        return
    total.add_(largest)
    into[0][mine].copy_(total.masked_fill_(none, _lse_of_none(block.sight)).squeeze(-1))


def _lse_of_none(sight: Sight) -> float:
    return float("nan") if sight.empty == "nan" else 0.0


def backward(
    given: Attended,
    mask: Tensor | None,
    keep: Tensor | None,
    sight: Sight,
    ids: Ids | None = None,
    mask_gradient: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Returns the gradients of q, k, v, laid out (b, s, h, d), and of the mask if requested."""
    grad, q, k, v, out, lse = given
    dq, dk, dv = map(empty_gradient, (q, k, v))
    wide = q.dtype != accumulated(q.dtype)
    sum_k, sum_v = (x.to(accumulated(q.dtype)).zero_() for x in (dk, dv))
    dmask = None
    if mask_gradient and mask is not None:  # contiguous, as the op's fake value
        dmask = mask.new_zeros(mask.shape, dtype=accumulated(q.dtype))
    for block in _blocks((q, k, v), mask, keep, sight, ids):
        _backward(block, (grad, out, lse), (k, v), (dq, sum_k, sum_v), dmask)
    if wide:
        dk.copy_(sum_k)
        dv.copy_(sum_v)
    if dmask is not None and mask is not None:
        dmask = dmask.to(mask.dtype)
    return dq, dk, dv, dmask


def _backward(
    block: _QueryRun,
    given: tuple[Tensor, Tensor, Tensor],
    whole: tuple[Tensor, Tensor],
    sums: tuple[Tensor, Tensor, Tensor],
    dmask: Tensor | None,
) -> None:
    """Adds one block's part of the gradients to `sums`: of q, k and v."""
    grad, out, lse = given
    mine = block.sample, slice(None), slice(block.first, block.first + block.rows)
    g = block.grouped(grad)
    delta = (grad[mine].to(block.dtype) * out[mine]).sum(-1, keepdim=True)
    weights = block.scores()
    empty = None
    if block.sight.empty in ("mean", "fixed"):
        empty = (weights == float("-inf")).all(-1, keepdim=True)
    if lse.dim() == 4:
        for part in lse:
            weights.sub_(part[mine].unsqueeze(-1))
        _exp(weights)
    elif block.mask is not None and block.mask.dtype != torch.bool:
        # Where a mask drowns all scores of a row, its logsumexp is the mask's number: useless.
        _softmax(weights)
    else:
        _exp(weights.sub_(lse[mine].unsqueeze(-1)))
    flat = block.flat(weights)
    keys = block.sample, slice(None), slice(*block.keys)
    sums[2][keys].add_(torch.bmm(flat.transpose(1, 2), g))
    scores = block.heads(torch.bmm(g, block.v.transpose(1, 2)))
    scores.sub_(delta).mul_(weights)
    del weights, flat
    if dmask is not None:
        into = block.part(dmask)
        into.add_(scores.sum_to_size(into.shape))
    scores.mul_(block.sight.scale)
    flat = block.flat(scores)
    sums[1][keys].add_(torch.bmm(flat.transpose(1, 2), block.q))
    sums[0][mine].copy_(block.heads(torch.bmm(flat, block.k)))
    if empty is not None and bool(empty.any()):
        del scores, flat
        _empty_rows(block, g, delta, empty, whole, sums)


def _exp(x: Tensor) -> Tensor:
    """Replaces x by exp(x), in place.

    torch's own exp takes 4 times as long on the CPU, and 20 to 50 times where half of x is -inf or
    as low as a mask's numbers (torch 2.13, MKL).
    """
    return x.mul_(LOG2_E).exp2_()


def _softmax(scores: Tensor) -> None:
    """Replaces scores by their softmax, rows of -inf by zeros."""
    largest = scores.amax(-1, keepdim=True)
    _exp(scores.sub_(largest.masked_fill_(largest == float("-inf"), 0.0)))
    scores.div_(scores.sum(-1, keepdim=True).clamp_(min=torch.finfo(scores.dtype).tiny))


def _empty_rows(
    block: _QueryRun,
    g: Tensor,
    delta: Tensor,
    empty: Tensor,
    whole: tuple[Tensor, Tensor],
    sums: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Adds the gradients of the rows whose output is the mean of all values."""
    k, v = (x[block.sample].to(block.dtype) for x in whole)
    length = k.shape[1]
    rows = empty.expand(-1, -1, length).to(block.dtype).view(k.shape[0], -1, length) / length
    sums[2][block.sample].add_(torch.bmm(rows.transpose(1, 2), g))
    if block.sight.empty == "fixed":
        return
    flat_delta = delta.view(k.shape[0], -1, 1)
    scores = torch.bmm(g, v.transpose(1, 2)).sub_(flat_delta).mul_(rows).mul_(block.sight.scale)
    sums[1][block.sample].add_(torch.bmm(scores.transpose(1, 2), block.q))
    mine = block.sample, slice(None), slice(block.first, block.first + block.rows)
    sums[0][mine].add_(block.heads(torch.bmm(scores, k)))
