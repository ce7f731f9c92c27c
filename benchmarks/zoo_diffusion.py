"""Models of diffusers that the zoo runs beside the named ones."""

from __future__ import annotations

from typing import Any

import diffusers
import torch
from torch import Tensor, nn

from benchmarks.zoo_models import (
    IMAGE_SIZES,
    LARGE_IMAGE,
    LARGE_VIDEO,
    VIDEO_SIZES,
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


DIFFUSION: dict[str, ZooModel] = {
    "DiT": sample_model(
        "DiTTransformer2DModel",
        {
            "hidden_states": "float64[batch, 4, side*2, side*2]",
            "target": "float64[batch, 4, side*2, side*2]",
            **TIME,
            "class_labels": "int64[batch]",
        },
        ({"batch": 1, "side": 5}, {"batch": 1, "side": 7}),
        {"batch": 1, "side": 8},
        **HEADS,
        in_channels=4,
        num_layers=2,
        sample_size=16,
        num_embeds_ada_norm=1000,
    ),
    "Latte": sample_model(
        "LatteTransformer3DModel",
        video_of(4, 4, **WORDS)
        | {
            "hidden_states": "float64[batch, 4, 4, height*2, width*2]",
            "target": "float64[batch, 4, 4, height*2, width*2]",
        },
        IMAGE_SIZES,
        LARGE_IMAGE,
        **HEADS,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        cross_attention_dim=32,
        sample_size=16,
        patch_size=2,
        norm_type="ada_norm_single",
        caption_channels=24,
        video_length=4,
        activation_fn="gelu-approximate",
        norm_elementwise_affine=False,
    ),
    "AuraFlow": sample_model(
        "AuraFlowTransformer2DModel",
        image_of(4, 4, **WORDS) | {"timestep": "float64[batch]"},
        IMAGE_SIZES,
        LARGE_IMAGE,
        example=None,
        sample_size=16,
        in_channels=4,
        num_mmdit_layers=1,
        num_single_dit_layers=1,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=24,
        caption_projection_dim=32,
        out_channels=4,
        pos_embed_max_size=256,
    ),
    "Flux": ZooModel(
        float64(
            lambda: FluxLike(
                diffusers.FluxTransformer2DModel(
                    in_channels=16,
                    num_layers=1,
                    num_single_layers=1,
                    attention_head_dim=16,
                    num_attention_heads=2,
                    joint_attention_dim=24,
                    pooled_projection_dim=20,
                    axes_dims_rope=(4, 4, 8),
                )
            )
        ),
        PACKED | {"pooled_projections": "float64[batch, 20]", "timestep": "float64[batch]"},
        IMAGE_SIZES,
        LARGE_IMAGE,
    ),
    "Chroma": ZooModel(
        float64(
            lambda: FluxLike(
                diffusers.ChromaTransformer2DModel(
                    in_channels=16,
                    num_layers=1,
                    num_single_layers=1,
                    attention_head_dim=16,
                    num_attention_heads=2,
                    joint_attention_dim=24,
                    axes_dims_rope=(4, 4, 8),
                    approximator_num_channels=8,
                    approximator_hidden_dim=16,
                    approximator_layers=1,
                )
            )
        ),
        PACKED | {"timestep": "float64[batch]"},
        IMAGE_SIZES,
        LARGE_IMAGE,
    ),
    "HunyuanVideo": sample_model(
        "HunyuanVideoTransformer3DModel",
        video_of(
            4,
            4,
            **WORDS,
            encoder_attention_mask="int64[batch, text]",
            pooled_projections="float64[batch, 20]",
        ),
        VIDEO_SIZES,
        LARGE_VIDEO,
        example=masked_text,
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=1,
        num_single_layers=1,
        num_refiner_layers=1,
        patch_size=2,
        guidance_embeds=False,
        text_embed_dim=24,
        pooled_projection_dim=20,
        rope_axes_dim=(4, 4, 8),
    ),
    "LTX": ZooModel(
        float64(
            lambda: Packed(
                diffusers.LTXVideoTransformer3DModel(
                    in_channels=16,
                    out_channels=16,
                    num_attention_heads=2,
                    attention_head_dim=16,
                    cross_attention_dim=32,
                    num_layers=2,
                    caption_channels=24,
                ),
                num_frames=2,
                height=4,
                width=4,
            )
        ),
        {
            "hidden_states": "float64[batch, 2, 4, 4, 16]",
            **WORDS,
            **TIME,
            "encoder_attention_mask": "int64[batch, text]",
            "target": "float64[batch, 2, 4, 4, 16]",
        },
        ({"batch": 1, "text": 7}, {"batch": 1, "text": 9}),
        {"batch": 1, "text": 16},
        masked_text,
    ),
    "Mochi": sample_model(
        "MochiTransformer3DModel",
        video_of(4, 4, **WORDS, encoder_attention_mask="bool[batch, text]"),
        VIDEO_SIZES,
        LARGE_VIDEO,
        example=lambda s: (
            masked_text(s)
            | {"encoder_attention_mask": masked_text(s)["encoder_attention_mask"].bool()}
        ),
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=2,
        pooled_projection_dim=16,
        in_channels=4,
        text_embed_dim=24,
        time_embed_dim=16,
        max_sequence_length=64,
    ),
    "Allegro": ZooModel(
        float64(
            lambda: AllegroLoss(
                diffusers.AllegroTransformer3DModel(
                    num_attention_heads=2,
                    attention_head_dim=12,
                    in_channels=4,
                    out_channels=4,
                    num_layers=2,
                    cross_attention_dim=24,
                    sample_height=16,
                    sample_width=16,
                    sample_frames=4,
                    caption_channels=24,
                )
            )
        ),
        video_of(4, 4, **WORDS),
        VIDEO_SIZES,
        LARGE_VIDEO,
        timesteps,
    ),
    "Sana": sample_model(
        "SanaTransformer2DModel",
        {
            "hidden_states": "float64[batch, 4, height, width]",
            "target": "float64[batch, 4, height, width]",
            **WORDS,
            **TIME,
        },
        IMAGE_SIZES,
        LARGE_IMAGE,
        in_channels=4,
        out_channels=4,
        num_attention_heads=4,
        attention_head_dim=8,
        num_layers=2,
        num_cross_attention_heads=4,
        cross_attention_head_dim=8,
        cross_attention_dim=32,
        caption_channels=24,
        sample_size=16,
    ),
    "Lumina2": sample_model(
        "Lumina2Transformer2DModel",
        image_of(4, 4, **WORDS, encoder_attention_mask="bool[batch, text]"),
        IMAGE_SIZES,
        LARGE_IMAGE,
        example=lambda s: {
            "encoder_attention_mask": torch.ones(s["batch"], s["text"], dtype=torch.bool),
            **timesteps(s),
        },
        in_channels=4,
        hidden_size=32,
        num_layers=1,
        num_refiner_layers=1,
        num_attention_heads=2,
        num_kv_heads=1,
        axes_dim_rope=(4, 4, 8),
        axes_lens=(64, 64, 64),
        cap_feat_dim=24,
        multiple_of=16,
    ),
    "HunyuanDiT": ZooModel(
        float64(
            lambda: HunyuanLike(
                diffusers.HunyuanDiT2DModel(
                    num_attention_heads=2,
                    attention_head_dim=16,
                    in_channels=4,
                    patch_size=2,
                    sample_size=16,
                    hidden_size=32,
                    num_layers=4,
                    cross_attention_dim=24,
                    cross_attention_dim_t5=24,
                    pooled_projection_dim=12,
                    text_len=8,
                    text_len_t5=8,
                    use_style_cond_and_image_meta_size=False,
                )
            )
        ),
        {
            "hidden_states": IMAGE.format(4),
            "timestep": "float64[batch]",
            "encoder_hidden_states": "float64[batch, 8, 24]",
            "text_embedding_mask": "int64[batch, 8]",
            "encoder_hidden_states_t5": "float64[batch, 8, 24]",
            "text_embedding_mask_t5": "int64[batch, 8]",
            "cosine": "float64[height, width, 16]",
            "sine": "float64[height, width, 16]",
            "target": IMAGE.format(8),
        },
        NO_TEXT,
        NO_TEXT_LARGE,
    ),
    "UNet2DCondition": sample_model(
        "UNet2DConditionModel",
        {
            "sample": "float64[batch, 4, height*4, width*4]",
            **WORDS,
            **TIME,
            "target": "float64[batch, 4, height*4, width*4]",
        },
        IMAGE_SIZES,
        LARGE_IMAGE,
        block_out_channels=(16, 32),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        layers_per_block=1,
        norm_num_groups=8,
        cross_attention_dim=24,
        attention_head_dim=4,
    ),
    "UNet2D": sample_model(
        "UNet2DModel",
        {
            "sample": "float64[batch, 4, height*4, width*4]",
            **TIME,
            "target": "float64[batch, 4, height*4, width*4]",
        },
        NO_TEXT,
        NO_TEXT_LARGE,
        in_channels=4,
        out_channels=4,
        block_out_channels=(16, 32),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        layers_per_block=1,
        norm_num_groups=8,
        attention_head_dim=8,
    ),
    "CogView3Plus": sample_model(
        "CogView3PlusTransformer2DModel",
        image_of(
            4,
            4,
            **WORDS,
            original_size="float64[batch, 2]",
            target_size="float64[batch, 2]",
            crop_coords="float64[batch, 2]",
        ),
        IMAGE_SIZES,
        LARGE_IMAGE,
        patch_size=2,
        in_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        out_channels=4,
        text_embed_dim=24,
        time_embed_dim=16,
        condition_dim=8,
        pos_embed_max_size=32,
        sample_size=16,
    ),
    "CogView4": sample_model(
        "CogView4Transformer2DModel",
        image_of(
            4,
            4,
            **WORDS,
            original_size="float64[batch, 2]",
            target_size="float64[batch, 2]",
            crop_coords="float64[batch, 2]",
        ),
        IMAGE_SIZES,
        LARGE_IMAGE,
        patch_size=2,
        in_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        out_channels=4,
        text_embed_dim=24,
        time_embed_dim=16,
        condition_dim=8,
        pos_embed_max_size=32,
        sample_size=16,
        rope_axes_dim=(16, 16),
    ),
    "StableAudio": sample_model(
        "StableAudioDiTModel",
        {
            "hidden_states": "float64[batch, 8, seq]",
            "timestep": "float64[batch]",
            "encoder_hidden_states": "float64[batch, text, 24]",
            "global_hidden_states": "float64[batch, 1, 20]",
            "target": "float64[batch, 8, seq]",
        },
        ({"batch": 1, "seq": 17, "text": 7}, {"batch": 1, "seq": 31, "text": 9}),
        {"batch": 1, "seq": 64, "text": 16},
        example=None,
        sample_size=32,
        in_channels=8,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        num_key_value_attention_heads=2,
        out_channels=8,
        cross_attention_dim=16,
        time_proj_dim=16,
        global_states_input_dim=20,
        cross_attention_input_dim=24,
    ),
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
