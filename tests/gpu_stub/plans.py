"""Run with the stub: prints as JSON the plans for an H100 of models on the card, and on the CPU."""

from __future__ import annotations

import json
import warnings
from dataclasses import asdict

import torch
from torch import nn
from transformers import T5Config, T5ForConditionalGeneration

import dcpc
from models.gpt import GPT, GPTConfig
from models.stdit import RectifiedFlow, STDiT, STDiTConfig, input_specs

CLIPS = STDiTConfig(depth=2, dim=96, heads=4, text_dim=48, text_len=12)


def gpt() -> tuple[nn.Module, dcpc.Buckets, float]:
    """Returns a decoder, its buckets and a rank's bytes."""
    inputs = dict.fromkeys(("input_ids", "labels"), "int64[batch, seq]")
    sizes = [{"seq": 100}, {"seq": 257}, {"seq": 513}]
    return GPT(GPTConfig(dim=128, n_layers=2, n_heads=2)), dcpc.Buckets(inputs, sizes), 25e6


def stdit() -> tuple[nn.Module, dcpc.Buckets, float]:
    """Returns a video model, its buckets and a rank's bytes, for which it recomputes."""
    specs = input_specs(CLIPS, "bfloat16")
    inputs = {n: s for n, s in specs.items() if n not in ("frame_mask", "drop_text")}
    sizes = [{"frames": f, "height": 12, "width": 14} for f in (3, 5)]
    return RectifiedFlow(STDiT(CLIPS)), dcpc.Buckets(inputs, sizes), 40e6


def t5() -> tuple[nn.Module, dcpc.Buckets, float]:
    """Returns an encoder-decoder with learned biases, its buckets and a rank's bytes."""
    config = T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0,
    )  # fmt: skip
    names = {"input_ids": "source", "attention_mask": "source", "labels": "target"}
    inputs = {n: f"int64[batch, {length}]" for n, length in names.items()}
    buckets = dcpc.Buckets(inputs, [{"source": 48, "target": 24}])
    return T5ForConditionalGeneration(config), buckets, 25e6


def planned(device: str) -> dict[str, list[dict[str, object]]]:
    """Returns what the plans of each model's buckets say in numbers, for two ranks."""
    found = {}
    for make in (gpt, stdit, t5):
        with torch.device(device):
            model, buckets, memory = make()
        options = {"memory": memory, "world": 2, "device": "h100", "backend": "eager"}
        plans = dcpc.api.plan(model.bfloat16(), buckets, **options)
        found[make.__name__] = [
            {n: v for n, v in asdict(plan).items() if isinstance(v, int | float)}
            | {"graph": plans.by_bucket[bucket].traced.program.graph_hash}
            for bucket, plan in plans.plans.items()
        ]
    return found


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps({device: planned(device) for device in ("cuda", "cpu")}))
