"""A byte-level decoder: rotary positions, RMSNorm, SwiGLU, grouped-query attention. Plain PyTorch.

Shapes as suffix: B batch, S sequence, D model width, H query heads, K key/value heads, C width of
a head, V vocabulary. `x_BSD` is `[B, S, D]`.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class GPTConfig:
    """Sizes of a GPT; the default is a small model of 256 byte values and two specials."""

    vocab_size: int = 258  # bytes, then begin (256) and end (257) of a document
    dim: int = 256
    n_layers: int = 4
    n_heads: int = 8
    n_kv_heads: int | None = None  # None: as many as query heads
    hidden: int | None = None  # None: 8/3 of dim, rounded up to a multiple of 32
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    tie_embeddings: bool = False

    def __post_init__(self) -> None:
        """Refuses sizes that do not divide."""
        if self.dim % (2 * self.n_heads):
            raise ValueError(f"dim {self.dim} must be a multiple of 2 * n_heads {self.n_heads}")
        if self.n_heads % self.kv_heads:
            raise ValueError(
                f"n_heads {self.n_heads} must be a multiple of n_kv_heads {self.kv_heads}"
            )

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.dim // self.n_heads

    @property
    def kv_heads(self) -> int:
        """Number of key/value heads."""
        return self.n_heads if self.n_kv_heads is None else self.n_kv_heads

    @property
    def ffn_dim(self) -> int:
        """Width of the feed-forward layer."""
        return -(-8 * self.dim // 96) * 32 if self.hidden is None else self.hidden


def rope_tables(x_BSD: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Returns cos and sin of the rotary angles, both `[S, C/2]`, for positions 0 .. S-1.

    Angles are computed in float32, in float64 where the model is: at position 8191 a bfloat16 angle
    would be off by many radians.
    """
    dtype = torch.float64 if x_BSD.dtype == torch.float64 else torch.float32
    powers = torch.arange(0, head_dim, 2, device=x_BSD.device, dtype=dtype) / head_dim
    positions_S = torch.arange(x_BSD.shape[1], device=x_BSD.device, dtype=dtype)
    angles = positions_S[:, None] * theta**-powers
    return angles.cos().to(x_BSD.dtype), angles.sin().to(x_BSD.dtype)


def rotate(x_BHSC: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Returns x with the two halves of each head rotated by the angle of its position."""
    first, second = x_BHSC.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Attention(nn.Module):
    """Causal self-attention; key/value heads may be fewer than query heads."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        kv_dim = config.kv_heads * config.head_dim
        self.q = nn.Linear(config.dim, config.dim, bias=False)
        self.k = nn.Linear(config.dim, kv_dim, bias=False)
        self.v = nn.Linear(config.dim, kv_dim, bias=False)
        self.out = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x_BSD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Returns the attended values, `[B, S, D]`."""
        q_BHSC = rotate(self._heads(self.q(x_BSD)), cos, sin)
        k_BKSC = rotate(self._heads(self.k(x_BSD)), cos, sin)
        v_BKSC = self._heads(self.v(x_BSD))
        grouped = q_BHSC.shape[1] != k_BKSC.shape[1]
        o_BHSC = F.scaled_dot_product_attention(
            q_BHSC, k_BKSC, v_BKSC, is_causal=True, enable_gqa=grouped
        )
        return self.out(o_BHSC.transpose(1, 2).flatten(2))

    def _heads(self, x_BSD: Tensor) -> Tensor:
        return x_BSD.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.up = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.down = nn.Linear(config.ffn_dim, config.dim, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Returns `[B, S, D]`."""
        return self.down(F.silu(self.gate(x_BSD)) * self.up(x_BSD))


class Block(nn.Module):
    """One pre-norm layer."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.ffn = FeedForward(config)

    def forward(self, x_BSD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Returns `[B, S, D]`."""
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), cos, sin)
        return x_BSD + self.ffn(self.ffn_norm(x_BSD))


class GPT(nn.Module):
    """The decoder; `forward` returns the loss."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)
        if config.tie_embeddings:
            self.head.weight = self.embedding.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """Returns the mean cross-entropy over the labels that are not ignored.

        Args:
            input_ids: int64 `[B, S]`.
            labels: int64 `[B, S]`, shifted by the data pipeline: `labels[:, t]` is the byte that
                follows `input_ids[:, t]`; -100 is ignored.

        Returns:
            The loss, a scalar.
        """
        return F.cross_entropy(
            self.logits(input_ids).flatten(0, 1), labels.flatten(), ignore_index=-100
        )

    def logits(self, input_ids: Tensor) -> Tensor:
        """Returns the logits of the next byte, `[B, S, V]`."""
        x_BSD = self.embedding(input_ids)
        cos, sin = rope_tables(x_BSD, self.config.head_dim, self.config.rope_theta)
        for block in self.blocks:
            x_BSD = block(x_BSD, cos, sin)
        return self.head(self.norm(x_BSD))


def llama_8b() -> GPT:
    """Returns a decoder of the shape of Llama 3 8B, in bfloat16, on the meta device: to plan for.

    Source: the config.json of meta-llama/Meta-Llama-3-8B.
    """
    config = GPTConfig(
        vocab_size=128_256, dim=4096, n_layers=32, n_heads=32, n_kv_heads=8, hidden=14_336,
        rope_theta=500_000.0,
    )  # fmt: skip
    with torch.device("meta"):
        return GPT(config).to(torch.bfloat16)
