"""Small videos for the tests of examples, encoded by PyAV."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import av
import numpy as np


def film(path: Path, pictures: Iterable[np.ndarray]) -> Path:
    """Writes pictures `uint8 [height, width, 3]`, all alike in size, at 25 a second."""
    every = list(pictures)
    with av.open(path, "w") as container:
        stream = container.add_stream("mpeg4", rate=25)
        stream.height, stream.width = every[0].shape[:2]
        for picture in every:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
    return path


def with_square(background: np.ndarray, frames: int) -> Iterator[np.ndarray]:
    """Yields a bright square that moves over a background."""
    for i in range(frames):
        picture = background.copy()
        picture[20:40, i : i + 20] = 255
        yield picture
