"""Texts with 0 to n images: the tower runs where there are images, as users write it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from tests.zoo.models import VOCABULARY, Sizes, ZooModel, float64, tokens

IMAGE = VOCABULARY - 1  # token in whose place a piece of an image stands
PIECES = 4  # of an image of 8 by 8 pixels
SEQ = "int64[batch, seq]"
TEXT = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48}
TEXT |= {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
TOWER |= {"num_attention_heads": 4, "image_size": 8, "patch_size": 4}


class Reader(nn.Module):
    """A causal text; at its image tokens the pieces of the sample's images, in their order."""

    def __init__(self) -> None:
        """Draws the parameters."""
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, 32), nn.Linear(32, VOCABULARY)
        self.patches, self.project = nn.Conv2d(3, 32, 4, stride=4), nn.Linear(32, 32)
        self.tower = nn.TransformerEncoderLayer(32, 4, 48, 0.0, batch_first=True)
        self.text = nn.TransformerEncoderLayer(32, 4, 48, 0.0, batch_first=True)

    def forward(self, input_ids: Tensor, labels: Tensor, pixel_values: Tensor) -> Tensor:
        """Returns the loss, one number."""
        x, (batch, images) = self.embed(input_ids), pixel_values.shape[:2]
        if images > 0:
            seen = self.patches(pixel_values.flatten(0, 1)).flatten(2).transpose(1, 2)
            pieces = self.project(self.tower(seen)).reshape(batch, images * PIECES, -1)
            here = input_ids == IMAGE
            at = (here.cumsum(1) - 1).clamp(0, images * PIECES - 1)
            x = torch.where(here[..., None], pieces.gather(1, at[..., None].expand_as(x)), x)
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        x = self.head(self.text(x, src_mask=mask, is_causal=True))
        return F.cross_entropy(x.flatten(0, 1), labels.flatten())


class FlatImages(nn.Module):
    """A model of transformers, which takes all samples' images in one dim, and None for none."""

    def __init__(self, model: nn.Module, more: Callable[[Tensor], dict[str, Tensor]]) -> None:
        """Keeps the model, and the inputs that follow from the tokens."""
        super().__init__()
        self.model, self.more = model, more

    def forward(self, input_ids: Tensor, labels: Tensor, pixel_values: Tensor) -> Any:
        """Returns what the model returns."""
        flat = pixel_values.flatten(0, 1) if pixel_values.shape[1] else None
        more = self.more(input_ids)
        return self.model(input_ids=input_ids, labels=labels, pixel_values=flat, **more)


def text_and_images(sizes: Sizes) -> dict[str, Tensor]:
    """Random ids, of which as many are image tokens as the images have pieces."""
    found = tokens(sizes)
    pieces = sizes["images"] * PIECES
    found["input_ids"] %= IMAGE
    found["input_ids"][:, 1 : 1 + pieces] = IMAGE
    return found


def _reads(make: Callable[[], nn.Module]) -> ZooModel:
    shapes = [(15, 0), (14, 2), (19, 3), (11, 1)]
    return ZooModel(
        float64(make),
        {"input_ids": SEQ, "labels": SEQ, "pixel_values": "float64[batch, images, 3, 8, 8]"},
        tuple({"batch": 1, "seq": seq, "images": images} for seq, images in shapes),
        {"batch": 1, "seq": 16, "images": 0},
        text_and_images,
    )


def _llava() -> nn.Module:
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**TOWER),
        text_config=transformers.LlamaConfig(**TEXT),
        image_token_index=IMAGE,
    )
    return FlatImages(transformers.LlavaForConditionalGeneration(config), lambda ids: {})


def _paligemma() -> nn.Module:
    config = transformers.PaliGemmaConfig(
        vision_config={**TOWER, "model_type": "siglip_vision_model", "projection_dim": 32},
        text_config={**TEXT, "model_type": "gemma", "head_dim": 8},
        image_token_index=IMAGE,
        projection_dim=32,
    )
    model = transformers.PaliGemmaForConditionalGeneration(config)
    return FlatImages(model, lambda ids: {"token_type_ids": (ids != IMAGE).long()})


MIXED = {
    "text with 0 to 3 images": _reads(Reader),
    "transformers LLaVA, 0 to 3 images": _reads(_llava),
    "transformers PaliGemma, 0 to 3 images": _reads(_paligemma),
}
