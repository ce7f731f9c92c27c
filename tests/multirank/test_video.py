"""A split STDiT equals the plain one, and sends at most half of what Ulysses sends."""

import warnings

import pytest
import torch.distributed as dist

import dcpc
from benchmarks.video_placement import changes, switches, ulysses
from dcpc.codegen.collectives import wire_log
from dcpc.passes.placement import Rates, place
from tests.multirank import video_models as video
from tests.multirank.exactness import Split, wrong
from tests.multirank.launch import run_ranks

pytestmark = pytest.mark.multirank

# Odd heights; neither 2 nor 4 ranks divide frames or rows of patches; fewer frames than 4 ranks.
POINTS = [
    {"batch": 1, "frames": 5, "height": 5, "width": 6},
    {"batch": 1, "frames": 3, "height": 9, "width": 4},
    {"batch": 2, "frames": 2, "height": 3, "width": 10},
    {"batch": 1, "frames": 4, "height": 6, "width": 5},
]
# Links so slow that what is sent decides, and work that must be split all the same.
SLOW_LINK = Rates(1e7, 1e9, 1e8, 1e-9, 1e-9)


def split_model(point: int) -> Split:
    sizes = [{n: s for n, s in p.items() if n != "batch"} for p in POINTS]
    buckets = dcpc.Buckets(inputs=video.INPUTS, sizes=sizes)
    return Split(video.model(), buckets, POINTS[point], "eager")


def split_errors(
    rank: int, points: tuple[int, ...], recomputes: tuple[str, ...]
) -> dict[str, float]:
    warnings.simplefilter("ignore")
    split = split_model(points[0])
    assert split.split_values > 100
    return split.errors("stdit", [(POINTS[p], video.data(POINTS[p])) for p in points], recomputes)


def bytes_sent(rank: int) -> dict[str, float]:
    warnings.simplefilter("ignore")
    sizes = {"batch": 1, "frames": 8, "height": 16, "width": 16}
    bucket = {n: s for n, s in sizes.items() if n != "batch"}
    buckets = dcpc.Buckets(inputs=video.INPUTS, sizes=[bucket])
    split = Split(video.model(), buckets, sizes, "eager")
    program, sharding, sp = split.program, split.sharding, dist.get_world_size()
    found: dict[str, float] = {}
    for name, rules in (("dcpc", sharding), ("ulysses", ulysses(program, sharding))):
        split.placement = place(program, rules, sizes, sp, SLOW_LINK)
        wire_log.clear()
        errors = split.errors(name, [(sizes, video.data(sizes))], ("none",))
        found[f"{name} counted"] = wire_log.total_bytes()
        found[f"{name} error"] = max(errors.values())
        found[f"{name} predicted"] = split.variants.predict(split.placement, 0, sizes).wire_bytes
        found[f"{name} switches"] = len(switches(program, split.placement, sizes))
        found[f"{name} cross"] = sum("cross" in n for n, _ in changes(program, split.placement))
    return found


def test_stdit_split_over_two_ranks_equals_the_plain_one():
    assert not wrong(run_ranks(split_errors, 2, (0,), ("none",), timeout_s=280), 1e-10)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("world", [2, 4])
def test_stdit_split_at_every_parity_equals_the_plain_one(world):
    points, recomputes = (0, 1, 2, 3), ("none", "all")
    assert not wrong(run_ranks(split_errors, world, points, recomputes, timeout_s=1700), 1e-10)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("world", [2, 4])
def test_two_switches_a_block_pair_send_less_than_half_of_ulysses(world):
    ranks = run_ranks(bytes_sent, world, timeout_s=1700)
    for found in ranks:
        assert found["dcpc error"] < 1e-10
        assert found["ulysses error"] < 1e-10
        assert found["dcpc switches"] <= 2
        assert found["dcpc cross"] == 0
        for name in ("dcpc", "ulysses"):  # pieces are even, so every rank sends as much
            assert found[f"{name} counted"] == found[f"{name} predicted"]
        assert 0 < found["dcpc counted"] <= found["ulysses counted"] / 2
