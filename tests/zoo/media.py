"""Models of images, video and speech of transformers that the zoo runs beside the named ones."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn

from tests.zoo.models import (
    Sizes,
    WithFlags,
    ZooModel,
    common,
    float64,
    padded_tokens,
)
from tests.zoo.text import BART

TINY = {"hidden_size": 32, "intermediate_size": 48}


TINY |= {"num_hidden_layers": 2, "num_attention_heads": 4}


def image_model(name: str, model: str, spatial: bool, flags: Any = None, **fields: Any) -> ZooModel:
    """A transformers classifier of images; with a fixed image size only the batch is symbolic."""

    def make() -> nn.Module:
        config = getattr(transformers, f"{name}Config")(**fields)
        made = getattr(transformers, model)(config)
        return WithFlags(made, **flags) if flags else made

    shape = "height*4, width*4" if spatial else "16, 16"
    sizes: tuple[Sizes, ...] = (
        ({"batch": 1, "height": 5, "width": 3}, {"batch": 1, "height": 4, "width": 7})
        if spatial
        else ({"batch": 1},)
    )
    large: Sizes = {"batch": 1, "height": 8, "width": 12} if spatial else {"batch": 1}
    return ZooModel(
        float64(make),
        {"pixel_values": f"float64[batch, 3, {shape}]", "labels": "int64[batch]"},
        sizes,
        large,
    )


class SumOfSquares(nn.Module):
    """The mean square of a model's first output."""

    def __init__(self, model: nn.Module, **fixed: Any) -> None:
        """Keeps the model."""
        super().__init__()
        self.model = model
        self.fixed = fixed

    def forward(self, **inputs: Tensor) -> Tensor:
        """Returns the loss, one number."""
        return self.model(**inputs, **self.fixed)[0].square().mean()  # type: ignore[no-any-return]


def features(
    name: str,
    inputs: dict[str, str],
    sizes: tuple[Sizes, ...],
    large: Sizes,
    fixed: dict[str, Any] | None = None,
    example: Any = None,
    **fields: Any,
) -> ZooModel:
    """A transformers model of features, whose loss is their mean square."""

    def make() -> nn.Module:
        config = getattr(transformers, f"{name}Config")(**fields)
        return SumOfSquares(getattr(transformers, f"{name}Model")(config), **(fixed or {}))

    return ZooModel(float64(make), inputs, sizes, large, example)


def clip_inputs(sizes: Sizes) -> dict[str, Tensor]:
    """Ids, all of them attended to."""
    found = padded_tokens(sizes)
    return {k: v for k, v in found.items() if k != "labels"}


SPEECH_FIELDS: dict[str, Any] = {
    **TINY, "conv_dim": (16, 16), "conv_stride": (5, 2), "conv_kernel": (10, 3),
    "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2,
    "hidden_dropout": 0.0, "attention_dropout": 0.0, "feat_proj_dropout": 0.0, "layerdrop": 0.0,
    "mask_time_prob": 0.0, "apply_spec_augment": False,
}  # fmt: skip


