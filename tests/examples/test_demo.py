"""The demo and the benchmarks on it, end to end, as a user starts them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from examples.demo import main
from tests.cases.fresh import fresh

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.multirank, pytest.mark.timeout(900)]


def test_demo_trains_compares_and_draws(tmp_path):
    found = fresh(main, "--seconds", "30", "--out", str(tmp_path))
    assert found.variants > 1
    history = found.history
    assert len(history.losses) == len(history.imbalances) == len(history.tokens) > 0
    assert all(0 <= share < 1 for share in history.imbalances)
    names = [each.name.partition(",")[0] for each in found.compared]
    assert names == ["dcpc", "padded buckets", "DDP", "plain DDP"]
    assert all(each.tokens > 0 and each.peak_bytes > 0 for each in found.compared)
    assert [file.name for file in found.pictures] == ["demo_loss.png", "demo_memory.png"]
    for file in found.pictures:
        assert file.read_bytes().startswith(b"\x89PNG")


def figures(module: str, tmp_path: Path) -> dict[str, float]:
    file = tmp_path / "figures.json"
    command = [sys.executable, "-m", module, "--quick", "--json", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr
    return json.loads(file.read_text())["figures"]


def test_throughput_gives_its_figures(tmp_path):
    found = figures("benchmarks.throughput", tmp_path)
    assert found["speedup_over_padded_bucket"] > 0
    assert found["speedup_over_ddp"] > 0
    assert found["wire_bytes_ratio"] > 1
    assert 0 <= found["imbalance_measured"] < 1


def test_loop_gives_its_figures(tmp_path):
    found = figures("benchmarks.loop", tmp_path)
    assert found["speedup_over_padded"] > 0
    assert found["speedup_over_grouped_ddp"] == found["speedup_over_grouped_ddp_at_30"] > 0
    assert found["overhead_s_per_microbatch"] < found["microbatch_s"]
    assert found["lines_of_loop"] < found["lines_of_loop_by_hand"]
