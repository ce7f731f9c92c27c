"""The video demo's model, buckets and settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

import dcpc
from dcpc.runtime.planner.protocol import Compiled
from examples.video_data import Clip
from examples.video_samples import Samples, WordTable
from models.stdit import RectifiedFlow, STDiT, STDiTConfig


@dataclass(frozen=True, slots=True)
class VideoWorkload:
    """What is trained, within how much memory.

    Attributes:
        model: sizes of the STDiT; its channels are the codec's.
        memory_bytes: what a rank may use; the largest buckets need recompute or sp 2 to fit.
        latents_per_step: latent positions (frames x rows x columns) of a global batch; a token is 4
            of them.
        learning_rate: of Adam.
        seed: of the weights and of the samples' order.
    """

    model: STDiTConfig
    memory_bytes: int
    latents_per_step: int = 24_000
    learning_rate: float = 2e-3
    seed: int = 0

    def with_channels(self, channels: int) -> VideoWorkload:
        """Returns the same for latents of so many channels."""
        return replace(self, model=replace(self.model, channels=channels))

    @property
    def words(self) -> WordTable:
        """What stands in for the text encoder."""
        return WordTable(self.model.text_len, self.model.text_dim)

    def buckets(self, clips: Sequence[Clip]) -> dcpc.Buckets:
        """Returns a bucket for each shape among the clips; their batch is left to the planner."""
        latents = f"float32[batch, {self.model.channels}, frames, height, width]"
        one = "float32[batch]"
        inputs = {
            "latents": latents,
            "noise": latents,
            "timestep": one,
            "text": f"float32[batch, {self.model.text_len}, {self.model.text_dim}]",
            "text_mask": f"bool[batch, {self.model.text_len}]",
            "fps": one,
            "pixel_height": one,
            "pixel_width": one,
            "drop_text": "bool[batch]",
        }
        found = {(c.height, c.width, c.frames): c.sizes for c in clips}
        return dcpc.Buckets(inputs=inputs, sizes=[found[key] for key in sorted(found)])

    def make_model(self) -> RectifiedFlow:
        """Returns the model with its loss; the same weights on every rank."""
        torch.manual_seed(self.seed)
        return RectifiedFlow(STDiT(self.model))

    def make_optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        """Returns Adam for a model."""
        trained = [p for p in model.parameters() if p.requires_grad]
        return torch.optim.Adam(trained, self.learning_rate, betas=(0.9, 0.95))

    def compile(self, model: RectifiedFlow, buckets: dcpc.Buckets) -> dcpc.CompiledModel:
        """Returns the compiled model; eager, as Inductor would compile for minutes."""
        return dcpc.compile(model, buckets, memory=self.memory_bytes, backend="eager")

    def loader(self, samples: Samples, compiled: Compiled) -> dcpc.DataLoader:
        """Returns a loader; all loaders of a workload yield the same samples in the same steps.

        Each bucket at its own setting: other rows of the plan table would be more variants to
        compile than a few minutes of training give back.
        """
        return dcpc.DataLoader(
            samples,
            compiled,
            tokens_per_step=self.latents_per_step,
            mode="inter",
            seed=self.seed,
        )


# Without recompute a clip of 51 frames at 136 x 248 takes 112 MB on one rank, with all of it 43 MB.
DEMO = VideoWorkload(
    STDiTConfig(depth=2, dim=96, heads=4, text_dim=48, text_len=16), memory_bytes=41_000_000
)