def labelled_speech(sizes: Sizes) -> dict[str, Tensor]:
    """Waves whose last part is padding, and labels of which the last ones are."""
    generator = torch.Generator().manual_seed(sizes["samples"])
    batch, n, s = (sizes[d] for d in ("batch", "samples", "text"))
    mask = (torch.arange(n) < n - 40).long().repeat(batch, 1)
    labels = torch.randint(1, 11, (batch, s), generator=generator)
    labels[:, s // 2 :] = -100
    waves = torch.randn(batch, n, dtype=torch.float64, generator=generator)
    return {"input_values": waves * mask, "attention_mask": mask, "labels": labels}


def recogniser(name: str, **fields: Any) -> ZooModel:
    """A transformers encoder of waves of unequal lengths with a CTC loss, unmodified."""

    def make() -> nn.Module:
        given = {**SPEECH_FIELDS, "activation_dropout": 0.0, "final_dropout": 0.0, **fields}
        config = getattr(transformers, f"{name}Config")(vocab_size=11, **given)
        return getattr(transformers, f"{name}ForCTC")(config)  # type: ignore[no-any-return]

    waves = {"input_values": "float64[batch, samples]", "attention_mask": "int64[batch, samples]"}
    return ZooModel(
        float64(make),
        {**waves, "labels": "int64[batch, text]"},
        ({"batch": 1, "samples": 333, "text": 5}, {"batch": 1, "samples": 401, "text": 7}),
        {"batch": 1, "samples": 640, "text": 8},
        labelled_speech,
    )


SPEECH: dict[str, ZooModel] = {
    "Whisper": ZooModel(
        float64(
            lambda: transformers.WhisperForConditionalGeneration(
                transformers.WhisperConfig(
                    **BART, num_mel_bins=8, max_source_positions=32, max_target_positions=64
                )
            )
        ),
        {"input_features": "float64[batch, 8, 64]", "labels": "int64[batch, seq]"},
        ({"batch": 1, "seq": 11}, {"batch": 1, "seq": 19}),
        {"batch": 1, "seq": 32},
    ),
    "Wav2Vec2": features(
        "Wav2Vec2",
        {"input_values": "float64[batch, samples]"},
        ({"batch": 1, "samples": 333}, {"batch": 1, "samples": 401}),
        {"batch": 1, "samples": 640},
        **SPEECH_FIELDS,
    ),
    "Hubert": features(
        "Hubert",
        {"input_values": "float64[batch, samples]"},
        ({"batch": 1, "samples": 333}, {"batch": 1, "samples": 401}),
        {"batch": 1, "samples": 640},
        **SPEECH_FIELDS,
    ),
    "Wav2Vec2 CTC": recogniser("Wav2Vec2", feat_extract_norm="layer"),
    "Hubert CTC": recogniser("Hubert", ctc_loss_reduction="mean", ctc_zero_infinity=True),
}


VISION_FIELDS = {**TINY, "image_size": 16, "patch_size": 4, "num_labels": 5}


INTERPOLATED = {"interpolate_pos_encoding": True}


VISION: dict[str, ZooModel] = {
    "ViT fixed": image_model("ViT", "ViTForImageClassification", False, **VISION_FIELDS),
    "DeiT": image_model("DeiT", "DeiTForImageClassification", True, INTERPOLATED, **VISION_FIELDS),
    "BEiT": image_model("Beit", "BeitForImageClassification", False, **VISION_FIELDS),
    "DINOv2": image_model("Dinov2", "Dinov2ForImageClassification", True, **VISION_FIELDS),
    "Swin": image_model(
        "Swin",
        "SwinForImageClassification",
        False,
        image_size=16,
        patch_size=2,
        embed_dim=16,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=4,
        num_labels=5,
    ),
    "Swin v2": image_model(
        "Swinv2",
        "Swinv2ForImageClassification",
        False,
        image_size=16,
        patch_size=2,
        embed_dim=16,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=4,
        num_labels=5,
    ),
    "ConvNeXt": image_model(
        "ConvNext",
        "ConvNextForImageClassification",
        True,
        num_labels=5,
        hidden_sizes=[8, 16],
        depths=[2, 2],
        patch_size=4,
        num_stages=2,
    ),
    "ResNet": image_model(
        "ResNet",
        "ResNetForImageClassification",
        True,
        num_labels=5,
        hidden_sizes=[8, 16],
        depths=[1, 1],
        embedding_size=8,
    ),
    "SegFormer": image_model(
        "Segformer",
        "SegformerForImageClassification",
        True,
        num_labels=5,
        num_encoder_blocks=2,
        depths=[1, 1],
        hidden_sizes=[8, 16],
        num_attention_heads=[1, 2],
        sr_ratios=[2, 1],
        patch_sizes=[3, 3],
        strides=[2, 2],
        mlp_ratios=[2, 2],
    ),
    "ViTMAE": ZooModel(
        float64(
            lambda: transformers.ViTMAEForPreTraining(
                transformers.ViTMAEConfig(
                    **TINY,
                    image_size=16,
                    patch_size=4,
                    mask_ratio=0.5,
                    decoder_hidden_size=32,
                    decoder_intermediate_size=48,
                    decoder_num_hidden_layers=1,
                    decoder_num_attention_heads=4,
                )
            )
        ),
        {"pixel_values": "float64[batch, 3, 16, 16]"},
        ({"batch": 1},),
        {"batch": 1},
    ),
    "CLIP": ZooModel(
        float64(
            lambda: WithFlags(
                transformers.CLIPModel(
                    transformers.CLIPConfig(
                        text_config=common(projection_dim=16, eos_token_id=2),
                        vision_config={
                            **TINY,
                            "image_size": 16,
                            "patch_size": 4,
                            "projection_dim": 16,
                        },
                        projection_dim=16,
                    )
                ),
                return_loss=True,
            )
        ),
        {
            "input_ids": "int64[batch, seq]",
            "attention_mask": "int64[batch, seq]",
            "pixel_values": "float64[batch, 3, 16, 16]",
        },
        ({"batch": 2, "seq": 11}, {"batch": 3, "seq": 9}),
        {"batch": 2, "seq": 32},
        clip_inputs,
    ),
    "VideoMAE": features(
        "VideoMAE",
        {"pixel_values": "float64[batch, 4, 3, 16, 16]"},
        ({"batch": 1},),
        {"batch": 1},
        **{**TINY, "image_size": 16, "patch_size": 4, "num_frames": 4},
    ),
    "TimeSformer": features(
        "Timesformer",
        {"pixel_values": "float64[batch, frames, 3, 16, 16]"},
        ({"batch": 1, "frames": 3}, {"batch": 1, "frames": 5}),
        {"batch": 1, "frames": 4},
        **{**TINY, "image_size": 16, "patch_size": 4, "num_frames": 4},
    ),
    "ViViT": features(
        "Vivit",
        {"pixel_values": "float64[batch, 4, 3, 16, 16]"},
        ({"batch": 1},),
        {"batch": 1},
        **{**TINY, "image_size": 16, "num_frames": 4, "tubelet_size": [2, 4, 4]},
    ),
}
