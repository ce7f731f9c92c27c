"""A second codec of the video demo: a small causal VAE that dcpc trains on the demo's own clips.

It begins as `DctCodec`, and learns what to add to it: between blocks of 4 frames x 8 x 8 pixels and
latents there are causal blocks of `models/vae3d.py`, whose last convolution is zero at first,
beside the transform, which is trained as well. Latents have the shape of `DctCodec`'s.

Clips of 1 and 17 frames at the small sizes are buckets of one compiled model. What was trained is
kept in a file, and taken from there the next time.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import dcpc
from examples.launch import launch
from examples.video_codec import (
    COEFFICIENTS,
    LATENT_RUN,
    RUN,
    SIDE,
    DctCodec,
    VideoCodec,
    folded,
    unfolded,
)
from examples.video_data import SMALL, Clip, clips_of
from models.vae3d import CausalBlock, CausalConv

GROUPS = 4  # of the norms
FILE, TRAINING = "video_vae.pt", "video_vae_clips.pt"
MOST_STEPS = 100_000
LITTLE_NOISE = -8.0  # added to the log variance of the latents


class Causal(nn.Module):
    """Causal blocks between two convolutions; returns zeros until it is trained."""

    def __init__(self, inner: int, width: int, outer: int, depth: int) -> None:
        super().__init__()
        self.first = CausalConv(inner, width, 1)
        self.blocks = nn.Sequential(*(CausalBlock(width, width, GROUPS) for _ in range(depth)))
        self.last = CausalConv(width, outer, 1)
        nn.init.zeros_(self.last.conv.weight)
        nn.init.zeros_(self.last.conv.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Returns `[B, outer, T, Y, X]`."""
        return self.last(F.silu(self.blocks(self.first(x))))


class BlockVAE(nn.Module):
    """The autoencoder, of blocks `[B, 768, T, Y, X]` to latents `[B, channels, T, Y, X]`."""

    def __init__(self, channels: int, width: int, depth: int) -> None:
        super().__init__()
        waves = DctCodec(channels).waves[:, :, None, None, None]
        self.down = nn.Parameter(waves.clone())
        self.up = nn.Parameter(waves.transpose(0, 1).clone())
        self.encoder = Causal(COEFFICIENTS, width, 2 * channels, depth)
        self.decoder = Causal(channels, width, COEFFICIENTS, depth)

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns mean and log variance of the latents."""
        mean, log_variance = self.encoder(x).chunk(2, dim=1)
        return F.conv3d(x, self.down) + mean, log_variance + LITTLE_NOISE

    def decode(self, z: Tensor) -> Tensor:
        """Returns blocks."""
        return F.conv3d(z, self.up) + self.decoder(z)


class BlockLoss(nn.Module):
    """The loss of training it; the draw is an input, so a step repeats."""

    def __init__(self, model: BlockVAE, divergence: float = 1e-6) -> None:
        super().__init__()
        self.model, self.divergence = model, divergence

    def forward(self, x: Tensor, noise: Tensor) -> Tensor:
        """Returns the mean squared error and, weighted, the divergence from a normal."""
        mean, log_variance = self.model.encode(x)
        error = self.model.decode(mean + torch.exp(0.5 * log_variance) * noise) - x
        each = 0.5 * (mean.square() + log_variance.exp() - 1.0 - log_variance)
        return error.square().mean() + self.divergence * each.mean()


@dataclass(frozen=True, slots=True)
class VaeWorkload:
    """What is trained, and for how long.

    Attributes:
        channels: of a latent.
        width: channels of the causal blocks.
        depth: causal blocks of the encoder, and as many of the decoder.
        seconds: of training, about.
        steps: at most.
        blocks_per_step: blocks of 4 frames x 8 x 8 pixels of a global batch.
        learning_rate: of Adam, falling to none along a half cosine.
        seed: of the weights, the draws and the order.
    """

    channels: int = 16
    width: int = 48
    depth: int = 2
    seconds: float = 150.0
    steps: int = MOST_STEPS
    blocks_per_step: int = 9_000
    learning_rate: float = 4e-4
    seed: int = 0

    def make_model(self) -> BlockLoss:
        """Returns the model with its loss; the same weights on every rank."""
        torch.manual_seed(self.seed)
        return BlockLoss(BlockVAE(self.channels, self.width, self.depth))

    def buckets(self, clips: Sequence[Clip]) -> dcpc.Buckets:
        """Returns a bucket for each shape among the clips."""
        inputs = {
            name: f"float32[batch, {channels}, frames, height, width]"
            for name, channels in (("x", COEFFICIENTS), ("noise", self.channels))
        }
        found = {tuple(c.sizes.values()): c.sizes for c in clips}
        return dcpc.Buckets(inputs=inputs, sizes=[found[key] for key in sorted(found)])


class VaeCodec:
    """A trained autoencoder as a `VideoCodec`; runs of 17 frames are coded by themselves."""

    def __init__(self, model: BlockVAE, channels: int) -> None:
        self.channels = channels
        self._model = model.eval()

    def parameters(self) -> Iterator[nn.Parameter]:
        """Returns those of the autoencoder."""
        return self._model.parameters()

    def latent_shape(self, frames: int, height: int, width: int) -> tuple[int, int, int]:
        """Returns latent frames, rows and columns; those of `DctCodec`."""
        return DctCodec(self.channels).latent_shape(frames, height, width)

    @torch.no_grad()
    def encode(self, clip: Tensor) -> Tensor:
        """Returns the means of the latents, `[channels, latent frames, rows, columns]`."""
        self.latent_shape(*clip.shape[1:])  # refuses other lengths
        mean, _ = self._model.encode(_runs(_whole(clip)))
        return mean.transpose(0, 1).flatten(1, 2)

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Returns `[3, frames, 8 * rows, 8 * columns]`; values may lie a little outside -1..1."""
        return unfolded(self._model.decode(_runs(latents)).transpose(0, 1).flatten(1, 2))


