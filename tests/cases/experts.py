"""Mixtures of experts: tokens sorted by expert, as torchtitan's, and experts that all compute."""

from typing import Any

import torch
import torch.nn.functional as F
import transformers.integrations.moe  # noqa: F401 - registers a grouped product that takes float64
from torch import Tensor, nn

VOCABULARY, WIDTH = 64, 32


class Titan(nn.Module):
    """Experts as torchtitan has them: argsort, gather, grouped products, scatter_add."""

    def __init__(self, experts: int = 4, k: int = 2, inner: int = 16) -> None:
        super().__init__()
        self.experts, self.k = experts, k
        self.router = nn.Linear(WIDTH, experts, bias=False)
        self.w1 = nn.Parameter(torch.randn(experts, WIDTH, inner) / 8)
        self.w2 = nn.Parameter(torch.randn(experts, inner, WIDTH) / 8)
        self.shared = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        b, s, h = x.shape
        x = x.reshape(-1, h)
        scores = self.router(x).sigmoid()
        top, chosen = scores.topk(self.k, dim=1)
        count = torch.histc(chosen.reshape(-1).float(), self.experts, 0, self.experts - 1)
        order = torch.argsort(chosen.reshape(-1), stable=True)
        rows = (order // self.k).reshape(-1, 1).expand(-1, h)
        given = torch.gather(x, 0, rows) * top.reshape(-1)[order].reshape(-1, 1)
        ends = torch.cumsum(count, 0, dtype=torch.int32)
        product: Any = torch.ops.transformers.grouped_mm_fallback
        if x.dtype == torch.bfloat16:  # torch captures its own in no other dtype
            product = torch._grouped_mm
        y = product(F.silu(product(given, self.w1, ends)), self.w2, ends)
        out = self.shared(x).scatter_add(0, rows, y)
        balance = (count / count.sum() * scores.mean(0)).sum()  # joins tokens
        return out.reshape(b, s, h), balance


class Dense(nn.Module):
    """Experts that all compute all tokens, weighted by their top-k scores."""

    def __init__(self, experts: int = 4, k: int = 2, inner: int = 16) -> None:
        super().__init__()
        self.k = k
        self.router = nn.Linear(WIDTH, experts, bias=False)
        self.w1 = nn.Parameter(torch.randn(experts, WIDTH, inner) / 8)
        self.w2 = nn.Parameter(torch.randn(experts, inner, WIDTH) / 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.router(x).softmax(-1)
        top, chosen = scores.topk(self.k, dim=-1)
        weight = torch.zeros_like(scores).scatter(-1, chosen, top)
        y = torch.einsum("bsh,ehi->bsei", x, self.w1).relu()
        return torch.einsum("bsei,eih,bse->bsh", y, self.w2, weight), scores.mean((0, 1)).norm()


class Text(nn.Module):
    """A causal model of ids with one kind of experts, and their balance in its loss."""

    def __init__(self, kind: type[nn.Module] = Titan, layers: int = 2) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(layers))
        self.experts = nn.ModuleList(kind() for _ in range(layers))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x: Any = self.embed(input_ids)
        loss: Any = 0
        for qkv, experts in zip(self.qkv, self.experts, strict=True):
            q, k, v = qkv(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
            seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + seen.transpose(1, 2).flatten(2)
            y, balance = experts(F.layer_norm(x, (WIDTH,)))
            x, loss = x + y, loss + 0.01 * balance
        return loss + F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())
