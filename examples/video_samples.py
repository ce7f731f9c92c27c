"""Encoded clips as samples of rectified flow: captions, noise, timesteps.

Deterministic: noise and timestep of a sample are drawn from its own index.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from examples.video_data import Clip
from models.stdit import STEPS, draw

DROP_TEXT = 0.1
_SEED = 1 << 32


def save(clips: Sequence[Clip], path: Path) -> None:
    """Writes clips to a file that every rank maps into memory."""
    torch.save([asdict(c) for c in clips], path)


def load(path: Path) -> list[Clip]:
    """Returns the clips of a file."""
    return [Clip(**fields) for fields in torch.load(path, mmap=True, weights_only=True)]


def tokens(sizes: Mapping[str, int]) -> int:
    """Returns the tokens of a sample: a patch has 1 frame, 2 rows and 2 columns."""
    return sizes["frames"] * -(-sizes["height"] // 2) * -(-sizes["width"] // 2)


def normalised(clips: Sequence[Clip]) -> tuple[Tensor, Tensor]:
    """Returns each channel's mean and standard deviation over the clips for training."""
    flat = torch.cat([c.latents.flatten(1) for c in clips if not c.held_out], dim=1).double()
    return flat.mean(1).float(), flat.std(1).clamp(min=1e-6).float()


class WordTable:
    """Fixed random vectors a word: stands in for a text encoder, and knows nothing of meaning.

    Equal words have equal vectors, so that captions can be told apart and attended to.
    """

    def __init__(self, length: int, width: int) -> None:
        self.length, self.width = length, width

    def __call__(self, caption: str) -> tuple[Tensor, Tensor]:
        """Returns `[length, width]`, and True for a word where the rest is padding."""
        words = caption.lower().split()[: self.length] or [""]
        text = torch.zeros(self.length, self.width)
        for i, word in enumerate(words):
            digest = hashlib.blake2b(word.encode(), digest_size=7).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
            text[i] = torch.randn(self.width, generator=generator)
        return text, torch.arange(self.length) < len(words)


class Samples(Dataset[dict[str, Tensor]]):
    """The clips as inputs of `RectifiedFlow`, each many times over with other noise.

    Sample i is clip `i % len(clips)`; its noise, timestep and whether it goes without its caption
    are drawn from a generator seeded with i, so they are the same on every rank and in every run.
    """

    def __init__(
        self, clips: Sequence[Clip], scale: tuple[Tensor, Tensor], words: WordTable, passes: int = 1
    ) -> None:
        """Takes encoded clips and what to normalise their channels by."""
        self.clips, self.words, self.passes = clips, words, passes
        self.mean, self.std = (x[:, None, None, None] for x in scale)

    def __len__(self) -> int:
        return len(self.clips) * self.passes

    def dims(self, index: int) -> dict[str, int]:
        """Returns a sample's dims without making it."""
        return self.clips[index % len(self.clips)].sizes

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        clip = self.clips[index % len(self.clips)]
        return self._inputs(clip, torch.Generator().manual_seed(_SEED + index), None)

    def evaluated(self, index: int, tau: float) -> dict[str, Tensor]:
        """Returns a clip with its caption, noise of its own and a given part of noise."""
        return self._inputs(self.clips[index], torch.Generator().manual_seed(index), tau)

    def denormalised(self, latents: Tensor) -> Tensor:
        """Returns latents as the codec made them."""
        return latents * self.std + self.mean

    def _inputs(
        self, clip: Clip, generator: torch.Generator, tau: float | None
    ) -> dict[str, Tensor]:
        latents = (clip.latents - self.mean) / self.std
        area = torch.tensor([float(clip.height * clip.width)])
        drawn = draw(latents[None], area, clip.frames, generator, DROP_TEXT)
        random = {name: x[0] for name, x in drawn.items()}
        if tau is not None:
            random["timestep"] = torch.tensor(tau * STEPS)
            random["drop_text"] = torch.tensor(False)
        text, mask = self.words(clip.caption)
        numbers = {"fps": clip.fps, "pixel_height": clip.height, "pixel_width": clip.width}
        fixed = {name: torch.tensor(float(x)) for name, x in numbers.items()}
        return {"latents": latents, "text": text, "text_mask": mask, **random, **fixed}