class Blocks:
    """Blocks of pixels as they are: what the autoencoder is trained on."""

    channels = COEFFICIENTS

    def latent_shape(self, frames: int, height: int, width: int) -> tuple[int, int, int]:
        """Returns blocks along frames, rows and columns."""
        return DctCodec().latent_shape(frames, height, width)

    def encode(self, clip: Tensor) -> Tensor:
        """Returns `[768, latent frames, rows, columns]`."""
        return _whole(clip)

    def decode(self, latents: Tensor) -> Tensor:
        """Returns the clip."""
        return unfolded(latents)


class Draws(torch.utils.data.Dataset[dict[str, Tensor]]):
    """The clips many times over, each time with other noise, drawn from a sample's own index."""

    def __init__(self, clips: Sequence[Clip], latents: int, passes: int = 1000) -> None:
        self.clips, self.latents, self.passes = clips, latents, passes

    def __len__(self) -> int:
        return len(self.clips) * self.passes

    def dims(self, index: int) -> dict[str, int]:
        """Returns a sample's dims without making it."""
        return self.clips[index % len(self.clips)].sizes

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        x = self.clips[index % len(self.clips)].latents
        generator = torch.Generator().manual_seed(index)
        return {"x": x, "noise": torch.randn(self.latents, *x.shape[1:], generator=generator)}


def psnr(clip: Tensor, decoded: Tensor) -> float:
    """Returns the peak signal-to-noise ratio in dB of a clip in -1..1; whole blocks count."""
    clip = clip[..., : decoded.shape[2], : decoded.shape[3]]
    error = (decoded.clamp(-1, 1) - clip).square().mean()
    return 10 * math.log10(4 / max(float(error), 1e-12))


def mean_psnr(clips: Sequence[Clip], codec: VideoCodec) -> float:
    """Returns the mean over clips of blocks, in dB."""
    found = []
    for clip in clips:
        original = unfolded(clip.latents)
        found.append(psnr(original, codec.decode(codec.encode(original))))
    return sum(found) / len(found)


