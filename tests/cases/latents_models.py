"""A small temporal autoencoder and plain latents for it."""

from collections.abc import Mapping

import torch
from torch import Tensor

from models.vae3d import TemporalConfig, TemporalLoss, TemporalVAE, input_specs

TINY = TemporalConfig(width=8, blocks=1, groups=4)
INPUTS = input_specs(TINY, "float64")
POINTS = [
    {"batch": 1, "frames": 5, "height": 7, "width": 6},
    {"batch": 2, "frames": 9, "height": 5, "width": 4},
]


def model() -> TemporalLoss:
    """A float64 training step whose every parameter is random."""
    torch.manual_seed(0)
    found = TemporalLoss(TemporalVAE(TINY), 0.1).double()
    for p in found.parameters():
        torch.nn.init.normal_(p, std=0.2)
    return found


def data(sizes: Mapping[str, int]) -> dict[str, Tensor]:
    """Random latents and noise."""
    generator = torch.Generator().manual_seed(0)
    shape = (sizes["batch"], TINY.latents, *(sizes[n] for n in ("frames", "height", "width")))
    return {n: torch.randn(shape, generator=generator, dtype=torch.float64) for n in INPUTS}
