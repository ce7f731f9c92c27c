"""What the zoo's models of diffusers share: inputs by kind, and losses that fill in arguments."""

from __future__ import annotations

from typing import Any

import diffusers
import torch
from torch import Tensor, nn

from tests.zoo.models import (
    IMAGE_SIZES,
    LARGE_IMAGE,
    Denoiser,
    Sizes,
    ZooModel,
    float64,
    timesteps,
)


def sample_model(
    name: str,
    inputs: dict[str, str],
    sizes: tuple[Sizes, ...],
    large: Sizes,
    fixed: dict[str, Any] | None = None,
    example: Any = timesteps,
    **fields: Any,
) -> ZooModel:
    """A diffusers model by its class's name."""
    make = float64(lambda: Denoiser(getattr(diffusers, name)(**fields), **(fixed or {})))
    return ZooModel(make, inputs, sizes, large, example)


IMAGE = "float64[batch, {}, height*2, width*2]"


VIDEO = "float64[batch, {}, frames, height*2, width*2]"


WORDS = {"encoder_hidden_states": "float64[batch, text, 24]"}


TIME = {"timestep": "int64[batch]"}


HEADS = {"num_attention_heads": 4, "attention_head_dim": 8}


def image_of(channels: int, out: int, **more: str) -> dict[str, str]:
    """Inputs of an image model."""
    target = IMAGE.format(out)
    return {"hidden_states": IMAGE.format(channels), **TIME, "target": target, **more}


def video_of(channels: int, out: int, **more: str) -> dict[str, str]:
    """Inputs of a video model."""
    target = VIDEO.format(out)
    return {"hidden_states": VIDEO.format(channels), **TIME, "target": target, **more}


NO_TEXT: tuple[Sizes, ...] = tuple({k: v for k, v in s.items() if k != "text"} for s in IMAGE_SIZES)


NO_TEXT_LARGE: Sizes = {k: v for k, v in LARGE_IMAGE.items() if k != "text"}


def masked_text(sizes: Sizes) -> dict[str, Tensor]:
    """Timesteps, and a text whose last third is padding, as truth values or numbers."""
    mask = torch.ones(sizes["batch"], sizes["text"], dtype=torch.int64)
    mask[:, sizes["text"] - sizes["text"] // 3 :] = 0
    return {**timesteps(sizes), "encoder_attention_mask": mask}


class Packed(nn.Module):
    """A model of packed tokens, given positions; a loss over its first output."""

    def __init__(self, model: nn.Module, **fixed: Any) -> None:
        """Keeps the model."""
        super().__init__()
        self.model = Denoiser(model, **fixed)

    def forward(self, hidden_states: Tensor, target: Tensor, **inputs: Tensor) -> Tensor:
        """Returns the loss; (batch, height, width, channels) become (batch, tokens, channels)."""
        flat = hidden_states.flatten(1, -2)
        return self.model(hidden_states=flat, target=target.flatten(1, -2), **inputs)  # type: ignore[no-any-return]


class FluxLike(Packed):
    """Flux and Chroma take positions of every token."""

    def forward(self, hidden_states: Tensor, target: Tensor, **inputs: Tensor) -> Tensor:
        """Returns the loss."""
        _, height, width, _ = hidden_states.shape
        text = inputs["encoder_hidden_states"].shape[1]
        rows = torch.arange(height).view(-1, 1, 1).expand(-1, width, -1)
        columns = torch.arange(width).view(1, -1, 1).expand(height, -1, -1)
        ids = torch.cat([torch.zeros_like(rows), rows, columns], -1).flatten(0, 1)
        return super().forward(
            hidden_states, target, img_ids=ids, txt_ids=torch.zeros(text, 3), **inputs
        )


class HunyuanLike(nn.Module):
    """A model with a rotary table given as two tensors."""

    def __init__(self, model: nn.Module, **fixed: Any) -> None:
        """Keeps the model."""
        super().__init__()
        self.model = Denoiser(model, **fixed)

    def forward(self, cosine: Tensor, sine: Tensor, **inputs: Tensor) -> Tensor:
        """Returns the loss."""
        tables = (cosine.flatten(0, -2), sine.flatten(0, -2))
        return self.model(image_rotary_emb=tables, **inputs)  # type: ignore[no-any-return]


PACKED = {
    "hidden_states": "float64[batch, height, width, 16]",
    **WORDS,
    **TIME,
    "target": "float64[batch, height, width, 16]",
}


class AllegroLoss(Denoiser):
    """Allegro takes positions and their grid next to a rotary table."""

    def forward(self, target: Tensor, **inputs: Any) -> Tensor:
        """Returns the loss."""
        _, _, frames, height, width = target.shape
        grids = [torch.arange(n) for n in (frames, height // 2, width // 2)]
        positions = torch.cartesian_prod(*grids).T.reshape(3, 1, -1)
        table = [
            (torch.cos(g[:, None] * torch.ones(4)), torch.sin(g[:, None] * torch.ones(4)))
            for g in grids
        ]
        return super().forward(target, image_rotary_emb=(table, positions), **inputs)
