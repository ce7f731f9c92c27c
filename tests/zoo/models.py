"""The zoo: models of transformers and diffusers at small configurations, none of them edited.

Each is made from its library's own config and model classes. A transformers model returns its loss
itself; a diffusers model returns a sample, whose loss is the mean squared error to a target input.
The wrappers here do nothing else, except to fill in arguments that a bucket cannot give (a flag, a
tuple of tensors).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import diffusers
import torch
import transformers
from torch import Tensor, nn

from dcpc.buckets import Buckets, Sizes

VOCABULARY = 64
DEPTH = {"layers": 2}  # of the named models; `--quick` takes 1, as tracing is most of its time

Example = Callable[[Sizes], dict[str, Tensor]]


@dataclass(frozen=True, slots=True)
class ZooModel:
    """One model of the zoo.

    Attributes:
        make: returns the float64 model, with random weights and no dropout.
        inputs: spec of each argument.
        sizes: shapes to check at, batch 1; of every dim one length that neither 2 nor 4 divides.
        coverage_sizes: a shape whose dims 4 divides, at which the FLOPs are shared out.
        example: values of the inputs for which random ones will not do.
    """

    make: Callable[[], nn.Module]
    inputs: Mapping[str, str]
    sizes: tuple[Sizes, ...]
    coverage_sizes: Sizes
    example: Example | None = None

    @property
    def buckets(self) -> Buckets:
        """Every shape once."""
        shapes = {tuple(sorted(s.items())): s for s in (*self.sizes, self.coverage_sizes)}
        return Buckets(inputs=self.inputs, sizes=list(shapes.values()))


class Denoiser(nn.Module):
    """The mean squared error of a diffusers model's sample to a target."""

    def __init__(self, model: nn.Module, **fixed: Any) -> None:
        """Keeps the model and the arguments that are the same in every call."""
        super().__init__()
        self.model = model
        self.fixed = fixed

    def forward(self, target: Tensor, **inputs: Any) -> Tensor:
        """Returns the loss, one number."""
        (sample,) = self.model(**inputs, **self.fixed, return_dict=False)[:1]
        return nn.functional.mse_loss(sample, target)


class WithRotary(nn.Module):
    """A Denoiser whose rotary tables are two inputs."""

    def __init__(self, model: nn.Module) -> None:
        """Keeps the model."""
        super().__init__()
        self.model = Denoiser(model)

    def forward(self, cosine: Tensor, sine: Tensor, **inputs: Tensor) -> Tensor:
        """Returns the loss, one number; the tables have the dims of the tokens."""
        tables = (cosine.flatten(0, 2), sine.flatten(0, 2))
        return self.model(image_rotary_emb=tables, **inputs)  # type: ignore[no-any-return]


class WithFlags(nn.Module):
    """A model with arguments that are the same in every call."""

    def __init__(self, model: nn.Module, **fixed: Any) -> None:
        """Keeps the model and the arguments."""
        super().__init__()
        self.model = model
        self.fixed = fixed

    def forward(self, **inputs: Tensor) -> Any:
        """Returns what the model returns."""
        return self.model(**inputs, **self.fixed)


