"""Trains a byte-level GPT on Python's own help texts: alone, or under torchrun on any ranks."""

import sys
from pathlib import Path
from pydoc_data.topics import topics

import torch

import dcpc
from models.gpt import GPT, GPTConfig

BUCKETS = Path(__file__).with_name("buckets.yaml")


def model() -> GPT:
    return GPT(GPTConfig(dim=64, n_layers=2, n_heads=4))


class Paragraphs:
    def __init__(self) -> None:
        texts = [p for text in topics.values() for p in text.split("\n\n")]
        self.samples = [torch.tensor(list(t.encode())) for t in texts if len(t) > 1]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.samples[i][:-1], "labels": self.samples[i][1:]}


def main(steps: int = 20, folder: str | None = None) -> list[float]:
    torch.manual_seed(0)  # every rank starts from the same parameters
    compiled = dcpc.compile(model(), dcpc.Buckets.from_yaml(BUCKETS), backend="eager")
    pad = {"input_ids": 0, "labels": -100}
    loader = dcpc.DataLoader(Paragraphs(), compiled, tokens_per_step=8192, pad=pad, weight="labels")
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=2e-3)
    losses = []
    done = 0
    if folder:  # one command starts and goes on
        parts = {"optimizer": optimizer, "loader": loader}
        done = compiled.load(folder, **parts, missing="start").step
    for n, step in zip(range(done + 1, steps + 1), loader, strict=False):
        losses.append(float(compiled.train_step(step).loss))  # the same on every rank
        optimizer.step()
        optimizer.zero_grad()
        if folder and n % 5 == 0:  # written while training goes on
            compiled.save(folder, n, optimizer=optimizer, loader=loader)
        if compiled.groups.rank == 0:
            print(f"step {step.index}: {step.samples} samples, loss {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    main(folder=sys.argv[1] if sys.argv[1:] else None)
