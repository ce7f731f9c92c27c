"""A split STDiT equals the plain one."""

import warnings

import pytest

import dcpc
from tests.cases import video_models as video
from tests.cases.exactness import SplitModel, wrong
from tests.cases.launch import run_ranks

pytestmark = pytest.mark.multirank

# Odd heights; neither 2 nor 4 ranks divide frames or rows of patches; fewer frames than 4 ranks.
POINTS = [
    {"batch": 1, "frames": 5, "height": 5, "width": 6},
    {"batch": 1, "frames": 3, "height": 9, "width": 4},
    {"batch": 2, "frames": 2, "height": 3, "width": 10},
    {"batch": 1, "frames": 4, "height": 6, "width": 5},
]


def split_model(point: int) -> SplitModel:
    sizes = [{n: s for n, s in p.items() if n != "batch"} for p in POINTS]
    buckets = dcpc.Buckets(inputs=video.INPUTS, sizes=sizes)
    return SplitModel(video.model(), buckets, POINTS[point], "eager")


def split_errors(
    rank: int, points: tuple[int, ...], recomputes: tuple[str, ...]
) -> dict[str, float]:
    warnings.simplefilter("ignore")
    split = split_model(points[0])
    assert split.split_values > 100
    return split.errors("stdit", [(POINTS[p], video.data(POINTS[p])) for p in points], recomputes)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("world", [2, 4])
def test_stdit_split_at_every_parity_equals_the_plain_one(world):
    points, recomputes = (0, 1, 2, 3), ("none", "all")
    assert not wrong(run_ranks(split_errors, world, points, recomputes, timeout_s=1700), 1e-10)