def float64(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Returns a factory of the same model, seeded and in float64."""

    def made() -> nn.Module:
        torch.manual_seed(0)
        return make().double()

    return made


def tokens(sizes: Sizes, seed: int = 1) -> dict[str, Tensor]:
    """Random ids, a third of the labels ignored."""
    generator = torch.Generator().manual_seed(seed)
    shape = (sizes["batch"], sizes["seq"])
    ids = torch.randint(2, VOCABULARY, shape, generator=generator)
    labels = torch.randint(2, VOCABULARY, shape, generator=generator)
    labels[torch.rand(shape, generator=generator) < 0.3] = -100
    labels[:, -1] = 3
    return {"input_ids": ids, "labels": labels}


def padded_tokens(sizes: Sizes) -> dict[str, Tensor]:
    """Random ids, the last quarter of each sample padding."""
    found = tokens(sizes)
    mask = torch.ones_like(found["input_ids"])
    mask[:, sizes["seq"] - sizes["seq"] // 4 :] = 0
    return {**found, "attention_mask": mask}


def two_texts(sizes: Sizes) -> dict[str, Tensor]:
    """Random ids of a source and a target."""
    source = tokens({"batch": sizes["batch"], "seq": sizes["source"]}, seed=2)
    return {**tokens(sizes), "input_ids": source["input_ids"]}


def timesteps(sizes: Sizes) -> dict[str, Tensor]:
    """One timestep a sample."""
    return {"timestep": torch.arange(sizes["batch"]) * 37 + 11}


def text_timesteps(sizes: Sizes) -> dict[str, Tensor]:
    """Timesteps, and a text of which the last third is padding."""
    mask = torch.ones(sizes["batch"], sizes["text"], dtype=torch.int64)
    mask[:, sizes["text"] - sizes["text"] // 3 :] = 0
    return {**timesteps(sizes), "encoder_attention_mask": mask}


TEXT = {"input_ids": "int64[batch, seq]", "labels": "int64[batch, seq]"}
MASKED_TEXT = {**TEXT, "attention_mask": "int64[batch, seq]"}
TEXT_SIZES: tuple[Sizes, ...] = ({"batch": 1, "seq": 17}, {"batch": 1, "seq": 31})
LONG_TEXT: Sizes = {"batch": 1, "seq": 64}


def text_model(make: Callable[[], nn.Module], masked: bool = False) -> ZooModel:
    """A model of one sequence of ids."""
    inputs, example = (MASKED_TEXT, padded_tokens) if masked else (TEXT, tokens)
    return ZooModel(float64(make), inputs, TEXT_SIZES, LONG_TEXT, example)


def common(**more: Any) -> dict[str, Any]:
    """Sizes under the names that most transformers configs share."""
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": DEPTH["layers"],
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
        **more,
    }


NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def _llama() -> nn.Module:
    config = transformers.LlamaConfig(**common(num_key_value_heads=2))
    return transformers.LlamaForCausalLM(config)


def _qwen2() -> nn.Module:
    config = transformers.Qwen2Config(**common(num_key_value_heads=2))
    return transformers.Qwen2ForCausalLM(config)


def _mistral() -> nn.Module:
    config = transformers.MistralConfig(**common(num_key_value_heads=2, sliding_window=8))
    return transformers.MistralForCausalLM(config)


def _gpt2() -> nn.Module:
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=DEPTH["layers"], n_head=4, **off
    )
    return transformers.GPT2LMHeadModel(config)


def _bert() -> nn.Module:
    return transformers.BertForMaskedLM(transformers.BertConfig(**common(**NO_DROPOUT)))


def _t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=DEPTH["layers"], num_heads=4,
        dropout_rate=0.0, decoder_start_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def _vit() -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=DEPTH["layers"],
        num_attention_heads=4, image_size=16, patch_size=4, num_labels=5,
    )  # fmt: skip
    return WithFlags(transformers.ViTForImageClassification(config), interpolate_pos_encoding=True)


def _pixart() -> nn.Module:
    return Denoiser(
        diffusers.PixArtTransformer2DModel(
            num_attention_heads=4, attention_head_dim=8, in_channels=4, out_channels=8,
            num_layers=DEPTH["layers"], cross_attention_dim=32, sample_size=16, caption_channels=24,
            use_additional_conditions=False,
        ),
        added_cond_kwargs={"resolution": None, "aspect_ratio": None},
    )  # fmt: skip


def _sd3() -> nn.Module:
    return Denoiser(
        diffusers.SD3Transformer2DModel(
            sample_size=16, in_channels=4, num_layers=DEPTH["layers"], attention_head_dim=8,
            num_attention_heads=4, joint_attention_dim=24, caption_projection_dim=32,
            pooled_projection_dim=20, out_channels=4, pos_embed_max_size=32,
        )
    )  # fmt: skip


def _cogvideox() -> nn.Module:
    return WithRotary(
        diffusers.CogVideoXTransformer3DModel(
            num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4,
            time_embed_dim=16, text_embed_dim=24, num_layers=DEPTH["layers"],
            max_text_seq_length=64, use_rotary_positional_embeddings=True,
        )
    )  # fmt: skip


def _wan() -> nn.Module:
    return Denoiser(
        diffusers.WanTransformer3DModel(
            num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4,
            text_dim=24, freq_dim=16, ffn_dim=48, num_layers=DEPTH["layers"],
        )
    )  # fmt: skip


IMAGE_SIZES: tuple[Sizes, ...] = (
    {"batch": 1, "height": 5, "width": 3, "text": 7},
    {"batch": 1, "height": 4, "width": 7, "text": 9},
)
LARGE_IMAGE: Sizes = {"batch": 1, "height": 8, "width": 12, "text": 16}
VIDEO_SIZES: tuple[Sizes, ...] = (
    {"batch": 1, "frames": 3, "height": 5, "width": 3, "text": 7},
    {"batch": 1, "frames": 5, "height": 2, "width": 7, "text": 9},
)
LARGE_VIDEO: Sizes = {"batch": 1, "frames": 4, "height": 8, "width": 12, "text": 16}


NAMED: dict[str, ZooModel] = {
    "transformers Llama": text_model(_llama),
    "transformers Qwen2": text_model(_qwen2),
    "transformers Mistral": text_model(_mistral),
    "transformers GPT-2": text_model(_gpt2),
    "transformers BERT": text_model(_bert, masked=True),
    "transformers T5": ZooModel(
        float64(_t5),
        {"input_ids": "int64[batch, source]", "labels": "int64[batch, seq]"},
        ({"batch": 1, "source": 17, "seq": 11}, {"batch": 1, "source": 13, "seq": 19}),
        {"batch": 1, "source": 64, "seq": 32},
        two_texts,
    ),
    "transformers ViT": ZooModel(
        float64(_vit),
        {"pixel_values": "float64[batch, 3, height*4, width*4]", "labels": "int64[batch]"},
        ({"batch": 1, "height": 5, "width": 3}, {"batch": 1, "height": 4, "width": 7}),
        {"batch": 1, "height": 8, "width": 12},
        None,
    ),
    "diffusers PixArt": ZooModel(
        float64(_pixart),
        {
            "hidden_states": "float64[batch, 4, height*2, width*2]",
            "encoder_hidden_states": "float64[batch, text, 24]",
            "encoder_attention_mask": "int64[batch, text]",
            "timestep": "int64[batch]",
            "target": "float64[batch, 8, height*2, width*2]",
        },
        IMAGE_SIZES,
        LARGE_IMAGE,
        text_timesteps,
    ),
    "diffusers SD3": ZooModel(
        float64(_sd3),
        {
            "hidden_states": "float64[batch, 4, height*2, width*2]",
            "encoder_hidden_states": "float64[batch, text, 24]",
            "pooled_projections": "float64[batch, 20]",
            "timestep": "int64[batch]",
            "target": "float64[batch, 4, height*2, width*2]",
        },
        IMAGE_SIZES,
        LARGE_IMAGE,
        timesteps,
    ),
    "diffusers CogVideoX": ZooModel(
        float64(_cogvideox),
        {
            "hidden_states": "float64[batch, frames, 4, height*2, width*2]",
            "encoder_hidden_states": "float64[batch, text, 24]",
            "timestep": "int64[batch]",
            "cosine": "float64[frames, height, width, 16]",
            "sine": "float64[frames, height, width, 16]",
            "target": "float64[batch, frames, 4, height*2, width*2]",
        },
        VIDEO_SIZES,
        LARGE_VIDEO,
        timesteps,
    ),
    "diffusers Wan": ZooModel(
        float64(_wan),
        {
            "hidden_states": "float64[batch, 4, frames, height*2, width*2]",
            "encoder_hidden_states": "float64[batch, text, 24]",
            "timestep": "int64[batch]",
            "target": "float64[batch, 4, frames, height*2, width*2]",
        },
        VIDEO_SIZES,
        LARGE_VIDEO,
        timesteps,
    ),
}
