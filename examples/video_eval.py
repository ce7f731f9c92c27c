"""How good the model is: losses at fixed noise on clips held out, and what it makes of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from dcpc.buckets import Bucket
from examples.video_samples import Samples, tokens
from models.stdit import STEPS, RectifiedFlow, shift_timesteps

TAUS = (0.2, 0.5, 0.8)  # parts of noise at which the loss is taken


class Evaluation:
    """Rectified-flow loss a bucket, on held-out clips, always with the same noise.

    The loss of a training step is noisy: its timesteps, noise and clips differ from the next one's.
    """

    def __init__(self, samples: Samples) -> None:
        """Takes the clips held out."""
        self.samples = samples
        self.buckets = sorted(
            {Bucket.of(c.sizes) for c in samples.clips}, key=lambda b: tokens(b.sizes)
        )

    def __call__(self, model: RectifiedFlow) -> dict[Bucket, float]:
        """Returns the loss of each bucket, the same on every rank; collective.

        The plain model runs, each rank a part of the clips.
        """
        clips = self.samples.clips
        work = [(i, tau) for i in range(len(clips)) for tau in TAUS]
        work.sort(key=lambda item: tokens(clips[item[0]].sizes), reverse=True)
        found = torch.zeros(len(self.buckets), 2, dtype=torch.float64)
        for i, tau in work[dist.get_rank() :: dist.get_world_size()]:
            inputs = batched(self.samples.evaluated(i, tau))
            with torch.no_grad():
                loss = float(model(**inputs))
            found[self.buckets.index(Bucket.of(clips[i].sizes))] += torch.tensor([loss, 1.0])
        dist.all_reduce(found)
        means = found[:, 0] / found[:, 1]
        return dict(zip(self.buckets, means.tolist(), strict=True))


def images_and_videos(losses: Mapping[Bucket, float]) -> dict[str, float]:
    """Returns the mean over the buckets of images, and over those of videos."""
    kinds: dict[str, list[float]] = defaultdict(list)
    for bucket, loss in losses.items():
        kinds["images" if bucket["frames"] == 1 else "videos"].append(loss)
    return {kind: sum(found) / len(found) for kind, found in kinds.items()}


def batched(sample: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns a sample as a batch of one."""
    return {name: x[None] for name, x in sample.items()}


@torch.no_grad()
def denoised(model: RectifiedFlow, sample: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Returns a sample's noisy latents, and the clean ones the model takes them for in one step."""
    inputs = batched(sample)
    clean, noise = inputs.pop("latents"), inputs.pop("noise")
    inputs.pop("drop_text")
    tau = float(inputs["timestep"]) / STEPS
    noisy = (1 - tau) * clean + tau * noise
    velocity = model.model(noisy, **inputs)[:, : clean.shape[1]]
    return noisy[0], (noisy + tau * velocity)[0]


@torch.no_grad()
def generated(
    model: RectifiedFlow, sample: Mapping[str, Tensor], frames: int, steps: int
) -> Tensor:
    """Returns latents made from the sample's noise and caption, without guidance.

    Args:
        model: with its loss.
        sample: its clean latents are not looked at.
        frames: of its clip, in pixels' time.
        steps: of the integration, Euler's.
    """
    inputs = batched(sample)
    del inputs["latents"], inputs["drop_text"], inputs["timestep"]
    x = inputs.pop("noise")
    pixels = inputs["pixel_height"] * inputs["pixel_width"]
    taus = [shift_timesteps(1 - torch.tensor(i / steps), pixels, frames) for i in range(steps + 1)]
    for now, then in pairwise(taus):
        velocity = model.model(x, timestep=now * STEPS, **inputs)[:, : x.shape[1]]
        x = x + velocity * (now - then)[:, None, None, None, None]
    return x[0]
