"""Trains the GPT of `examples.train_text` in Lightning's Trainer: alone, or under torchrun."""

import os
import sys
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy

import dcpc
from examples.train_text import BUCKETS, Paragraphs, model


class DcpcStrategy(DDPStrategy):
    """The ranks of DDP without DistributedDataParallel: dcpc sums the gradients."""

    def configure_ddp(self) -> None:
        pass


class Text(lightning.LightningModule):
    compiled: dcpc.CompiledModel

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False  # train_step makes the gradients
        torch.manual_seed(0)
        self.model = model()
        self.losses: list[float] = []

    def configure_optimizers(self) -> Any:  # here the model is on its device
        compiled = dcpc.compile(self.model, dcpc.Buckets.from_yaml(BUCKETS), backend="eager")
        # Not a submodule: it has the parameters of self.model.
        object.__setattr__(self, "compiled", compiled)
        optimizer = torch.optim.AdamW(compiled.parameters(), lr=2e-3)
        return [optimizer], [torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5)]

    def train_dataloader(self) -> dcpc.DataLoader:
        pad = {"input_ids": 0, "labels": -100}
        return dcpc.DataLoader(
            Paragraphs(), self.compiled, samples_per_step=32, pad=pad, weight="labels"
        )

    def transfer_batch_to_device(self, batch: Any, device: torch.device, index: int) -> Any:
        return batch  # train_step moves the inputs

    def training_step(self, step: Any, index: int) -> None:
        result = self.compiled.train_step(step, clip=1.0)
        optimizer: Any = self.optimizers()
        schedule: Any = self.lr_schedulers()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        self.losses.append(float(result.loss))  # the same on every rank
        self.log("loss", result.loss, prog_bar=True, batch_size=step.samples)


def main(steps: int = 20, file: str | None = None) -> list[float]:
    """Returns the losses; goes on from a checkpoint file where there is one, and writes it."""
    trainer = lightning.Trainer(
        accelerator="cpu", devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        strategy=DcpcStrategy(), max_steps=steps, logger=False, enable_checkpointing=False,
    )  # fmt: skip
    text = Text()
    trainer.fit(text, ckpt_path=file if file and Path(file).is_file() else None)
    if file:
        trainer.save_checkpoint(file)
    if trainer.is_global_zero:
        print("losses", *text.losses)
    return text.losses


if __name__ == "__main__":
    main(int(sys.argv[1]) if sys.argv[1:] else 20, sys.argv[2] if sys.argv[2:] else None)
