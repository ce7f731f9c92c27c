"""Trains a small Llama on Python's own source with transformers' Trainer: alone, or on ranks."""

import asyncio
import os
import sys
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import dcpc.hf
from examples.stdlib_source import StdlibSource

VOCABULARY, LONGEST, SAMPLES_PER_STEP = 258, 2048, 16


class MyTrainer(dcpc.hf.TrainerMixin, Trainer):
    buckets = "examples/hf_buckets.yaml"


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=192,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=LONGEST,
        )
    )


def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    ids = [s["input_ids"] for s in samples]  # Llama itself predicts each from those before
    return {"input_ids": pad_sequence(ids, True), "labels": pad_sequence(ids, True, -100)}


def main(steps: int = 20, dtype: torch.dtype = torch.float32) -> list[float]:
    world = int(os.environ.get("WORLD_SIZE", "1"))
    args = TrainingArguments(
        "out/hf_trainer",
        per_device_train_batch_size=SAMPLES_PER_STEP // world,
        max_steps=steps,
        learning_rate=2e-3,
        warmup_steps=2,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    data = StdlibSource(LONGEST, Path(asyncio.__file__).parent)
    trainer = MyTrainer(model().to(dtype), args, collate, data)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    main(dtype=torch.float64 if "--float64" in sys.argv else torch.float32)
