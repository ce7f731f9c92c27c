"""The models of `benchmarks.gpu_checks`, their inputs and lengths: full ones, and tiny ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import transformers
from torch import Tensor, nn

import dcpc
from dcpc.buckets import BATCH, Sizes
from models.gpt import GPT, GPTConfig
from models.stdit import XL, RectifiedFlow, STDiT, STDiTConfig, input_specs

TEXT = {"input_ids": "int64[batch, seq]", "labels": "int64[batch, seq]"}
# 1.0e9 parameters
GPT_1B = GPTConfig(vocab_size=32_000, dim=2048, n_layers=18, n_heads=16)
GPT_TINY = GPTConfig(vocab_size=258, dim=64, n_layers=2, n_heads=4)
GPT_COMPARED = GPTConfig(vocab_size=258, dim=128, n_layers=2, n_heads=2)  # heads of 64: fused
STDIT_TINY = STDiTConfig(depth=2, dim=96, heads=4, text_dim=48, text_len=12)


@dataclass(frozen=True, slots=True)
class Subject:
    """One model to measure.

    Attributes:
        name: for the tables.
        make: returns it, on the device that is the default.
        inputs: spec of each argument.
        example: values of the inputs at some sizes, on the CPU.
        shapes: to measure, batch included.
        calibrated: lengths to calibrate at, others than these.
        tokens: of a sample of some sizes.
        memory_bytes: of a rank, where recompute is to be chosen.
    """

    name: str
    make: Callable[[], nn.Module]
    inputs: Mapping[str, str]
    example: Callable[[Sizes], dict[str, Tensor]]
    shapes: tuple[Sizes, ...]
    calibrated: tuple[Sizes, ...]
    tokens: Callable[[Sizes], int]
    memory_bytes: int

    @property
    def buckets(self) -> dcpc.Buckets:
        """The shapes to measure, without their batch."""
        return dcpc.Buckets(dict(self.inputs), [_lengths(sizes) for sizes in self.shapes])

    @property
    def calibration_buckets(self) -> dcpc.Buckets:
        """The shapes to calibrate at."""
        return dcpc.Buckets(dict(self.inputs), [dict(sizes) for sizes in self.calibrated])


def _lengths(sizes: Sizes) -> dict[str, int]:
    return {name: size for name, size in sizes.items() if name != BATCH}


def _gpt(config: GPTConfig, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return GPT(config).to(dtype)


def _llama(dtype: torch.dtype) -> nn.Module:
    """Returns a small Llama of transformers, two query heads to a key head of 64."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=258, hidden_size=256, intermediate_size=352, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=2048, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).to(dtype)


