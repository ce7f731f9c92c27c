"""AlphaFold 2's trunk: blocks over an alignment (MSA) and over pairs of residues. Plain PyTorch.

Shapes as suffix: B batch, S sequences of the alignment, R residues, M width of the alignment, Z
width of a pair, H heads, C width of a head. `msa_BSRM` is `[B, S, R, M]`.

Source: Jumper et al., Nature 596 (2021), supplementary information: the block is algorithm 6, its
parts are 7 to 15, the embedding of inputs 3 to 5, the losses 1.9.8 and 1.9.9. Left out: dropout,
templates, extra sequences, recycling (a loop outside) and the structure module.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MASKED = 22  # token of a hidden residue; 0..19 amino acids, 20 unknown, 21 gap


@dataclass(frozen=True, slots=True)
class EvoformerConfig:
    """Sizes of the trunk; the defaults are AlphaFold 2's."""

    blocks: int = 48
    msa_dim: int = 256
    pair_dim: int = 128
    msa_heads: int = 8
    pair_heads: int = 4
    head_dim: int = 32
    outer_dim: int = 32  # of each side of the outer product
    triangle_dim: int = 128  # of the triangle products
    widening: int = 4  # of the transitions
    tokens: int = 23
    distances: int = 64  # bins of the distogram
    reach: int = 32  # relative positions are told apart up to this


class GatedAttention(nn.Module):
    """Attention of rows of a table to themselves, gated; a bias, if given, is that of all rows."""

    def __init__(self, dim: int, heads: int, head_dim: int) -> None:
        super().__init__()
        self.heads = heads
        inner = heads * head_dim
        self.q = nn.Linear(dim, inner, bias=False)
        self.k = nn.Linear(dim, inner, bias=False)
        self.v = nn.Linear(dim, inner, bias=False)
        self.gate = nn.Linear(dim, inner)
        self.out = nn.Linear(inner, dim)

    def forward(self, x_BSRD: Tensor, bias_BHRR: Tensor | None = None) -> Tensor:
        """Returns `[B, S, R, D]`; residues of a row attend to each other."""
        q, k, v = (self._heads(linear(x_BSRD)) for linear in (self.q, self.k, self.v))
        bias = None if bias_BHRR is None else bias_BHRR[:, None]
        out_BSHRC = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        out = out_BSHRC.transpose(2, 3).flatten(3)
        return self.out(torch.sigmoid(self.gate(x_BSRD)) * out)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(2, 3)


class RowAttention(nn.Module):
    """Algorithm 7: residues of each sequence, biased by pairs."""

    def __init__(self, config: EvoformerConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.msa_dim)
        self.pair_norm = nn.LayerNorm(config.pair_dim)
        self.bias = nn.Linear(config.pair_dim, config.msa_heads, bias=False)
        self.attention = GatedAttention(config.msa_dim, config.msa_heads, config.head_dim)

    def forward(self, msa_BSRM: Tensor, pair_BRRZ: Tensor) -> Tensor:
        """Returns what is added to the alignment."""
        bias_BHRR = self.bias(self.pair_norm(pair_BRRZ)).permute(0, 3, 1, 2)
        return self.attention(self.norm(msa_BSRM), bias_BHRR)


class ColumnAttention(nn.Module):
    """Algorithm 8: sequences at each residue."""

    def __init__(self, config: EvoformerConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.msa_dim)
        self.attention = GatedAttention(config.msa_dim, config.msa_heads, config.head_dim)

    def forward(self, msa_BSRM: Tensor) -> Tensor:
        """Returns what is added to the alignment."""
        return self.attention(self.norm(msa_BSRM).transpose(1, 2)).transpose(1, 2)


