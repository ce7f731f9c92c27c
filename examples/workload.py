"""The main job's model, buckets and data: shared by the demo and the throughput benchmark."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

import dcpc
from dcpc.runtime.planner.protocol import Compiled
from examples.stdlib_source import PAD, StdlibSource
from models.gpt import GPT, GPTConfig

INPUTS = {"input_ids": "int64[batch, seq]", "labels": "int64[batch, seq]"}


@dataclass(frozen=True, slots=True)
class Workload:
    """What is trained, on what, within how much memory.

    Attributes:
        model: sizes of the GPT.
        longest: length of the longest bucket; what is longer is cut.
        memory_bytes: what a rank may use; the longest bucket needs recompute or sp 2 to fit.
        count: of shape buckets.
        tokens_per_step: of a global batch.
        learning_rate: of Adam.
        seed: of the weights and of the samples' order.
    """

    model: GPTConfig
    longest: int
    memory_bytes: int
    count: int = 8
    tokens_per_step: int = 16_384
    learning_rate: float = 3e-3
    seed: int = 0

    def buckets(self, dataset: StdlibSource) -> dcpc.Buckets:
        """Returns the shape buckets that suit the samples; their batch is left to the planner."""
        return dcpc.Buckets.from_lengths(INPUTS, dataset, count=self.count, multiple_of=64)

    @property
    def ladder(self) -> dcpc.Buckets:
        """Two lengths an octave: buckets of a system that pads every sample to one."""
        lengths = (k << n for n in range(4, 12) for k in (4, 6))
        return dcpc.Buckets(INPUTS, [{"seq": n} for n in lengths if n <= self.longest])

    def make_model(self) -> GPT:
        """Returns the model; the same weights on every rank."""
        torch.manual_seed(self.seed)
        return GPT(self.model)

    def make_optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        """Returns Adam for a model."""
        return torch.optim.Adam(model.parameters(), self.learning_rate, betas=(0.9, 0.95))

    def compile(self, model: GPT, dataset: StdlibSource, **options: Any) -> dcpc.CompiledModel:
        """Returns the compiled model.

        Eager: Inductor gains 3 to 10% here and takes 22 s a variant, of which this job has four, on
        one core of a 2-core machine: more than it gives back in a few minutes.

        Args:
            model: of this workload.
            dataset: whose lengths the buckets suit.
            options: of `dcpc.compile` besides.
        """
        buckets = self.buckets(dataset)
        return dcpc.compile(model, buckets, memory=self.memory_bytes, backend="eager", **options)

    def loader(self, dataset: StdlibSource, compiled: Compiled, **options: Any) -> dcpc.DataLoader:
        """Returns a loader; all loaders of a workload yield the same samples in the same steps.

        Args:
            dataset: the samples.
            compiled: what runs them.
            options: of the loader besides.
        """
        return dcpc.DataLoader(
            dataset,
            compiled,
            tokens_per_step=self.tokens_per_step,
            seed=self.seed,
            pad=PAD,
            weight="labels",
            **options,
        )


# A sample of 8,192 bytes takes 230 MB on one rank without recompute, 120 MB on each of two.
DEMO = Workload(GPTConfig(dim=128, n_layers=2, n_heads=4), 8192, memory_bytes=110_000_000)
# Half as long, for a benchmark that ends within 50 s.
QUICK = replace(
    DEMO,
    longest=4096,
    memory_bytes=64_000_000,
    tokens_per_step=8_192,
)