def _stdit(config: STDiTConfig, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return RectifiedFlow(STDiT(config)).to(dtype)


def drawn_tokens(vocab: int, sizes: Sizes) -> dict[str, Tensor]:
    """Returns a batch of random tokens and labels."""
    return {name: torch.randint(vocab, (sizes[BATCH], sizes["seq"])) for name in TEXT}


def _clips(config: STDiTConfig, dtype: torch.dtype, sizes: Sizes) -> dict[str, Tensor]:
    batch = sizes[BATCH]
    shape = (batch, config.channels, sizes["frames"], sizes["height"], sizes["width"])
    return {
        "latents": torch.randn(shape, dtype=dtype), "noise": torch.randn(shape, dtype=dtype),
        "timestep": 1000 * torch.rand(batch),
        "text": torch.randn(batch, config.text_len, config.text_dim, dtype=dtype),
        "text_mask": torch.ones(batch, config.text_len, dtype=torch.bool),
        "fps": torch.full((batch,), 24.0),
        "pixel_height": torch.full((batch,), 8.0 * sizes["height"]),
        "pixel_width": torch.full((batch,), 8.0 * sizes["width"]),
    }  # fmt: skip


def _video_specs(config: STDiTConfig, dtype: str) -> dict[str, str]:
    specs = input_specs(config, dtype)
    return {n: s for n, s in specs.items() if n not in ("frame_mask", "drop_text")}


def _clip(batch: int, frames: int, height: int, width: int) -> Sizes:
    return {BATCH: batch, "frames": frames, "height": height, "width": width}


def _patches(sizes: Sizes) -> int:
    return sizes["frames"] * -(-sizes["height"] // 2) * -(-sizes["width"] // 2)


def _length(sizes: Sizes) -> int:
    return sizes["seq"]


def _gpt_subject(
    name: str,
    config: GPTConfig,
    dtype: torch.dtype,
    texts: Sequence[tuple[int, int]],
    calibrated: Sequence[int],
    memory_bytes: int,
) -> Subject:
    """Returns a language model; texts are (batch, seq)."""
    return Subject(
        name, partial(_gpt, config, dtype), TEXT, partial(drawn_tokens, config.vocab_size),
        tuple({BATCH: batch, "seq": seq} for batch, seq in texts),
        tuple({"seq": seq} for seq in calibrated), _length, memory_bytes,
    )  # fmt: skip


def _stdit_subject(
    name: str,
    config: STDiTConfig,
    dtype: torch.dtype,
    clips: Sequence[tuple[int, int, int, int]],
    calibrated: Sequence[tuple[int, int, int]],
    memory_bytes: int,
) -> Subject:
    """Returns a video model; clips are (batch, frames, height, width)."""
    return Subject(
        name, partial(_stdit, config, dtype),
        _video_specs(config, str(dtype).removeprefix("torch.")), partial(_clips, config, dtype),
        tuple(_clip(*clip) for clip in clips),
        tuple(_lengths(_clip(1, *clip)) for clip in calibrated), _patches, memory_bytes,
    )  # fmt: skip


def full(shallow: bool = False) -> tuple[Subject, ...]:
    """Returns the models for a GPU, in bfloat16: short, balanced and long ones of each.

    Args:
        shallow: whether they have few of their layers, for what takes its time for each layer.
    """
    gpt, stdit = (replace(GPT_1B, n_layers=3), replace(XL, depth=2)) if shallow else (GPT_1B, XL)
    named = [f"{n}{' of few layers' * shallow}" for n in ("GPT 1B", "STDiT3-XL/2")]
    texts = ((15, 1000), (5, 3333), (2, 8192), (1, 16384))
    clips = ((3, 15, 18, 32), (1, 15, 45, 80), (1, 30, 45, 80))
    lengths, sizes = (600, 2400, 6000, 24000), ((6, 20, 30), (14, 32, 50), (28, 46, 78))
    return (
        _gpt_subject(named[0], gpt, torch.bfloat16, texts, lengths, 40_000_000_000),
        _stdit_subject(named[1], stdit, torch.bfloat16, clips, sizes, 80_000_000_000),
    )


def compared(name: str, dtype: torch.dtype, layers: int = 2) -> Subject:
    """Returns a small model whose numbers are compared: "gpt", "llama" or "stdit"."""
    texts = ((2, 100), (1, 257), (3, 513))
    clips = ((1, 3, 12, 14), (2, 5, 12, 14), (1, 8, 11, 14))
    if name == "stdit":
        return _stdit_subject(name, STDIT_TINY, dtype, clips, ((4, 10, 16),), 10**9)
    config = replace(GPT_COMPARED, n_layers=layers)
    subject = _gpt_subject(name, config, dtype, texts, (50,), 10**9)
    return subject if name == "gpt" else replace(subject, make=partial(_llama, dtype))


def tiny(dtype: torch.dtype) -> tuple[Subject, ...]:
    """Returns models of seconds: they show that the program works and nothing else."""
    texts, clips = ((2, 100), (1, 300), (1, 900)), ((1, 3, 12, 14), (1, 9, 12, 14))
    sizes = [(frames, 10, 16) for frames in (4, 10)]
    return (
        _gpt_subject("tiny GPT", GPT_TINY, dtype, texts, (50, 800), 7_000_000),
        _stdit_subject("tiny STDiT", STDIT_TINY, dtype, clips, sizes, 20_000_000),
    )
