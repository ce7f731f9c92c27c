"""Predicted bytes against measured ones, as a user starts the benchmark."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.memory import RECOMPUTE, settings
from tests.cases.memory_models import SUBJECTS

ROOT = Path(__file__).parents[2]


def test_every_model_degree_and_recompute_is_measured_by_both_backends():
    for name in SUBJECTS:
        full = {(s.backend, s.sp, s.recompute) for s in settings(name, quick=False)}
        kinds = {(b, sp, r) for b in ("eager", "inductor") for sp in (1, 2) for r in RECOMPUTE}
        assert full == kinds
        quick = {(s.sp, s.recompute) for s in settings(name, quick=True) if s.backend == "eager"}
        assert quick == {(1, "none"), (2, "half"), (2, "all")}
    assert sum(len(settings(name, quick=False)) for name in SUBJECTS) >= 40


@pytest.mark.slow
@pytest.mark.multirank
@pytest.mark.timeout(900)
def test_quick_benchmark_keeps_its_limits(tmp_path):
    file = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks.memory", "--quick", "--json", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())["figures"]
    assert found["points"] >= 40
    assert found["points_inductor"] >= 1
    assert found["max_error_peak_eager"] < 0.005
    assert found["max_error_peak_inductor"] < 0.1
    assert found["max_underestimate_eager"] < 0.005
    assert found["max_underestimate_inductor"] < 0.02
    assert found["saved_bytes_off"] == 0
