"""Parameters shared out over ranks, as a user starts the benchmark."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.parameters import aim
from tests.exact.parameters import MODES, RECOMPUTE, cases, measure, shapes

ROOT = Path(__file__).parents[2]


def test_every_mode_backend_and_recompute_is_compared_with_the_plain_model():
    for world in (2, 4):
        found = cases(world, quick=False)
        eager = {(c.name, c.mode) for c in found if c.backend == "eager"}
        assert eager == {(n, m) for n in ("odd", "GPT", "Llama") for m in MODES}
        full = [c for c in found if c.backend == "eager"]
        assert all(set(c.recompute) == set(RECOMPUTE) for c in full)
        assert all(set(c.steps) == set(shapes(world)) for c in full)
    assert {c.name for c in cases(2, quick=False) if c.backend == "inductor"} == {"GPT", "Llama"}
    assert {c.mode for c in cases(2, quick=True)} == set(MODES)


def test_steps_mix_degrees_and_leave_a_rank_without_work():
    for world in (2, 4):
        found = shapes(world)
        assert len({len(ranks) for _, _, ranks in found["mixed degrees"]}) > 1
        assert {r for *_, ranks in found["a rank with none"] for r in ranks} == {0}
        counts = [sum(r in ranks for *_, ranks in found["unequal numbers"]) for r in range(world)]
        assert max(counts) > min(counts)


def test_what_misses_its_aim_is_told():
    assert aim("wire_bytes_off", 0) == ("<= 0", "")
    assert aim("wire_bytes_off", 1) == ("<= 0", "missed")
    assert aim("largest_model_over_whole", 2.5) == (">= 3", "missed")


@pytest.mark.slow
@pytest.mark.multirank
def test_each_mode_has_the_plain_models_numbers():
    found = measure(quick=True)
    assert len(found) >= 8
    assert max(error for _, error, _ in found) < 1e-10


@pytest.mark.slow
@pytest.mark.multirank
@pytest.mark.timeout(500)
def test_quick_benchmark_keeps_its_limits(tmp_path):
    file = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks.parameters", "--quick", "--json", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())["figures"]
    assert found["worst_relative_error"] < 1e-10
    assert found["cases"] >= 8
    assert found["rest_bytes_over_ideal"] <= 1.01
    assert found["max_error_peak_eager"] < 0.005
    assert found["wire_bytes_off"] == 0
    assert found["largest_model_over_whole"] >= 3
    assert "missed: the largest" not in done.stdout
