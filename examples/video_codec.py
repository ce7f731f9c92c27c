"""From pixels to latents and back: a fixed transform that stands in for a video VAE.

`DctCodec` is no learned encoder. It cuts a clip into blocks of 4 frames x 8 x 8 pixels, as the VAE
of Open-Sora v1.2 does, and keeps the lowest frequencies of each block's 3-D DCT as channels. What
it drops is gone: a decoded clip is a blurred one. Your own encoder is any `VideoCodec`.

Frames are handled causally, as in Open-Sora v1.2: a clip is one frame, or runs of 17; the first
frame of each run stands alone (repeated to a block of 4), the other 16 are 4 blocks. So 1, 17, 34,
51 frames become 1, 5, 10, 15 latent frames.
"""

from __future__ import annotations

import importlib
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from scipy import fft
from torch import Tensor

FRAMES, SIDE = 4, 8  # of a block
RUN = 17  # frames of a run: one alone and 4 blocks of 4
LATENT_RUN = 1 + (RUN - 1) // FRAMES
COLOURS = 3
COEFFICIENTS = COLOURS * FRAMES * SIDE * SIDE

# Rows: brightness, then two differences of colours; orthonormal.
_COLOUR = np.array([[1, 1, 1], [1, 0, -1], [1, -2, 1]], np.float32)
_COLOUR /= np.linalg.norm(_COLOUR, axis=1, keepdims=True)


@runtime_checkable
class VideoCodec(Protocol):
    """What the demo asks of an encoder; a clip is float32 `[3, frames, height, width]` in -1..1.

    Attributes:
        channels: of a latent.
    """

    channels: int

    def latent_shape(self, frames: int, height: int, width: int) -> tuple[int, int, int]:
        """Returns latent frames, rows and columns of a clip of so many frames and pixels."""

    def encode(self, clip: Tensor) -> Tensor:
        """Returns `[channels, latent frames, rows, columns]`, float32."""

    def decode(self, latents: Tensor) -> Tensor:
        """Returns the clip that latents stand for."""


class DctCodec:
    """Lowest frequencies of an orthonormal 3-D DCT of each block; stands in for a VAE.

    Orthonormal: with all 768 channels `decode(encode(clip))` is the clip, and the squares of the
    latents sum up to those of the clip, a run's first frame counted 4 times.

    Attributes:
        channels: of a latent.
        waves: the block that each channel stands for, `[channels, 768]`.
    """

    def __init__(self, channels: int = 16) -> None:
        """Takes the number of channels kept.

        Raises:
            ValueError: more than a block has, or none.
        """
        if not 1 <= channels <= COEFFICIENTS:
            raise ValueError(f"got {channels} channels; expected 1 to {COEFFICIENTS}; pass fewer")
        self.channels = channels
        self.waves = torch.from_numpy(_waves()[_lowest()[:channels]])

    def latent_shape(self, frames: int, height: int, width: int) -> tuple[int, int, int]:
        """Returns latent frames, rows and columns; pixels beyond whole blocks are left out."""
        _check_frames(frames)
        return max(1, frames // RUN * LATENT_RUN), height // SIDE, width // SIDE

    def encode(self, clip: Tensor) -> Tensor:
        """Returns `[channels, latent frames, rows, columns]`."""
        frames, rows, columns = self.latent_shape(*clip.shape[1:])
        x = folded(clip[..., : rows * SIDE, : columns * SIDE])
        return (self.waves @ x.flatten(1)).unflatten(1, (frames, rows, columns))

    def decode(self, latents: Tensor) -> Tensor:
        """Returns `[3, frames, 8 * rows, 8 * columns]`; values may lie a little outside -1..1."""
        x = self.waves.T @ latents.flatten(1)
        return unfolded(x.unflatten(1, latents.shape[1:]))


def folded(clip: Tensor) -> Tensor:
    """Returns each block's pixels as channels, `[768, latent frames, rows, columns]`."""
    x = _whole_blocks(clip).flatten(1, 2)
    frames, rows, columns = x.shape[1] // FRAMES, x.shape[2] // SIDE, x.shape[3] // SIDE
    x = x.reshape(COLOURS, frames, FRAMES, rows, SIDE, columns, SIDE)
    return x.permute(0, 2, 4, 6, 1, 3, 5).reshape(COEFFICIENTS, frames, rows, columns)


def unfolded(x: Tensor) -> Tensor:
    """Returns the clip of blocks, `[3, frames, 8 * rows, 8 * columns]`."""
    frames, rows, columns = x.shape[1:]
    x = x.reshape(COLOURS, FRAMES, SIDE, SIDE, frames, rows, columns)
    x = x.permute(0, 4, 1, 5, 2, 6, 3)
    return _without_repeats(x.reshape(COLOURS, frames * FRAMES, rows * SIDE, columns * SIDE))


def load_codec(place: str) -> VideoCodec:
    """Returns a user's codec from `MODULE:FACTORY`, a callable without arguments.

    Raises:
        ValueError: there is none, or it makes something else.
    """
    name, _, factory = place.partition(":")
    made = getattr(importlib.import_module(name), factory or "codec", None)
    codec = made() if callable(made) else made
    if not isinstance(codec, VideoCodec):
        raise ValueError(
            f"--codec {place}: got {type(codec).__name__}; expected channels, latent_shape, encode "
            "and decode, as of examples.video_codec.VideoCodec; name a callable that makes it"
        )
    return codec


def _waves() -> np.ndarray:
    """Returns the block that each coefficient stands for, float32 `[coefficients, pixels]`."""
    unit = np.eye(COEFFICIENTS, dtype=np.float32)
    unit = unit.reshape(COEFFICIENTS, COLOURS, FRAMES, SIDE, SIDE)
    blocks = fft.idctn(unit, axes=(2, 3, 4), norm="ortho")
    return np.einsum("kctyx,cr->krtyx", blocks, _COLOUR).reshape(COEFFICIENTS, COEFFICIENTS)


def _lowest() -> np.ndarray:
    """Returns the coefficients of a block by frequency, lowest first.

    Frequencies are compared a pixel and a frame: the first along time is as high as the second
    along a row. Those of colours count double, as eyes and video formats have it.
    """
    colour, t, y, x = np.indices((COLOURS, FRAMES, SIDE, SIDE)).reshape(4, -1)
    squared = (t / FRAMES) ** 2 + (y / SIDE) ** 2 + (x / SIDE) ** 2
    return np.lexsort((colour, squared * np.where(colour == 0, 1, 4)))


def _check_frames(frames: int) -> None:
    if frames != 1 and (frames == 0 or frames % RUN):
        raise ValueError(f"got {frames} frames; expected 1 or a multiple of {RUN}; cut the clip")


def _whole_blocks(x: Tensor) -> Tensor:
    """Returns `[3, runs, frames of whole blocks, ...]`: the first frame of a run comes 4 times."""
    runs = x.unflatten(1, (-1, min(RUN, x.shape[1])))
    first = runs[:, :, :1].expand(-1, -1, FRAMES, -1, -1)
    return torch.cat((first, runs[:, :, 1:]), dim=2)


def _without_repeats(x: Tensor) -> Tensor:
    """Returns `[3, frames, ...]` with the first 4 frames of each run as their mean."""
    runs = x.unflatten(1, (-1, min(LATENT_RUN * FRAMES, x.shape[1])))
    first = runs[:, :, :FRAMES].mean(dim=2, keepdim=True)
    return torch.cat((first, runs[:, :, FRAMES:]), dim=2).flatten(1, 2)
