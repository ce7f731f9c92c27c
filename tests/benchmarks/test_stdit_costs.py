"""What a trace of three pairs of blocks tells of a deeper model is what the deeper one costs."""

import warnings

import pytest
import torch

import dcpc
from benchmarks.stdit_costs import DEVICE, INPUTS, Point, costs_of_levels, priced_of
from dcpc.api import plan
from models.stdit import RectifiedFlow, STDiT, STDiTConfig

POINTS = (Point(15, 144, 3), Point(30, 920, 1), Point(120, 3600, 1), Point(120, 144, 16))


@pytest.mark.slow
def test_three_pairs_tell_six():
    warnings.simplefilter("ignore")
    config = STDiTConfig(depth=6, dim=96, heads=4, text_dim=64, text_len=20)
    with torch.device("meta"):
        model = RectifiedFlow(STDiT(config)).to(torch.bfloat16)
    fields = {"channels": 4, "text_len": 20, "text_dim": 64, "dtype": "bfloat16"}
    inputs = {name: spec.format(**fields) for name, spec in INPUTS.items()}
    sizes = [{"frames": f, "tokens": t} for f in (2, 120) for t in (16, 3600)]
    deep = plan(
        model, dcpc.Buckets(inputs, sizes), memory=1e18, device=DEVICE, sp=1, backend="eager"
    ).runnable.priced
    shallow = priced_of(config, False)
    at = Point(60, 1620, 1).sizes
    for sp in (1, 2):
        levels = costs_of_levels(shallow, False, sp, POINTS)
        study = deep.at(deep.placement(at, sp))
        for k, level in ((0, levels[0]), (study.steps, levels[-1])):
            for point, cost in zip(POINTS, level, strict=True):
                p = study.predict(k, point.sizes)
                assert cost.seconds_s == pytest.approx(p.seconds_s, rel=1e-9)
                assert cost.peak_bytes == p.peak_bytes + p.input_bytes
                assert cost.saved_bytes == p.saved_bytes
                assert cost.wire_bytes == p.wire_bytes
