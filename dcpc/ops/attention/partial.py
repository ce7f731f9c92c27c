"""Attention over keys that arrive in parts: softmax merged by the logsumexp.

    state = Forward(call, q, v)                      gradient = Backward(call, grad, q, out, lse)
    state.add(k, v, runs)  ... once for each part    gradient.add(k, v, runs, dk, dv)  ...
    out, lse = state.finish()                        dq = gradient.finish()

Each part is cut into rectangles, and each rectangle computed by the device's kernel for it. What is
added up is in float32, or in float64 for float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dcpc.ops.attention import blocks, cuda, flash
from dcpc.ops.attention.kernels import kernel_name
from dcpc.ops.attention.rectangles import Ids, QueryCutter, Rectangle
from dcpc.ops.attention.spec import (
    Attended,
    RunOfRows,
    Sight,
    accumulated,
    empty_gradient,
    empty_outputs,
    part_of,
)

NONE = float("-inf")


@dataclass(frozen=True, slots=True)
class Operands:
    """The operands that all parts of one attention share.

    Attributes:
        mask: attention mask `[m, h or 1, s or 1, n or 1]`, as for `dcpc::attention`, of these
            queries and all keys.
        keep: boolean `[b or 1, n]`: the keys that any query may see.
        segment: integer `[b or 1, n]`: the number of the sequence at each position.
        sight: limits by position; the runs of queries give their positions.
        queries: runs of queries.
        keys: number of all keys, n.
        averages: whether a query's result may be the mean of all values.
    """

    mask: Tensor | None
    keep: Tensor | None
    segment: Tensor | None
    sight: Sight
    queries: tuple[RunOfRows, ...]
    keys: int
    averages: bool

    @property
    def numbers(self) -> bool:
        """Whether the mask is added to the scores."""
        return self.mask is not None and self.mask.dtype != torch.bool

    def cut(self) -> QueryCutter:
        """Returns the cutter of rectangles: by sequences, unless blocks hide other sequences."""
        return QueryCutter(
            self.queries, self.sight, None if self.mask is not None else self.segment
        )


@dataclass(frozen=True, slots=True)
class _RectangleParts:
    """The tensors of one rectangle."""

    kernel: str
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    keep: Tensor | None
    sight: Sight
    ids: Ids | None


def _part(given: Operands, r: Rectangle, q: Tensor, k: Tensor, v: Tensor) -> _RectangleParts:
    q = q[r.samples, :, r.rows]
    k, v = (x[r.samples, :, r.columns] for x in (k, v))
    mask, keep, ids = given.mask, given.keep, None
    if mask is not None:
        assert r.samples == slice(None), "of a mask the blocks hide other sequences"
        mask = part_of(part_of(mask, 2, r.rows), 3, r.positions)
        if given.segment is not None:
            ids = Ids(given.segment, [r.queries], [r.keys])
    if keep is not None:
        keep = keep[r.samples if keep.shape[0] > 1 else slice(None), r.positions]
    sight = r.sight._replace(empty="zero")
    kernel = kernel_name(
        q.device.type, q.shape[-1] == v.shape[-1], None if mask is None else mask.dtype,
        keep is not None, sight, mask is not None,
    )  # fmt: skip
    if kernel == "cuda" and not cuda.able(q, k, sight):
        kernel = "blocks"
    return _RectangleParts(kernel, q, k, v, mask, keep, sight, ids)


class Forward:
    """Attention of some queries over the keys added so far.

    Args:
        given: operands that all parts share.
        q: queries `[b, h, s, d]`.
        v: some values `[b, g, _, e]`, of which only the head count and width are read.
    """

    def __init__(self, given: Operands, q: Tensor, v: Tensor) -> None:
        self._given, self._q, self._cut = given, q, given.cut()
        out, self._lse = empty_outputs(q, v)
        self._out = torch.zeros_like(out, dtype=self._lse.dtype)
        self._lse.fill_(NONE)
        self._groups = q.shape[1] // v.shape[1]
        self._shift = torch.full_like(self._lse, NONE) if given.numbers else None
        self._sum = v.new_zeros((*v.shape[:2], 1, v.shape[3]), dtype=accumulated(q.dtype))
        self._fresh = True

    def add(self, k: Tensor, v: Tensor, keys: Sequence[RunOfRows]) -> None:
        """Adds keys `[b, g, t, d]` and values `[b, g, t, e]`, whose positions are in `keys`."""
        if self._given.averages:
            self._sum.add_(v.sum(2, keepdim=True, dtype=self._sum.dtype))
        for rectangle in self._cut.against(keys):
            self._add(_part(self._given, rectangle, self._q, k, v), rectangle)
        self._fresh = False

    def _add(self, part: _RectangleParts, at: Rectangle) -> None:
        shift = None
        if part.kernel == "cuda":
            out, lse = cuda.forward(part.q, part.k, part.v, part.sight)
        elif part.kernel == "flash":
            out, lse = flash.forward(part.q, part.k, part.v, None, part.keep, part.sight)
            if part.keep is not None:  # the kernel says 0 of rows that see nothing
                hidden = _nothing(part.keep, part.q.shape[2], part.sight)
                lse = lse.masked_fill(hidden.unsqueeze(1), NONE)
        else:
            given = (part.q, part.k, part.v, part.mask, part.keep, part.sight)
            out, largest, lse = blocks.statistics(*given, part.ids)
            if self._shift is None:
                lse.add_(largest)
            else:
                shift = largest
                lse.masked_fill_(shift == NONE, NONE)
        mine = at.samples, slice(None), at.rows
        if self._fresh and at.first:
            self._out[mine].copy_(out)
            self._lse[mine].copy_(lse)
            if self._shift is not None and shift is not None:
                self._shift[mine].copy_(shift)
            return
        if self._shift is not None and shift is not None:
            lse = self._shifted(self._shift[mine], self._lse[mine], shift, lse)
        _merge(self._out[mine], self._lse[mine], out, lse)

    @staticmethod
    def _shifted(old: Tensor, old_lse: Tensor, new: Tensor, lse: Tensor) -> Tensor:
        """Brings both logsumexps to the larger shift, and returns the new one."""
        largest = torch.maximum(old, new)
        finite = largest.masked_fill(largest == NONE, 0.0)
        old_lse.add_(old.sub(finite))
        old.copy_(largest)
        return lse.add_(new.sub_(finite))

    def finish(self) -> tuple[Tensor, Tensor]:
        """Returns out `[b, h, s, e]` and the statistics for backward, logsumexp `[b, h, s]`.

        With an additive mask these are `[2, b, h, s]`: the largest score, and the logarithm of the
        sum of exp(score - largest). For rows that see no key it is 0, infinite or NaN, so that
        their weights become those of `Sight.empty`.
        """
        none = self._lse == NONE
        empty = self._given.sight.empty
        held = self._lse if self._shift is None else self._shift
        self._lse.masked_fill_(none, 0.0)
        held.masked_fill_(none, _LSE_OF_NONE[empty])
        if empty == "nan":
            self._out.masked_fill_(none.unsqueeze(-1), float("nan"))
        if self._given.averages:
            mean = (self._sum / self._given.keys).repeat_interleave(self._groups, 1)
            self._out.copy_(torch.where(none.unsqueeze(-1), mean, self._out))
        lse = self._lse if self._shift is None else torch.stack([self._shift, self._lse])
        if self._out.dtype == self._q.dtype:
            return self._out, lse
        out = empty_outputs(self._q, self._sum)[0]
        return out.copy_(self._out), lse


# Weights are exp(score - logsumexp): 0 where it is infinite. The flash kernel knows 0, and scores
# of -inf.
_LSE_OF_NONE = {
    "zero": 0.0,
    "safe": 0.0,
    "nan": float("nan"),
    "mean": float("inf"),
    "fixed": float("inf"),
}


def _merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
    """Merges two attentions into the first, in place of both; -inf means no keys."""
    merged = torch.logaddexp(lse, more_lse)
    finite = merged.masked_fill(merged == NONE, 0.0)
    out.mul_(lse.sub(finite).exp_().unsqueeze(-1))
    weight = more_lse.sub(finite).exp_().unsqueeze(-1)
    out.add_(more.to(out.dtype).mul_(weight))
    lse.copy_(merged)


def _nothing(keep: Tensor, rows: int, sight: Sight) -> Tensor:
    """Returns `[b or 1, rows]`: whether each query sees none of the kept keys."""
    if sight.after is None:
        return keep.any(1, keepdim=True).logical_not_().expand(-1, rows)
    last = torch.arange(sight.start, sight.start + rows, device=keep.device)
    return (keep.cumsum(1) == 0)[:, last.clamp_(max=keep.shape[1] - 1)]


class Backward:
    """Gradients of attention, over the keys added so far.

    Args:
        given: operands that all parts share.
        grad: gradient of out `[b, h, s, e]`.
        q: queries `[b, h, s, d]`.
        out: output of forward over all keys.
        lse: statistics of forward over all keys.
    """

    def __init__(self, given: Operands, grad: Tensor, q: Tensor, out: Tensor, lse: Tensor) -> None:
        self._given, self._q, self._cut = given, q, given.cut()
        self._grad, self._out, self._lse = grad, out, lse
        self._dq = empty_gradient(q, accumulated(q.dtype)).zero_()
        self._none = (lse if lse.dim() == 3 else lse[0]) == float("inf")
        self._averages = given.averages and bool(self._none.any())

    def add(self, k: Tensor, v: Tensor, keys: Sequence[RunOfRows], dk: Tensor, dv: Tensor) -> None:
        """Adds the gradients of these keys and values to dk and dv, in float32 or better."""
        for rectangle in self._cut.against(keys):
            part = _part(self._given, rectangle, self._q, k, v)
            dq, more_k, more_v = self._gradients(part, rectangle)
            self._dq[rectangle.samples, :, rectangle.rows].add_(dq)
            dk[rectangle.samples, :, rectangle.columns].add_(more_k)
            dv[rectangle.samples, :, rectangle.columns].add_(more_v)
            del dq, more_k, more_v  # gone before the next ones are there
        if self._averages:
            self._add_means(k, v, dk, dv)

    def _gradients(self, part: _RectangleParts, at: Rectangle) -> tuple[Tensor, Tensor, Tensor]:
        mine = at.samples, slice(None), at.rows
        grad, out, lse = self._grad[mine], self._out[mine], self._lse[(..., *mine)]
        given = Attended(grad, part.q, part.k, part.v, out, lse)
        if part.kernel == "cuda":
            return cuda.backward(given, part.sight)
        if part.kernel == "flash":
            return flash.backward(given, None, part.keep, part.sight)
        return blocks.backward(given, part.mask, part.keep, part.sight, part.ids)[:3]

    def _add_means(self, k: Tensor, v: Tensor, dk: Tensor, dv: Tensor) -> None:
        """Adds the gradients of the rows whose output is the mean of all values."""
        groups, scale = self._q.shape[1] // k.shape[1], self._given.sight.scale
        for first in range(0, self._q.shape[2], blocks.ROWS):
            rows = slice(first, first + blocks.ROWS)
            weight = self._none[:, :, rows, None].to(dk.dtype) / self._given.keys
            if not bool(weight.any()):
                continue
            grad, q, out = (x[:, :, rows].to(dk.dtype) for x in (self._grad, self._q, self._out))
            mine = grad * weight
            dv.add_(mine.unflatten(1, (-1, groups)).sum((2, 3)).unsqueeze(2))
            if self._given.sight.empty == "fixed":
                continue
            keys, values = (x.to(dk.dtype).repeat_interleave(groups, 1) for x in (k, v))
            scores = torch.matmul(mine, values.transpose(2, 3))
            scores.sub_((mine * out).sum(-1, keepdim=True)).mul_(scale)
            more = torch.matmul(scores.transpose(2, 3), q)
            dk.add_(more.unflatten(1, (-1, groups)).sum(2))
            self._dq[:, :, rows].add_(torch.matmul(scores, keys))

    def finish(self) -> Tensor:
        """Returns the gradient of the queries."""
        same = self._dq.dtype == self._q.dtype
        return self._dq if same else empty_gradient(self._q).copy_(self._dq)
