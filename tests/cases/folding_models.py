"""A small Evoformer and plain data for it."""

from collections.abc import Mapping

import torch
from torch import Tensor

from models.evoformer import MASKED, Evoformer, EvoformerConfig, input_specs

TINY = EvoformerConfig(
    blocks=1, msa_dim=16, pair_dim=8, msa_heads=4, pair_heads=2, head_dim=4, outer_dim=3,
    triangle_dim=8, distances=6, reach=3,
)  # fmt: skip
INPUTS = input_specs()
# Neither 2 nor 4 ranks divide residues or sequences; fewer of them than 4 ranks.
POINTS = [
    {"batch": 1, "sequences": 5, "residues": 7},
    {"batch": 2, "sequences": 3, "residues": 9},
    {"batch": 1, "sequences": 7, "residues": 3},
]


def model(config: EvoformerConfig = TINY) -> Evoformer:
    """A float64 model whose every parameter is random: some begin as zeros, which hides errors."""
    torch.manual_seed(0)
    trunk = Evoformer(config).double()
    for p in trunk.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return trunk


def data(sizes: Mapping[str, int], seed: int = 0) -> dict[str, Tensor]:
    """Random alignments, a third of whose residues are hidden, and distances."""
    generator = torch.Generator().manual_seed(seed)
    batch, sequences, residues = (sizes[n] for n in ("batch", "sequences", "residues"))
    tokens = torch.randint(0, MASKED, (batch, sequences, residues), generator=generator)
    hidden = torch.rand(tokens.shape, generator=generator) < 0.3
    shape = (batch, residues, residues)
    return {
        "msa": torch.where(hidden, MASKED, tokens),
        "true_msa": tokens,
        "hidden": hidden,
        "target": tokens[:, 0],
        "distance": torch.randint(0, TINY.distances, shape, generator=generator),
    }
