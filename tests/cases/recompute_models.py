"""The models of `benchmarks.recompute`, their inputs and lengths.

Sizes are such that activations outweigh parameters at every length: torch's ratio does nothing
where they do not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
import transformers
from torch import Tensor, nn

from dcpc.buckets import Sizes
from models.gpt import GPT, GPTConfig
from models.stdit import RectifiedFlow, STDiT, STDiTConfig, input_specs
from tests.cases.memory_models import video_inputs

VOCAB = 258
TEXT = {"input_ids": "int64[batch, seq]", "labels": "int64[batch, seq]"}
VIDEO = STDiTConfig(depth=2, dim=96, heads=4, text_dim=48, text_len=12)


@dataclass(frozen=True, slots=True)
class Subject:
    """One model to measure.

    Attributes:
        make: returns it.
        inputs: spec of each argument.
        example: values of the inputs at some sizes.
        lengths: sizes, batch included, the shortest first.
    """

    make: Callable[[], nn.Module]
    inputs: Mapping[str, str]
    example: Callable[[Sizes], dict[str, Tensor]]
    lengths: tuple[Sizes, ...]


def _gpt(layers: int = 4) -> nn.Module:
    return GPT(GPTConfig(vocab_size=VOCAB, dim=128, n_layers=layers, n_heads=4))


def _llama(layers: int = 4) -> nn.Module:
    """Two query heads to a K/V head."""
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=128, intermediate_size=352, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=4096,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def _stdit() -> nn.Module:
    """Two spatial and two temporal blocks, and the loss."""
    return RectifiedFlow(STDiT(VIDEO))


def _tokens(sizes: Sizes) -> dict[str, Tensor]:
    return {name: torch.randint(VOCAB, (sizes["batch"], sizes["seq"])) for name in TEXT}


def _video(sizes: Sizes) -> dict[str, Tensor]:
    return video_inputs(VIDEO, sizes)


def _small_video(sizes: Sizes) -> dict[str, Tensor]:
    """Frames of one size."""
    return _video({**sizes, "height": 18, "width": 20})


def _text(batch: int, seq: int) -> Sizes:
    return {"batch": batch, "seq": seq}


def _clip(batch: int, frames: int, height: int, width: int) -> Sizes:
    return {"batch": batch, "frames": frames, "height": height, "width": width}


LENGTHS = (_text(4, 250), _text(2, 600), _text(1, 1500))
VIDEO_INPUTS = {n: s for n, s in input_specs(VIDEO).items() if n not in ("frame_mask", "drop_text")}
SUBJECTS: Mapping[str, Subject] = {
    "GPT": Subject(_gpt, TEXT, _tokens, LENGTHS),
    "Llama": Subject(_llama, TEXT, _tokens, LENGTHS),
    "STDiT": Subject(
        _stdit,
        VIDEO_INPUTS,
        _video,
        (_clip(4, 3, 18, 32), _clip(1, 8, 24, 30), _clip(1, 30, 18, 20)),
    ),
}
# Three blocks, still a first, one between and a last; frames of one size.
QUICK_SUBJECTS: Mapping[str, Subject] = {
    "GPT": Subject(partial(_gpt, 3), TEXT, _tokens, (_text(1, 1000),)),
    "Llama": Subject(partial(_llama, 3), TEXT, _tokens, (_text(1, 1000),)),
    "STDiT": Subject(
        _stdit,
        {n: s.replace("height, width", "18, 20") for n, s in VIDEO_INPUTS.items()},
        _small_video,
        ({"batch": 1, "frames": 16},),
    ),
}
