"""Trains the GPT of `examples.train_text` in a loop of Accelerate: alone, or on ranks."""

import itertools
import sys
from pathlib import Path

import torch
from accelerate import Accelerator

import dcpc
from examples.train_text import BUCKETS, Paragraphs, model


def main(steps: int = 20, folder: str | None = None) -> list[float]:
    # A step of dcpc is one step of the schedule, whatever the number of ranks.
    accelerator = Accelerator(cpu=True, step_scheduler_with_optimizer=False)
    torch.manual_seed(0)
    # On its device and in `save_state`, but not in DistributedDataParallel: dcpc sums gradients.
    net = accelerator.prepare_model(model(), evaluation_mode=True)
    compiled = dcpc.compile(net, dcpc.Buckets.from_yaml(BUCKETS), backend="eager")
    pad = {"input_ids": 0, "labels": -100}
    loader = dcpc.DataLoader(Paragraphs(), compiled, tokens_per_step=8192, pad=pad, weight="labels")
    adam = torch.optim.AdamW(compiled.parameters(), lr=2e-3)
    warmup = torch.optim.lr_scheduler.LinearLR(adam, 0.1, total_iters=5)
    optimizer, schedule = accelerator.prepare(adam, warmup)
    accelerator.register_for_checkpointing(loader)  # the place in the data
    if folder and Path(folder).is_dir():
        accelerator.load_state(folder)
    losses = []
    for step in itertools.islice(loader, steps):
        result = compiled.train_step(step, clip=1.0)  # forward, backward, sum and clip
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(float(result.loss))  # the same on every rank
        accelerator.print(f"step {step.index}: loss {losses[-1]:.4f}")
    if folder:
        accelerator.save_state(folder)
    return losses


if __name__ == "__main__":
    main(folder=sys.argv[1] if sys.argv[1:] else None)
