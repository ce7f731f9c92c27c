"""The video demo end to end, on a film of its own, as a user starts it."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("av", reason="decoding needs PyAV: pip install av")

import numpy as np

from examples.demo_video import main
from tests.cases.films import film, with_square
from tests.cases.fresh import fresh

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.multirank
@pytest.mark.timeout(900)
def test_demo_trains_on_own_videos_compares_and_draws(tmp_path):
    noise = np.random.default_rng(0).integers(0, 99, (72, 128, 3), np.uint8)
    film(tmp_path / "square.mp4", with_square(noise, 104))
    (tmp_path / "square.txt").write_text("a white square\na white square moves to the right\n")
    out = tmp_path / "out"
    found = fresh(main, "--videos", str(tmp_path), "--seconds", "40", "--out", str(out))
    assert {"frames": 15, "height": 17, "width": 31} in [b.sizes for b in found.buckets]
    assert len(found.history.losses) > 0
    assert found.held_out.losses
    assert all(len(x) == len(found.held_out.tokens) > 1 for x in found.held_out.losses.values())
    ours, same_everywhere, alone = (each.name for each in found.compared)
    assert ours == "dcpc"
    assert same_everywhere.endswith("full recompute for every bucket")
    assert alone.startswith("plain DDP")
    assert found.picture == out / "demo_video.png"
    assert found.picture.read_bytes().startswith(b"\x89PNG")


def test_a_folder_without_videos_ends_with_one_line(tmp_path):
    arguments = ["--videos", str(tmp_path), "--out", str(tmp_path / "out")]
    command = [sys.executable, "-m", "examples.demo_video", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=850)
    assert done.returncode == 1
    assert done.stderr.startswith(f"--videos {tmp_path}: got no file named")
    assert len(done.stderr.splitlines()) == 1
