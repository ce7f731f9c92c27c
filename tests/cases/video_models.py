"""A small STDiT's training step, its inputs and plain data for them."""

from collections.abc import Mapping

import torch
from torch import Tensor

from models.stdit import RectifiedFlow, STDiT, STDiTConfig, input_specs

TINY = STDiTConfig(depth=1, dim=32, heads=4, text_dim=20, text_len=6)
INPUTS = input_specs(TINY, "float64")


def model(config: STDiTConfig = TINY) -> RectifiedFlow:
    """A float64 step whose every parameter is random: some begin as zeros, which hides errors."""
    torch.manual_seed(0)
    flow = RectifiedFlow(STDiT(config)).double()
    for p in flow.parameters():
        if p.requires_grad:
            torch.nn.init.normal_(p, std=0.2)
    return flow


def data(sizes: Mapping[str, int], seed: int = 0) -> dict[str, Tensor]:
    """Random latents and text; some frames are given clean, some text is padding."""
    generator = torch.Generator().manual_seed(seed)
    batch, frames, height, width = (sizes[n] for n in ("batch", "frames", "height", "width"))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def mask(*shape: int) -> Tensor:
        kept = torch.rand(shape, generator=generator) < 0.7
        kept[:, 0] = True
        return kept

    return {
        "latents": normal(batch, 4, frames, height, width),
        "noise": normal(batch, 4, frames, height, width),
        "timestep": 1000 * torch.rand(batch, generator=generator),
        "text": normal(batch, TINY.text_len, TINY.text_dim),
        "text_mask": mask(batch, TINY.text_len),
        "fps": torch.full((batch,), 24.0),
        "pixel_height": torch.full((batch,), 8.0 * height),
        "pixel_width": torch.full((batch,), 8.0 * width),
        "frame_mask": mask(batch, frames),
        "drop_text": torch.rand(batch, generator=generator) < 0.5,
    }
