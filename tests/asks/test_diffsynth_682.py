"""DiffSynth-Studio #682: mixed resolutions with more than one sample a batch."""

import warnings
from collections.abc import Sequence

import pytest
from torch import Tensor

import dcpc
from tests.cases import video_models as video
from tests.cases.asks import entry, trained
from tests.cases.exactness import SPLITTING
from tests.cases.launch import run_ranks

pytestmark = pytest.mark.multirank

DIMS = ("frames", "height", "width")
IMAGES = [(1, 6, 6), (1, 4, 9), (1, 8, 5)]
CLIPS = [(3, 11, 6), (2, 6, 13)]


class Mixed:
    """Samples of the given (frames, height, width) in turn."""

    def __init__(self, shapes: Sequence[tuple[int, int, int]], count: int) -> None:
        self.shapes = [shapes[i % len(shapes)] for i in range(count)]

    def __len__(self) -> int:
        return len(self.shapes)

    def dims(self, i: int) -> dict[str, int]:
        return dict(zip(DIMS, self.shapes[i], strict=True))

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        drawn = video.data({"batch": 1, **self.dims(i)}, seed=i)
        return {name: x[0] for name, x in drawn.items()}


def training(
    rank: int, shapes: list[tuple[int, int, int]], count: int, options: dict[str, object]
) -> tuple[float, list[list[tuple[str, int]]], int, set[int]]:
    """The largest error, bucket and samples of each step's micro-batches, padding and degrees."""
    warnings.simplefilter("ignore")
    sizes = [dict(zip(DIMS, shape, strict=True)) for shape in shapes]
    compiled = dcpc.compile(
        video.model(), dcpc.Buckets(video.INPUTS, sizes=sizes), backend="eager", verify="off",
        **options,
    )  # fmt: skip
    data = Mixed(shapes, count)
    loader = dcpc.DataLoader(data, compiled, tokens_per_step=800, shuffle=False)
    steps = list(loader)
    found = trained(compiled, steps, video.model(), data, lambda _: 1)
    assert sorted(found.samples) == list(range(count))
    ran = [[(str(mb.bucket), len(mb.sample_ids)) for mb in s.plan.micro_batches] for s in steps]
    degrees = {mb.sp for s in steps for mb in s.plan.micro_batches}
    return found.worst, ran, loader.stats().padding, degrees


def check(ranks: list[tuple[float, list[list[tuple[str, int]]], int, set[int]]]) -> None:
    for worst, ran, padding, _ in ranks:
        assert worst < 1e-10
        assert padding == 0
        assert any(len({bucket for bucket, _ in step}) > 1 for step in ran), "a step mixes them"
        assert max(count for step in ran for _, count in step) > 1


@pytest.mark.slow
def test_images_of_three_resolutions_in_batches():
    ranks = run_ranks(training, 2, IMAGES, 18, {"sp": 1}, timeout_s=240)
    check(ranks)
    micro_batches = sum(len(step) for step in ranks[0][1])
    assert f"18 images in {micro_batches} micro-batches" in entry(__file__)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["whole", "rounds"])
def test_images_and_clips_in_one_step(mode):
    options = {"parameters": mode, "device": SPLITTING}
    ranks = run_ranks(training, 2, IMAGES + CLIPS, 10, options, timeout_s=300)
    check(ranks)