def train(workload: VaeWorkload, folder: Path) -> int:
    """Trains on one rank of a group, on the clips of a folder; returns the steps; collective."""
    warnings.simplefilter("ignore")
    clips = [Clip(**c) for c in torch.load(folder / TRAINING, mmap=True, weights_only=True)]
    model = workload.make_model()
    compiled = dcpc.compile(model, workload.buckets(clips), backend="eager")
    loader = dcpc.DataLoader(
        Draws(clips, workload.channels),
        compiled,
        tokens_per_step=workload.blocks_per_step,
        mode="inter",
        seed=workload.seed,
    )
    optimizer = torch.optim.Adam(model.parameters(), workload.learning_rate, betas=(0.9, 0.99))
    begin_s, done = time.monotonic(), 0
    for step in loader:
        part = max((time.monotonic() - begin_s) / workload.seconds, done / workload.steps)
        shared = torch.tensor(part)
        dist.broadcast(shared, 0)  # all ranks end together, and have one learning rate
        if shared >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = workload.learning_rate * 0.5 * (1 + math.cos(math.pi * float(shared)))
        compiled.train_step(step, clip=1.0)
        optimizer.step()
        optimizer.zero_grad()
        done += 1
    if dist.get_rank() == 0:
        torch.save(model.model.state_dict(), folder / (FILE + ".part"))
    return done


def load_vae(folder: Path, workload: VaeWorkload) -> VaeCodec:
    """Returns the codec that `trained` left in a folder."""
    model = workload.make_model().model
    model.load_state_dict(torch.load(folder / FILE, weights_only=True)["model"])
    return VaeCodec(model, workload.channels)


def trained(
    paths: Sequence[Path],
    folder: Path,
    workload: VaeWorkload,
    say: Callable[[str], object],
    world: int = 2,
) -> VaeCodec:
    """Returns a codec trained on the videos' clips that are not held out.

    Args:
        paths: of the videos.
        folder: where it is kept; one that was trained on the same videos is taken from there.
        workload: what is trained, and for how long.
        say: told what came of it.
        world: ranks that train.
    """
    folder.mkdir(parents=True, exist_ok=True)
    made_of = repr((workload, [(p.name, p.stat().st_size) for p in paths]))
    file = folder / FILE
    if file.is_file() and torch.load(file, weights_only=True)["made_of"] == made_of:
        say(f"[bold]codec[/]: a VAE trained before, from {file}")
        return load_vae(folder, workload)
    seen, held = small_clips(paths)
    torch.save([asdict(c) for c in seen], folder / TRAINING)
    begin_s = time.monotonic()
    steps = launch(train, world, workload, folder)[0]
    part = folder / (FILE + ".part")
    torch.save({"model": torch.load(part, weights_only=True), "made_of": made_of}, part)
    part.replace(file)
    (folder / TRAINING).unlink()
    codec = load_vae(folder, workload)
    say(
        f"[bold]codec[/]: a VAE of {sum(p.numel() for p in codec.parameters()):,} parameters, "
        f"{steps} steps on {len(seen)} clips in {time.monotonic() - begin_s:.0f} s"
    )
    others = {"fixed DCT, where training began": DctCodec(codec.channels), "trained VAE": codec}
    for kind, clips in (("held out", held), ("trained on", seen[:: max(1, len(seen) // 16)])):
        if clips:
            each = (f"{name} {mean_psnr(clips, c):.2f}" for name, c in others.items())
            say(f"PSNR in dB of {len(clips)} clips {kind}: {', '.join(each)}")
    return codec


def small_clips(paths: Sequence[Path]) -> tuple[list[Clip], list[Clip]]:
    """Returns clips for training and held out, of 1 and 17 frames at the small sizes."""
    found = (
        c
        for path in paths
        for c in clips_of(path, Blocks())
        if c.frames <= RUN and (c.height, c.width) in SMALL
    )
    every = list(found)
    return [c for c in every if not c.held_out], [c for c in every if c.held_out]


def _whole(clip: Tensor) -> Tensor:
    """Returns the blocks of a clip; pixels beyond whole blocks are left out."""
    height, width = (n // SIDE * SIDE for n in clip.shape[2:])
    return folded(clip[..., :height, :width])


def _runs(x: Tensor) -> Tensor:
    """Returns `[runs, channels, latent frames of one, rows, columns]`."""
    return x.unflatten(1, (-1, min(LATENT_RUN, x.shape[1]))).transpose(0, 1)
