"""benchmarks.video on a small table by formula: every system's samples, and its figures."""

import pytest

from benchmarks.stdit_costs import Cost, Point, Table
from benchmarks.video import (
    MIXES,
    costs_of,
    draw,
    figures_of,
    rebatch,
    run,
    shapes,
)


def table() -> Table:
    """Costs of a model that is all roofline: seconds by tokens, bytes by tokens and level."""
    costs: dict[int, dict[Point, tuple[Cost, ...]]] = {}
    points = [p for s in shapes() for p in s.points()]
    for sp in (1, 2, 4, 8):
        costs[sp] = {}
        for p in points:
            tokens = p.frames * p.tokens * p.batch
            seconds_s = tokens * (1e-5 + 1e-10 * p.tokens) / sp + 1e-3 * sp
            costs[sp][p] = tuple(
                Cost(seconds_s * (1 + 0.1 * level), tokens / sp * (1e6 - 2.9e5 * level), 0.0, 0.0)
                for level in range(4)
            )
    return Table(tuple(points), costs, 9e9, 2e9)


def test_shapes_are_the_25_of_the_workload_in_ascending_tokens():
    found = shapes()
    tokens = [s.frames * s.tokens for s in found]
    assert len(found) == 25
    assert tokens == sorted(tokens)
    assert {144, 2160, 17280, 405, 48600, 920, 110400, 1620, 194400, 3600, 432000} <= set(tokens)
    assert all(any(p.batch == s.usual for p in s.points()) for s in found)


@pytest.mark.parametrize("mix", MIXES)
def test_mixes_have_their_samples_and_their_weight(mix):
    epoch = draw(mix, shapes(), 1000, 200, 0)
    assert len(epoch.samples) == len(epoch.tokens) == 1200
    images = [b for _, b in epoch.samples if b["frames"] == 1]
    assert len(images) == 1000
    short = sum(b["tokens"] == 144 for b in images)
    assert {"short": short > 350, "long": short < 150, "balanced": 150 < short < 250}[mix]


def test_rebatch_keeps_every_sample_in_order():
    epoch = draw("short", shapes(), 300, 20, 0)
    batches = rebatch(epoch, 50_000)
    assert batches.samples == epoch.samples
    for batch in batches.batches[:-1]:
        assert sum(epoch.tokens[i] for i, _ in batch) >= 50_000


def test_dcpc_trains_all_and_is_ahead_of_each_system_on_each_mix():
    all_shapes = shapes()
    costs = costs_of(table(), all_shapes)
    by_mix = {mix: run(costs, draw(mix, all_shapes, 1000, 40, 0), 3) for mix in MIXES}
    figures = figures_of(by_mix)
    assert figures["samples_dropped"] == 0
    for mix in MIXES:
        found = by_mix[mix]
        assert found["baseline"].dropped == 0
        best = max(figures[f"{mix}_{name}_ratio"] for name in ("intra", "inter", "pac"))
        assert figures[f"{mix}_dcpc_ratio"] > best
        assert found["inter"].samples + found["inter"].dropped == 1040
