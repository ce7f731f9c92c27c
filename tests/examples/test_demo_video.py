"""The video demo end to end, on a film of its own, as a user starts it."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("av", reason="decoding needs PyAV: pip install av")

import av
import numpy as np

ROOT = Path(__file__).parents[2]


def film(path: Path, frames: int) -> None:
    """A bright square that moves over noise."""
    noise = np.random.default_rng(0).integers(0, 99, (72, 128, 3), np.uint8)
    with av.open(path, "w") as container:
        stream = container.add_stream("mpeg4", rate=25)
        stream.height, stream.width = noise.shape[:2]
        for i in range(frames):
            picture = noise.copy()
            picture[20:40, i : i + 20] = 255
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "examples.demo_video", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=850)


@pytest.mark.slow
@pytest.mark.multirank
@pytest.mark.timeout(900)
def test_demo_trains_on_own_videos_compares_and_draws(tmp_path):
    film(tmp_path / "square.mp4", 104)
    (tmp_path / "square.txt").write_text("a white square\na white square moves to the right\n")
    done = run("--videos", str(tmp_path), "--seconds", "40", "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    for part in ("stands in for a VAE", "{frames: 15, height: 17, width: 31}", "training"):
        assert part in done.stdout
    for part in ("held-out loss", "full recompute for every bucket", "plain DDP", "demo_video.png"):
        assert part in done.stdout
    assert "none held out" not in done.stdout
    picture = tmp_path / "out" / "demo_video.png"
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_folder_without_videos_ends_with_one_line(tmp_path):
    done = run("--videos", str(tmp_path), "--out", str(tmp_path / "out"))
    assert done.returncode == 1
    assert done.stderr.startswith(f"--videos {tmp_path}: got no file named")
    assert len(done.stderr.splitlines()) == 1
