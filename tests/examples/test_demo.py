"""The demo and the benchmarks on it, end to end, as a user starts them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.multirank, pytest.mark.timeout(900)]


def run(module: str, *arguments: str) -> str:
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_demo_trains_compares_and_draws(tmp_path):
    text = run("examples.demo", "--seconds", "30", "--out", str(tmp_path))
    for part in ("cut", "variant 1", "training", "imbalance measured", "padded buckets, sp 2"):
        assert part in text
    for name in ("demo_loss.png", "demo_memory.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def figures(module: str, tmp_path: Path) -> dict[str, float]:
    file = tmp_path / "figures.json"
    run(module, "--quick", "--json", str(file))
    return json.loads(file.read_text())["figures"]


def test_throughput_gives_its_figures(tmp_path):
    found = figures("benchmarks.throughput", tmp_path)
    assert found["speedup_over_padded_bucket"] > 0
    assert found["speedup_over_ddp"] > 0
    assert found["wire_bytes_ratio"] > 1
    assert 0 <= found["imbalance_measured"] < 1
