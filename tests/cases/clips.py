"""Images beside clips: models that run other code where there is one frame, and their samples."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

import dcpc
from tests.cases import video_models

WIDTH = 8


class Branching(nn.Module):
    """Blocks of space and time; an image has no time, and a gain that clips have not.

    What is embedded goes past all blocks, and its weight is the head's: both ends have it.
    """

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Linear(3, WIDTH)
        self.space = nn.ModuleList(_block() for _ in range(depth))
        self.time = nn.ModuleList(_block() for _ in range(depth))
        self.gain = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = skip = self.embedding(x)
        for place, (space, time) in enumerate(zip(self.space, self.time, strict=True)):
            h = h + space(h + h.mean(2, keepdim=True))
            if x.shape[1] > 1:
                h = h + time(0.3 * h.cumsum(1))
            elif place == 2:
                h = h * self.gain
        return ((h + skip) @ self.embedding.weight - y).square().mean()


def _block() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 24), nn.Tanh(), nn.Linear(24, WIDTH))


@dataclass(frozen=True)
class ClipsCase:
    """A model of images and clips.

    Attributes:
        name: of the model.
        images: sizes of buckets of one frame.
        clips: sizes of the others.
    """

    name: str
    images: Sequence[Mapping[str, int]]
    clips: Sequence[Mapping[str, int]]

    @property
    def buckets(self) -> dcpc.Buckets:
        sizes = [{**s, "batch": 2} for s in (*self.images, *self.clips)]
        if self.name == "branching":
            pixels = "float64[batch, frames, size, 3]"
            return dcpc.Buckets({"x": pixels, "y": pixels}, sizes)
        return dcpc.Buckets(video_models.INPUTS, sizes)

    def make(self) -> nn.Module:
        if self.name == "branching":
            return Branching().double()
        return video_models.model(replace(video_models.TINY, depth=2))

    def data(self, sizes: Mapping[str, int], seed: int) -> dict[str, Tensor]:
        if self.name != "branching":
            return video_models.data(sizes, seed)
        draw = torch.Generator().manual_seed(seed)
        shape = (sizes["batch"], sizes["frames"], sizes["size"], 3)
        return {n: torch.randn(shape, generator=draw, dtype=torch.float64) for n in ("x", "y")}

    def batches(self) -> "ClipBatches":
        """Batches of four samples: both kinds, images alone, both, clips alone, both."""
        kinds = "icic iiii cici cccc ccic".replace(" ", "")
        return ClipBatches(self, kinds)


@dataclass(frozen=True)
class ClipBatches:
    """Samples of a case, each of a kind: `i` for an image, `c` for a clip."""

    case: ClipsCase
    kinds: str

    def __len__(self) -> int:
        return len(self.kinds)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {n: x[0] for n, x in self.case.data({**self.dims(i), "batch": 1}, i).items()}

    def dims(self, i: int) -> dict[str, int]:
        own = self.case.images if self.kinds[i] == "i" else self.case.clips
        return dict(own[i // 2 % len(own)])


CLIPS = {
    "branching": ClipsCase(
        "branching",
        [{"frames": 1, "size": 6}, {"frames": 1, "size": 10}],
        [{"frames": 3, "size": 4}, {"frames": 5, "size": 6}],
    ),
    "stdit": ClipsCase(
        "stdit",
        [{"frames": 1, "height": 4, "width": 6}, {"frames": 1, "height": 8, "width": 8}],
        [{"frames": 2, "height": 4, "width": 4}, {"frames": 4, "height": 8, "width": 6}],
    ),
}
