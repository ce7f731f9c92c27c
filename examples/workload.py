"""The main job's model, buckets and data: shared by the demo and the throughput benchmark."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

import dcpc
from dcpc.runtime.planner.plans import Mode
from dcpc.runtime.planner.protocol import Compiled
from examples.stdlib_source import PAD, StdlibSource
from models.gpt import GPT, GPTConfig

INPUTS = {"input_ids": "int64[batch, seq]", "labels": "int64[batch, seq]"}


@dataclass(frozen=True, slots=True)
class Workload:
    """What is trained, on what, within how much memory.

    Attributes:
        model: sizes of the GPT.
        lengths: of the shape buckets.
        memory_bytes: what a rank may use; the longest bucket needs recompute or sp 2 to fit.
        tokens_per_step: of a global batch.
        learning_rate: of Adam.
        seed: of the weights and of the samples' order.
    """

    model: GPTConfig
    lengths: tuple[int, ...]
    memory_bytes: int
    tokens_per_step: int = 16_384
    learning_rate: float = 3e-3
    seed: int = 0

    @property
    def buckets(self) -> dcpc.Buckets:
        """The shape buckets; their batch is left to the planner."""
        return dcpc.Buckets(inputs=INPUTS, sizes=[{"seq": length} for length in self.lengths])

    def make_model(self) -> GPT:
        """Returns the model; the same weights on every rank."""
        torch.manual_seed(self.seed)
        return GPT(self.model)

    def make_optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        """Returns Adam for a model."""
        return torch.optim.Adam(model.parameters(), self.learning_rate, betas=(0.9, 0.95))

    def compile(self, model: GPT) -> dcpc.CompiledModel:
        """Returns the compiled model.

        Eager: Inductor gains 3 to 10% here and takes 22 s a variant, of which this job has four, on
        one core of a 2-core machine: more than it gives back in a few minutes.
        """
        return dcpc.compile(model, self.buckets, memory=self.memory_bytes, backend="eager")

    def loader(
        self, dataset: StdlibSource, compiled: Compiled, mode: Mode = "auto"
    ) -> dcpc.DataLoader:
        """Returns a loader; all loaders of a workload yield the same samples in the same steps."""
        return dcpc.DataLoader(
            dataset,
            compiled,
            tokens_per_step=self.tokens_per_step,
            mode=mode,
            seed=self.seed,
            pad=PAD,
            weight="labels",
        )


# Two lengths an octave; more would pad still less and make the report longer.
_LENGTHS = (64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)

# A sample of 8,192 bytes takes 230 MB on one rank without recompute, 120 MB on each of two.
DEMO = Workload(GPTConfig(dim=128, n_layers=2, n_heads=4), _LENGTHS, memory_bytes=110_000_000)
# Half as long, for a benchmark that ends within 50 s.
QUICK = replace(
    DEMO,
    lengths=_LENGTHS[:-2],
    memory_bytes=64_000_000,
    tokens_per_step=8_192,
)
