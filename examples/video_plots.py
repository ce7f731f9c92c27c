"""The video demo's picture: the loss, and frames."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
import torch
from torch import Tensor

matplotlib.use("Agg")

from matplotlib import pyplot as plt

from examples.job import History
from examples.video_codec import DctCodec, VideoCodec
from examples.video_data import Clip, pixels, read
from examples.video_eval import denoised, generated
from examples.video_samples import Samples, tokens
from examples.video_vae import psnr
from models.stdit import RectifiedFlow

SHOWN_TAU = 0.7
SAMPLING_STEPS = 20


@dataclass(frozen=True, slots=True)
class Curve:
    """Losses on held-out clips over training.

    Attributes:
        tokens: trained on at each evaluation.
        losses: by kind.
    """

    tokens: Sequence[int]
    losses: Mapping[str, Sequence[float]]


@dataclass(frozen=True, slots=True)
class Strip:
    """One clip's row of the picture.

    Attributes:
        label: which clip.
        images: title -> uint8 `[height, width, 3]`.
    """

    label: str
    images: Mapping[str, np.ndarray]


def strips(samples: Samples, model: RectifiedFlow, codec: VideoCodec) -> list[Strip]:
    """Returns the middle frame of an image, a short and a long clip held out, as seen and as made.

    Args:
        samples: the clips held out.
        model: trained.
        codec: that made their latents.
    """
    found: dict[int, int] = {}
    for i, clip in enumerate(samples.clips):
        best = found.setdefault(clip.frames, i)
        # Of images the largest; of clips the smallest, which cost least to make.
        better = tokens(clip.sizes) - tokens(samples.clips[best].sizes)
        if better > 0 if clip.frames == 1 else better < 0:
            found[clip.frames] = i
    chosen = [found[n] for n in sorted(found)]
    return [_strip(samples, i, model, codec) for i in (chosen[0], *chosen[1:2], *chosen[2:][-1:])]


def plot(history: History, curve: Curve, rows: Sequence[Strip], path: Path) -> None:
    """Draws the loss above the strips.

    Args:
        history: of training.
        curve: of the evaluations.
        rows: may be empty.
        path: of the PNG.
    """
    columns = max((len(row.images) for row in rows), default=1)
    figure = plt.figure(figsize=(15, 4 + 2 * len(rows)), layout="constrained")
    grid = figure.add_gridspec(1 + len(rows), columns, height_ratios=[2.2] + [1] * len(rows))
    axes = figure.add_subplot(grid[0, :])
    axes.plot([t / 1e3 for t in history.tokens], history.losses, lw=0.8, alpha=0.4, label="a step")
    for kind, losses in curve.losses.items():
        axes.plot([t / 1e3 for t in curve.tokens], losses, "o-", label=f"held-out {kind}")
    axes.set(xlabel="thousand tokens", ylabel="rectified-flow loss")
    axes.set_title("A small STDiT on images and videos of several sizes")
    axes.legend()
    axes.grid(alpha=0.3)
    for r, row in enumerate(rows, start=1):
        for c, (title, image) in enumerate(row.images.items()):
            axes = figure.add_subplot(grid[r, c])
            axes.imshow(image)
            axes.set(xticks=[], yticks=[])
            axes.set_title(title, fontsize="small")
            if c == 0:
                axes.set_ylabel(row.label, fontsize="small")
    figure.savefig(path, dpi=90)
    plt.close(figure)


def _strip(samples: Samples, index: int, model: RectifiedFlow, codec: VideoCodec) -> Strip:
    clip = samples.clips[index]
    sample = samples.evaluated(index, SHOWN_TAU)
    noisy, clean = denoised(model, sample)
    made = generated(model, sample, clip.frames, SAMPLING_STEPS)

    def shown(latents: Tensor) -> np.ndarray:
        return _middle(codec.decode(samples.denormalised(latents)))

    original = _original(clip)
    images = {
        "frame held out": _middle(original),
        **_decoded(original, codec),
        f"its latents, {SHOWN_TAU:.0%} noise": shown(noisy),
        "model's prediction from that": shown(clean),
        f"made from noise, {SAMPLING_STEPS} steps": shown(made),
    }
    return Strip(
        f"{clip.frames} frame{'s' * (clip.frames > 1)}\n{clip.height} x {clip.width}", images
    )


def _decoded(original: Tensor, codec: VideoCodec) -> dict[str, np.ndarray]:
    """Returns the clip encoded and decoded, beside the fixed transform of as many channels."""
    codecs = [codec] if isinstance(codec, DctCodec) else [codec, DctCodec(codec.channels)]
    found = {}
    for each in codecs:
        decoded = each.decode(each.encode(original))
        title = f"{type(each).__name__}: {psnr(original, decoded):.1f} dB"
        found[title] = _middle(decoded)
    return found


def _original(clip: Clip) -> Tensor:
    scaled, _ = read(Path(clip.path))
    return pixels(scaled[clip.height, clip.width][clip.first : clip.first + clip.frames])


def _middle(video: Tensor) -> np.ndarray:
    frame = video[:, video.shape[1] // 2].permute(1, 2, 0)
    return ((frame + 1) * 127.5).round().clamp(0, 255).to(torch.uint8).numpy()