class Transition(nn.Module):
    """Algorithms 9 and 15: norm, linear, ReLU, linear."""

    def __init__(self, dim: int, widening: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, widening * dim)
        self.down = nn.Linear(widening * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Returns what is added to x, in its shape."""
        return self.down(F.relu(self.up(self.norm(x))))


class OuterProductMean(nn.Module):
    """Algorithm 10: what two columns of the alignment say together, as a pair."""

    def __init__(self, config: EvoformerConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.msa_dim)
        self.left = nn.Linear(config.msa_dim, config.outer_dim)
        self.right = nn.Linear(config.msa_dim, config.outer_dim)
        self.out = nn.Linear(config.outer_dim**2, config.pair_dim)

    def forward(self, msa_BSRM: Tensor) -> Tensor:
        """Returns what is added to the pairs, `[B, R, R, Z]`."""
        x = self.norm(msa_BSRM)
        outer = torch.einsum("bsic,bsjd->bijcd", self.left(x), self.right(x))
        return self.out(outer.flatten(3) / msa_BSRM.shape[1])


class TriangleProduct(nn.Module):
    """Algorithms 11 and 12: a pair's update by the two other edges of all triangles with it."""

    def __init__(self, config: EvoformerConfig, outgoing: bool) -> None:
        super().__init__()
        dim, inner = config.pair_dim, config.triangle_dim
        self.equation = "bikc,bjkc->bijc" if outgoing else "bkic,bkjc->bijc"
        self.norm = nn.LayerNorm(dim)
        self.left = nn.Linear(dim, inner)
        self.left_gate = nn.Linear(dim, inner)
        self.right = nn.Linear(dim, inner)
        self.right_gate = nn.Linear(dim, inner)
        self.product_norm = nn.LayerNorm(inner)
        self.gate = nn.Linear(dim, dim)
        self.out = nn.Linear(inner, dim)

    def forward(self, pair_BRRZ: Tensor) -> Tensor:
        """Returns what is added to the pairs."""
        x = self.norm(pair_BRRZ)
        left = torch.sigmoid(self.left_gate(x)) * self.left(x)
        right = torch.sigmoid(self.right_gate(x)) * self.right(x)
        product = torch.einsum(self.equation, left, right)
        return torch.sigmoid(self.gate(x)) * self.out(self.product_norm(product))


class TriangleAttention(nn.Module):
    """Algorithms 13 and 14: edges that start (or end) at one residue, biased by the third edge."""

    def __init__(self, config: EvoformerConfig, starting: bool) -> None:
        super().__init__()
        self.starting = starting
        self.norm = nn.LayerNorm(config.pair_dim)
        self.bias = nn.Linear(config.pair_dim, config.pair_heads, bias=False)
        self.attention = GatedAttention(config.pair_dim, config.pair_heads, config.head_dim)

    def forward(self, pair_BRRZ: Tensor) -> Tensor:
        """Returns what is added to the pairs."""
        x = self.norm(pair_BRRZ if self.starting else pair_BRRZ.transpose(1, 2))
        found = self.attention(x, self.bias(x).permute(0, 3, 1, 2))
        return found if self.starting else found.transpose(1, 2)


class EvoformerBlock(nn.Module):
    """Algorithm 6, one block."""

    def __init__(self, config: EvoformerConfig) -> None:
        super().__init__()
        self.row = RowAttention(config)
        self.column = ColumnAttention(config)
        self.msa_transition = Transition(config.msa_dim, config.widening)
        self.outer = OuterProductMean(config)
        self.outgoing = TriangleProduct(config, outgoing=True)
        self.incoming = TriangleProduct(config, outgoing=False)
        self.starting = TriangleAttention(config, starting=True)
        self.ending = TriangleAttention(config, starting=False)
        self.pair_transition = Transition(config.pair_dim, config.widening)

    def forward(self, msa: Tensor, pair: Tensor) -> tuple[Tensor, Tensor]:
        """Returns alignment `[B, S, R, M]` and pairs `[B, R, R, Z]`."""
        msa = msa + self.row(msa, pair)
        msa = msa + self.column(msa)
        msa = msa + self.msa_transition(msa)
        pair = pair + self.outer(msa)
        for update in (self.outgoing, self.incoming, self.starting, self.ending):
            pair = pair + update(pair)
        return msa, pair + self.pair_transition(pair)


class Embedding(nn.Module):
    """Algorithms 3 to 5: tokens of the alignment, pairs of the first sequence, their distance."""

    def __init__(self, config: EvoformerConfig) -> None:
        super().__init__()
        self.reach = config.reach
        self.msa = nn.Embedding(config.tokens, config.msa_dim)
        self.target = nn.Embedding(config.tokens, config.msa_dim)
        self.left = nn.Embedding(config.tokens, config.pair_dim)
        self.right = nn.Embedding(config.tokens, config.pair_dim)
        self.relative = nn.Embedding(2 * config.reach + 1, config.pair_dim)

    def forward(self, tokens_BSR: Tensor, target_BR: Tensor) -> tuple[Tensor, Tensor]:
        """Returns alignment `[B, S, R, M]` and pairs `[B, R, R, Z]`."""
        msa = self.msa(tokens_BSR) + self.target(target_BR)[:, None]
        place = torch.arange(target_BR.shape[1], device=target_BR.device)
        apart = (place[:, None] - place).clamp(-self.reach, self.reach) + self.reach
        ends = self.left(target_BR)[:, :, None] + self.right(target_BR)[:, None]
        return msa, ends + self.relative(apart)


class Evoformer(nn.Module):
    """Embedding, trunk and the two losses that need no structure; `forward` returns the loss."""

    def __init__(self, config: EvoformerConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(config)
        self.blocks = nn.ModuleList(EvoformerBlock(config) for _ in range(config.blocks))
        self.tokens = nn.Linear(config.msa_dim, config.tokens)
        self.distances = nn.Linear(config.pair_dim, config.distances)
        self._initialise()

    def _initialise(self) -> None:
        """A block begins near the identity, its gates open. Source: supplement, 1.11.4."""
        for module in self.modules():
            for name, linear in module.named_children():
                if not isinstance(linear, nn.Linear):
                    continue
                if linear.bias is not None:
                    nn.init.constant_(linear.bias, 1.0 if name.endswith("gate") else 0.0)
                if name.endswith("gate") or name in ("out", "down"):
                    nn.init.zeros_(linear.weight)
                else:
                    nn.init.trunc_normal_(linear.weight, std=linear.in_features**-0.5)

    def forward(
        self, msa: Tensor, true_msa: Tensor, hidden: Tensor, target: Tensor, distance: Tensor
    ) -> Tensor:
        """Returns the loss, a scalar: the mean over samples of 2 * masked MSA + 0.3 * distogram.

        Args:
            msa: tokens, those of hidden residues replaced, `[B, S, R]`.
            true_msa: tokens before that, `[B, S, R]`.
            hidden: bool `[B, S, R]`, the residues that are to be told.
            target: tokens of the sequence that is folded, `[B, R]`.
            distance: bin of the distance of each two residues, `[B, R, R]`.
        """
        msa_BSRM, pair_BRRZ = self.embedding(msa, target)
        for block in self.blocks:
            msa_BSRM, pair_BRRZ = block(msa_BSRM, pair_BRRZ)
        told_BSR = each_loss(self.tokens(msa_BSRM), true_msa)
        hidden_B = hidden.sum(dim=(1, 2)).clamp(min=1)
        told_B = (told_BSR * hidden).sum(dim=(1, 2)) / hidden_B
        logits = self.distances(pair_BRRZ)
        apart_B = each_loss(logits + logits.transpose(1, 2), distance).mean(dim=(1, 2))
        return (2.0 * told_B + 0.3 * apart_B).mean()


def each_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Returns the cross-entropy of each target, in its shape; classes are the last dim."""
    found = F.cross_entropy(logits.flatten(0, -2), target.flatten(), reduction="none")
    return found.view(target.shape)


def input_specs() -> dict[str, str]:
    """Returns the specs of the inputs."""
    return {
        "msa": "int64[batch, sequences, residues]",
        "true_msa": "int64[batch, sequences, residues]",
        "hidden": "bool[batch, sequences, residues]",
        "target": "int64[batch, residues]",
        "distance": "int64[batch, residues, residues]",
    }
