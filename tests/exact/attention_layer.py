"""An attention layer of which every gradient is one of a parameter, for `benchmarks.attention`.

Input, queries, keys and values are rows looked up by the tokens' numbers, all different, and the
loss is the output's product with looked-up rows. So the gradients of four tables are those of the
input and of q, k and v, and the fifth's is the output itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dcpc

BATCH = 2


@dataclass(frozen=True, slots=True)
class Kind:
    """What attention a layer has.

    Attributes:
        heads: of the queries.
        key_heads: of keys and values.
        causal: whether a query sees only keys up to its own.
        window: how many keys it sees, its own the last; None: all.
        packed: whether a row is several sequences, told apart by `segments`.
        width: of a head.
    """

    heads: int
    key_heads: int
    causal: bool = True
    window: int | None = None
    packed: bool = False
    width: int = 4


KINDS: Mapping[str, Kind] = {
    "4 heads, causal": Kind(4, 4),
    "GQA 8:1, causal": Kind(16, 2),
    "MQA 8:1, packed": Kind(8, 1, packed=True),
    "6 heads, causal": Kind(6, 6),
    "1 head, causal": Kind(1, 1),
    "4 heads, window": Kind(4, 4, window=9),
    "MQA, all keys": Kind(4, 1, causal=False),
    "4 heads, packed, all keys": Kind(4, 4, causal=False, packed=True),
    "GQA 8:1, packed window": Kind(16, 2, window=70, packed=True),
    "5 heads, packed": Kind(5, 5, packed=True),
}


class Layer(nn.Module):
    """Projections, attention and a projection of its output; the loss is linear in the output."""

    def __init__(self, kind: Kind, rows: int, dtype: torch.dtype = torch.float64) -> None:
        """Makes tables of so many rows: as many tokens as a batch has."""
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        dim, key_dim = kind.heads * kind.width, kind.key_heads * kind.width
        self.q, self.k, self.v = (
            nn.Linear(dim, dim),
            nn.Linear(dim, key_dim),
            nn.Linear(dim, key_dim),
        )
        self.out = nn.Linear(dim, dim)
        self.input, self.output = nn.Embedding(rows, dim), nn.Embedding(rows, dim)
        self.q_rows = nn.Embedding(rows, dim)
        self.k_rows, self.v_rows = nn.Embedding(rows, key_dim), nn.Embedding(rows, key_dim)
        self.to(dtype)

    def forward(self, numbers: Tensor, segments: Tensor | None = None) -> Tensor:
        """Returns the loss.

        Args:
            numbers: int64 `[batch, seq]`, of the tokens.
            segments: int64 `[batch, seq]`, which sequence of its row each belongs to.
        """
        x = self.input(numbers)
        q = self._heads(self.q(x) + self.q_rows(numbers))
        k = self._heads(self.k(x) + self.k_rows(numbers))
        v = self._heads(self.v(x) + self.v_rows(numbers))
        mask = self._mask(numbers.shape[1], segments)
        causal = self.kind.causal and mask is None
        grouped = self.kind.heads != self.kind.key_heads
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=grouped
        )
        y = self.out(y.transpose(1, 2).flatten(2))
        return (y * self.output(numbers)).sum()

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.kind.width)).transpose(1, 2)

    def _mask(self, n: int, segments: Tensor | None) -> Tensor | None:
        """Returns which keys each query sees, None where the fused op says it itself."""
        kind = self.kind
        if segments is None and kind.window is None:
            return None
        at = torch.arange(n)
        mask = torch.ones(n, n, dtype=torch.bool)
        if kind.causal:
            mask = mask & (at[:, None] >= at)
        if kind.window is not None:
            mask = mask & (at[:, None] - at < kind.window)
        if segments is not None:
            mask = mask & (segments[:, :, None] == segments[:, None, :])[:, None]
        return mask


def buckets(kind: Kind, lengths: Sequence[int], batch: int = BATCH) -> dcpc.Buckets:
    """Returns the layer's inputs, at some lengths."""
    names = ("numbers", "segments") if kind.packed else ("numbers",)
    inputs = dict.fromkeys(names, "int64[batch, seq]")
    return dcpc.Buckets(inputs, [{"seq": n, "batch": batch} for n in dict.fromkeys(lengths)])


def example(kind: Kind, length: int, batch: int = BATCH) -> dict[str, Tensor]:
    """Returns inputs of a length, the same on every rank; sequences of 1 to 40 where packed."""
    given = {"numbers": torch.arange(batch * length).view(batch, length)}
    if kind.packed:
        generator = torch.Generator().manual_seed(length)
        lengths = torch.randint(1, 41, (batch * length,), generator=generator)
        ids = torch.arange(batch * length).repeat_interleave(lengths)
        given["segments"] = ids[: batch * length].view(batch, length)
    return given
