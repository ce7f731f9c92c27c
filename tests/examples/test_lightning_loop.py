"""Lightning's Trainer: the same losses alone, on two ranks, and gone on with from a checkpoint."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("lightning", reason="pip install lightning")
ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.multirank]


def losses(world: int, *arguments: object) -> list[float]:
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    command = [sys.executable, *launch, "-m", "examples.lightning_loop", *map(str, arguments)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=500)
    assert ran.returncode == 0, ran.stderr
    (line,) = [line for line in ran.stdout.splitlines() if line.startswith("losses ")]
    return [float(x) for x in line.split()[1:]]


def test_same_losses_alone_on_two_ranks_and_resumed(tmp_path):
    alone = losses(1, 6)
    assert alone[-1] < alone[0]
    file = tmp_path / "last.ckpt"
    halves = losses(2, 3, file) + losses(2, 6, file)
    assert halves == pytest.approx(alone, rel=1e-5)
