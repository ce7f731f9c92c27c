"""What two shallow models tell of a deeper one is what the deeper one's own profile says."""

import warnings

import pytest

from benchmarks.stdit_costs import Point, deeper, observe, variants_of
from models.stdit import STDiTConfig

POINTS = (Point(15, 144, 3), Point(30, 920, 1), Point(120, 3600, 1), Point(120, 144, 16))


def config(depth: int) -> STDiTConfig:
    return STDiTConfig(depth=depth, dim=96, heads=4, text_dim=64, text_len=20)


def assert_close(found, expected) -> None:
    for a, b in zip(found, expected, strict=True):
        assert a.seconds_s == pytest.approx(b.seconds_s, rel=1e-9)
        assert a.saved_bytes == pytest.approx(b.saved_bytes, rel=1e-9)
        assert a.wire_bytes == pytest.approx(b.wire_bytes, rel=1e-9)
        assert a.peak_bytes == pytest.approx(b.peak_bytes, rel=1e-9)


@pytest.mark.slow
def test_depths_2_and_3_tell_depth_5():
    warnings.simplefilter("ignore")
    observed = {
        depth: observe(variants_of(config(depth), False), depth, False, (1, 2), POINTS)
        for depth in (2, 3, 5)
    }
    for sp in (1, 2):
        shallow = [o for depth in (2, 3) for o in observed[depth] if o.sp == sp]
        levels = deeper(shallow, 5)
        own = [o for o in observed[5] if o.sp == sp]
        assert len(levels) == len(own) > 2
        for found, expected in zip(levels, own, strict=True):
            assert_close(found, expected.costs)
