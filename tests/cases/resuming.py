"""A small model with dropout, its data, and a run that saves and goes on; for checkpoints."""

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dcpc

VOCABULARY, EPOCHS = 10, 2


class Dropped(nn.Module):
    """With a scalar, a buffer, and a parameter that no loss uses."""

    def __init__(self, rate: float = 0.2, width: int = 6) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.up = nn.Linear(8, width)
        self.head = nn.Linear(width, VOCABULARY)
        self.drop = nn.Dropout(rate)
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Parameter(torch.randn(3))
        self.register_buffer("shift", torch.randn(8))
        self.double()

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.drop(self.embed(ids) * self.gain + self.shift)
        x = self.head(self.drop(F.gelu(self.up(x))))
        return F.cross_entropy(x.flatten(0, 1), labels.flatten())


class Samples:
    """Twelve of one to eight tokens."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        ids = torch.randint(
            VOCABULARY, (1 + i * 5 % 8,), generator=torch.Generator().manual_seed(i)
        )
        return {"ids": ids, "labels": (ids + 1) % VOCABULARY}


class Training:
    """A compiled model and what it is trained by; mode "rounds/2" is in blocks of 2 ranks."""

    def __init__(
        self, mode: str = "whole", rate: float = 0.2, seed: int = 0, width: int = 6
    ) -> None:
        warnings.filterwarnings("ignore", message="(?s).*(eager|derived|as without dcpc)")
        inputs = dict.fromkeys(("ids", "labels"), "int64[batch, seq]")
        buckets = dcpc.Buckets(inputs, sizes=[{"seq": 3}, {"seq": 8}])
        model = Dropped(rate, width)
        torch.manual_seed(seed)  # of dropout
        mode, _, block = mode.partition("/")
        self.compiled = dcpc.compile(
            model, buckets, backend="eager", parameters=mode, block=int(block) if block else None,
            verify="off",
        )  # fmt: skip
        self.loader = dcpc.DataLoader(
            Samples(), self.compiled, tokens_per_step=14, weight="labels", seed=3, window=4,
            pad={"ids": 0, "labels": -100},
        )  # fmt: skip
        self.optimizer = torch.optim.AdamW(self.compiled.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 20)

    @property
    def parts(self) -> dict[str, Any]:
        return {
            "optimizer": self.optimizer, "loader": self.loader, "scheduler": self.scheduler
        }  # fmt: skip

    def run(
        self, folder: str | Path | None = None, every: int = 3, done: int = 0, **options: Any
    ) -> dict[int, tuple[float, list[int]]]:
        """Returns loss and samples of each step until the last epoch ends."""
        found = {}
        n = done
        while self.loader.epoch < EPOCHS:
            for step in self.loader:
                n += 1
                loss = float(self.compiled.train_step(step).loss)
                found[n] = loss, sorted({i for mb in step.plan.micro_batches
                                         for i in mb.sample_ids})  # fmt: skip
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.scheduler.step()
                if folder is not None and n % every == 0:
                    self.compiled.save(folder, n, **self.parts, **options)
        return found
