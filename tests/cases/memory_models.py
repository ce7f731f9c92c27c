"""The models that `benchmarks.memory` predicts and measures, their inputs and their sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import transformers
from torch import Tensor, nn

from dcpc.buckets import Sizes
from models.gpt import GPT, GPTConfig
from models.stdit import RectifiedFlow, STDiT, STDiTConfig, input_specs

VOCAB = 258
TEXT = {"input_ids": "int64[batch, seq]", "labels": "int64[batch, seq]"}
VIDEO = STDiTConfig(depth=1, dim=64, heads=4, text_dim=48, text_len=12)


@dataclass(frozen=True, slots=True)
class Subject:
    """One model to measure.

    Attributes:
        make: returns it, in float32, with so many layers.
        inputs: spec of each argument.
        example: values of the inputs at some sizes.
        sizes: points, batch included; odd, so that shares on two ranks are uneven.
        placed_for: sizes that the placement on two ranks is made for.
    """

    make: Callable[[int], nn.Module]
    inputs: Mapping[str, str]
    example: Callable[[Sizes], dict[str, Tensor]]
    sizes: tuple[Sizes, ...]
    placed_for: Sizes


def _gpt(layers: int) -> nn.Module:
    return GPT(GPTConfig(vocab_size=VOCAB, dim=64, n_layers=layers, n_heads=4))


def _llama(layers: int) -> nn.Module:
    """Two query heads to a K/V head."""
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=176, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=8192,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def _mixtral(layers: int) -> nn.Module:
    """Four experts on grouped products, two of which each token chooses, and their balance."""
    config = transformers.MixtralConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=4,
        output_router_logits=True, max_position_embeddings=8192,
    )  # fmt: skip
    model = transformers.MixtralForCausalLM(config)
    model.set_experts_implementation("grouped_mm")
    return model


def _t5(layers: int) -> nn.Module:
    """So many layers each; its positions are a bias of attention that learns."""
    config = transformers.T5Config(
        vocab_size=VOCAB, d_model=64, d_kv=16, d_ff=160, num_layers=layers, num_heads=4,
        dropout_rate=0.0, decoder_start_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def _stdit(_: int) -> nn.Module:
    """A spatial and a temporal block, however many layers, and its loss."""
    return RectifiedFlow(STDiT(VIDEO))


def _tokens(sizes: Sizes) -> dict[str, Tensor]:
    shape = (sizes["batch"], sizes["seq"])
    return {name: torch.randint(VOCAB, shape) for name in TEXT}


def _two_texts(sizes: Sizes) -> dict[str, Tensor]:
    source = {"batch": sizes["batch"], "seq": sizes["source"]}
    return {"input_ids": _tokens(source)["input_ids"], "labels": _tokens(sizes)["labels"]}


def video_inputs(config: STDiTConfig, sizes: Sizes) -> dict[str, Tensor]:
    """Returns random inputs of an STDiT, without its optional ones."""
    batch = sizes["batch"]
    latents = (batch, config.channels, sizes["frames"], sizes["height"], sizes["width"])
    return {
        "latents": torch.randn(latents),
        "noise": torch.randn(latents),
        "timestep": 1000 * torch.rand(batch),
        "text": torch.randn(batch, config.text_len, config.text_dim),
        "text_mask": torch.ones(batch, config.text_len, dtype=torch.bool),
        "fps": torch.full((batch,), 24.0),
        "pixel_height": torch.full((batch,), 8.0 * sizes["height"]),
        "pixel_width": torch.full((batch,), 8.0 * sizes["width"]),
    }


def _video(sizes: Sizes) -> dict[str, Tensor]:
    batch = sizes["batch"]
    return {
        **video_inputs(VIDEO, sizes),
        "frame_mask": torch.ones(batch, sizes["frames"], dtype=torch.bool),
        "drop_text": torch.zeros(batch, dtype=torch.bool),
    }


def _text(batch: int, seq: int) -> Sizes:
    return {"batch": batch, "seq": seq}


def _pair(batch: int, source: int, seq: int) -> Sizes:
    return {"batch": batch, "source": source, "seq": seq}


def _clip(batch: int, frames: int, height: int, width: int) -> Sizes:
    return {"batch": batch, "frames": frames, "height": height, "width": width}


TEXT_SIZES = (_text(1, 777), _text(3, 203), _text(5, 65), _text(2, 1001))
SUBJECTS: Mapping[str, Subject] = {
    "GPT": Subject(_gpt, TEXT, _tokens, TEXT_SIZES, _text(1, 1024)),
    "Llama": Subject(_llama, TEXT, _tokens, TEXT_SIZES, _text(1, 1024)),
    "T5": Subject(
        _t5,
        {"input_ids": "int64[batch, source]", "labels": "int64[batch, seq]"},
        _two_texts,
        (_pair(1, 401, 203), _pair(3, 203, 101), _pair(2, 65, 301), _pair(5, 133, 35)),
        _pair(1, 512, 256),
    ),
    "STDiT": Subject(
        _stdit,
        input_specs(VIDEO),
        _video,
        (_clip(1, 5, 17, 23), _clip(3, 3, 12, 17), _clip(2, 15, 9, 13), _clip(1, 31, 11, 9)),
        _clip(1, 16, 16, 16),
    ),
}
MIXTURE = Subject(_mixtral, TEXT, _tokens, TEXT_SIZES, _text(1, 1024))
