"""The visibility of keys, and further parameters that all attention kernels share."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# Result of a row that sees no key, as models differ:
# "zero"   0, without a gradient (`scaled_dot_product_attention` with a truth mask)
# "safe"   the same; but of scores that numbers drown, which are added, what a softmax makes of them
#          (torch's math kernel; the backward of its fused one takes each weight for 1)
# "nan"    not a number (softmax of -inf alone)
# "mean"   the mean of all values: the scores were drowned by adding the lowest number there is, and
#          the gradient flows to them as if they had not been
# "fixed"  the mean of all values: the scores were replaced by one number, and get no gradient
EMPTY = ("zero", "safe", "nan", "mean", "fixed")


class RunOfRows(NamedTuple):
    """Rows of a tensor at consecutive positions.

    Attributes:
        at: index of the first row.
        length: number of rows.
        position: position of the first row.
    """

    at: int
    length: int
    position: int


class Attended(NamedTuple):
    """The tensors that a backward gets: forward's operands and outputs, and the gradient.

    Attributes:
        grad: gradient of the loss with respect to out, `[b, h, s, e]`.
        q: queries `[b, h, s, d]`.
        k: keys `[b, g, t, d]`.
        v: values `[b, g, t, e]`.
        out: output of forward `[b, h, s, e]`.
        lse: logsumexp `[b, h, s]`; of blocks also `[2, b, h, s]`, see `blocks.statistics`.
    """

    grad: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor

    @property
    def anything(self) -> bool:
        """Whether queries, keys and values all have elements."""
        return bool(self.q.numel() and self.k.numel() and self.v.numel())

    def zeros(self) -> tuple[Tensor, Tensor, Tensor]:
        """Returns zero gradients of q, k and v, for empty tensors."""
        dq, dk, dv = (empty_gradient(x).zero_() for x in (self.q, self.k, self.v))
        return dq, dk, dv

    def rows(self, rows: slice) -> Attended:
        """Returns the tensors of some of the queries."""
        grad, q, out, lse = (x[:, :, rows] for x in (self.grad, self.q, self.out, self.lse))
        return Attended(grad, q, self.k, self.v, out, lse)

    def samples(self, samples: slice) -> Attended:
        """Returns the tensors of some of the samples."""
        return Attended(*(x[samples] for x in self))

    def heads(self, heads: slice) -> Attended:
        """Returns the tensors of some of the query heads."""
        grad, q, out, lse = (x[:, heads] for x in (self.grad, self.q, self.out, self.lse))
        return Attended(grad, q, self.k, self.v, out, lse)


class Sight(NamedTuple):
    """The visibility of keys: query i sees key j unless a field here hides it.

    Ops take these fields as separate arguments, in this order, see `calls.py`.

    Attributes:
        scale: factor of the scores.
        before: number of visible keys before a query's own position: j >= i + start - before; None:
            all of them.
        after: number of visible keys after it: j <= i + start + after (causal: 0); None: all of
            them.
        start: position of the first query among the keys.
        turn: number of consecutive queries from the first one; None: all of them. The others are
            consecutive as well (a zigzag piece has two runs).
        second: position of the first query after these.
        empty: result of a query that sees no key, one of EMPTY.
    """

    scale: float
    before: int | None = None
    after: int | None = None
    start: int = 0
    turn: int | None = None
    second: int = 0
    empty: str = "zero"

    @property
    def banded(self) -> bool:
        """Whether positions hide anything."""
        return self.before is not None or self.after is not None

    def misses(self, queries: int, keys: int) -> bool:
        """Returns whether positions hide all keys from one of the first `queries` queries."""
        before = keys if self.before is None else self.before
        after = keys if self.after is None else self.after
        return after < 0 or before + after < 0 or queries - 1 - before > keys - 1

    def runs(self, queries: int) -> tuple[RunOfRows, ...]:
        """Returns the one or two runs of consecutive queries, none of them empty."""
        if self.turn is None:
            return (RunOfRows(0, queries, self.start),) if queries else ()
        turn = min(max(self.turn, 0), queries)
        both = RunOfRows(0, turn, self.start), RunOfRows(turn, queries - turn, self.second)
        return tuple(run for run in both if run.length)

    def of(self, run: RunOfRows) -> Sight:
        """Returns the limits for the queries of one run."""
        if self.turn is None and self.start == run.position:
            return self
        return self._replace(start=run.position, turn=None, second=0)

    def position(self, query: int) -> int:
        """Returns the position of a query among the keys."""
        if self.turn is None or query < self.turn:
            return self.start + query
        return self.second + query - self.turn

    def keys(self, first: int, rows: int, length: int) -> tuple[int, int]:
        """Returns (start, stop) of the keys that some consecutive queries see."""
        position = self.position(first)
        low = 0 if self.before is None else position - self.before
        high = length if self.after is None else position + rows + self.after
        low = min(max(low, 0), length)
        return low, max(min(high, length), low)

    def hidden(self, first: int, rows: int, keys: tuple[int, int], device: torch.device) -> Tensor:
        """Returns `[rows, keys]`: whether positions hide each key from consecutive queries."""
        position = self.position(first)
        query = torch.arange(position, position + rows, device=device)
        distance = torch.arange(*keys, device=device) - query.unsqueeze(1)
        if self.before is None:
            return distance > (self.after or 0)
        hidden = distance < -self.before
        return hidden if self.after is None else hidden | (distance > self.after)


# Scores as low as this are nowhere but where a mask puts them.
LOWEST = -1e30


def hides(number: float, dtype: torch.dtype) -> bool:
    """Returns whether a number in place of a score, or added to it, surely leaves it no weight."""
    return number <= hiding(dtype)


def hiding(dtype: torch.dtype) -> float:
    """Returns the largest number that surely hides a score.

    No score of the dtype comes near it: the lowest number of float16, -1e30 for other dtypes.
    Scores do reach -1e4 and -1e9.
    """
    return max(LOWEST, torch.finfo(dtype).min)


def accumulated(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which softmax is computed: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def empty_outputs(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Returns empty out `[b, h, s, e]` and logsumexp `[b, h, s]`, laid out as by the kernels."""
    b, h, s, d = q.shape
    same = v.shape[-1] == d
    out = torch.empty_like(q) if same else q.new_empty((b, s, h, v.shape[-1])).transpose(1, 2)
    shape, dtype = ((b, s, h) if q.device.type == "cpu" else (b, h, s)), accumulated(q.dtype)
    lse = q.new_empty(shape, dtype=dtype)
    return out, lse.transpose(1, 2) if q.device.type == "cpu" else lse


def empty_gradient(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Returns an empty gradient of x `[b, h, s, d]`, laid out (b, s, h, d)."""
    b, h, s, d = x.shape
    return x.new_empty((b, s, h, d), dtype=dtype or x.dtype).transpose(1, 2)


def part_of(mask: Tensor | None, dim: int, index: slice) -> Tensor | None:
    """Returns a part of a mask along one dim, or all of it if that dim is broadcast."""
    if mask is None or mask.shape[dim] == 1:
        return mask
    return mask[(slice(None),) * dim + (index,)]
