"""The long-context example: its data, and the whole of it as a user starts it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from examples.long_context import FULL, QUICK, Trained, text

ROOT = Path(__file__).parents[2]


def test_text_is_consecutive_source_and_what_follows():
    first, second = text(100, 2)
    for batch in (first, second):
        assert batch["input_ids"].shape == batch["labels"].shape == (1, 100)
        assert torch.equal(batch["input_ids"][0, 1:], batch["labels"][0, :-1])
    assert second["input_ids"][0, 0] == first["labels"][0, -1]
    assert b"def " in bytes(text(1000, 1)[0]["input_ids"][0].tolist())


def test_heads_do_not_go_round_the_ranks():
    for setting in (FULL, QUICK):
        assert setting.model.n_heads % 4
        assert setting.length % 8 == 0


def test_error_is_of_the_prediction():
    assert Trained((), (), 110, 100).error == pytest.approx(0.1)


@pytest.mark.slow
@pytest.mark.multirank
@pytest.mark.timeout(600)
def test_one_rank_and_two_cannot_and_four_can():
    command = [sys.executable, "-m", "examples.long_context", "--quick"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    for world in ("1 rank", "2 ranks"):
        line = next(line for line in done.stdout.splitlines() if line.startswith(f"{world}: "))
        assert "needs" in line
    assert done.stdout.count("too little") >= 2
    losses = [float(x) for x in re.search(r"steps: loss ([\d. ]+);", done.stdout)[1].split()]
    assert losses[-1] < losses[0]
    rows = [r for r in done.stdout.splitlines() if re.match(r"│ [0-3] +│", r)]
    assert len(rows) == 4
    for row in rows:
        predicted, measured = (float(x) for x in row.split("│")[2:4])
        assert predicted == pytest.approx(measured, rel=0.005)
