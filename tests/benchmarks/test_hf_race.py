"""The race of Trainers: what its packing baseline does, and that it runs as a user starts it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.hf_systems import dealt, first_fit

ROOT = Path(__file__).parents[2]
LENGTHS = [7, 3, 10, 1, 4, 4, 2, 9]


def rows():
    return first_fit([torch.arange(n) for n in LENGTHS], 10)


def test_rows_of_the_baseline_are_full_and_have_every_sample_once():
    lengths = [[len(x) for x in row] for row in rows()]
    assert lengths == [[10], [9, 1], [7, 3], [4, 4, 2]]


def test_rows_are_dealt_to_the_rank_that_has_least():
    loads = [[sum(map(len, row)) for row in own] for own in dealt(rows(), 3)]
    assert loads == [[10, 10], [10], [10]]
    assert dealt(rows()[:1], 2)[1] == []


@pytest.mark.slow
@pytest.mark.multirank
@pytest.mark.timeout(500)
def test_quick_race_has_the_same_losses_and_drops_nothing(tmp_path):
    file = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks.hf_race", "--quick", "--json", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())["figures"]
    assert found["loss_difference"] < 1e-4
    assert found["samples_dropped"] == 0
    assert found["padding_share"] < found["padding_share_trainer"]
