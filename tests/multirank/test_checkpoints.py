"""Training that was saved and goes on, against training that never stopped: on ranks."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

import dcpc
from dcpc.errors import CheckpointError, GroupError
from tests.cases.launch import run_ranks
from tests.cases.resuming import EPOCHS, Samples, Training

ROOT = Path(__file__).parents[2]
Losses = dict[int, tuple[float, list[int]]]


def straight(rank: int, mode: str, rate: float) -> Losses:
    """Runs to the end."""
    return Training(mode, rate).run()


def saves(rank: int, mode: str, rate: float, folder: str) -> Losses:
    """Runs to the end and saves on the way, while training goes on."""
    made = Training(mode, rate)
    found = made.run(folder, keep=9)
    made.compiled.save(folder, 1, wait=True)  # waits for those before
    return found


def goes_on(rank: int, mode: str, rate: float, folder: str) -> tuple[int, Losses]:
    """Goes on from the newest, in a process that was seeded otherwise."""
    made = Training(mode, rate, seed=5)
    with torch.no_grad():
        for p in made.compiled.parameters():
            p.add_(1.0)
    done = made.compiled.load(folder, **made.parts).step
    return done, made.run(done=done)


def assert_same(found: Losses, expected: Losses, done: int) -> None:
    assert found.keys() == {n for n in expected if n > done}
    for n, (loss, samples) in found.items():
        assert samples == expected[n][1]
        assert loss == pytest.approx(expected[n][0], rel=1e-10)
    trained = [i for n, (_, samples) in expected.items() if n <= done for i in samples]
    trained += [i for _, samples in found.values() for i in samples]
    assert sorted(trained) == sorted([*range(len(Samples()))] * EPOCHS)


@pytest.mark.multirank
@pytest.mark.parametrize(
    ("before", "after", "rate"),
    [((2, "rounds"), (2, "rounds"), 0.2),
     *(pytest.param(*case, marks=pytest.mark.slow) for case in (
         ((2, "whole"), (2, "whole"), 0.2), ((2, "whole"), (3, "rounds"), 0.0),
         ((2, "step"), (2, "step"), 0.2), ((2, "pull"), (2, "pull"), 0.2),
         ((3, "step"), (1, "whole"), 0.0), ((4, "rounds/2"), (3, "step"), 0.0),
         ((1, "whole"), (4, "rounds/2"), 0.0)))],
)  # fmt: skip
def test_it_goes_on_as_if_it_had_never_stopped(before, after, rate, tmp_path):
    (world, mode), folder = before, str(tmp_path)
    expected = run_ranks(saves, world, mode, rate, folder)[0]
    assert len(expected) > 6
    for newest in sorted(tmp_path.iterdir())[2:]:  # 1 and 3 stay
        newest.rename(tmp_path / f"not {newest.name}")
    world, mode = after
    done, found = run_ranks(goes_on, world, mode, rate, folder)[0]
    assert done == 3
    assert_same(found, expected, done)


def fails(rank: int, folder: str) -> list[str]:
    """Rank 1 cannot write."""
    made, texts = Training(rate=0.0), []
    compiled = made.compiled
    compiled.save(folder, 1, **made.parts, wait=True)
    name = "dcpc.runtime.checkpoint.tensors.fingerprint"
    broken = OSError(28, "No space left on device") if rank else None
    real = compiled.save(folder, 2, **made.parts)
    real.wait()
    with mock.patch(name, side_effect=broken) if rank else mock.patch("os.getpid"):
        third = compiled.save(folder, 3, **made.parts)
        with pytest.raises(CheckpointError) as told:
            third.wait()
        texts.append(str(told.value))
    with pytest.raises(CheckpointError) as told:
        compiled.save(folder, 4, **made.parts)
    texts.append(str(told.value))
    with pytest.raises(GroupError) as other:
        compiled.save(folder, 4 + rank, **made.parts)
    texts.append(str(other.value))
    with pytest.raises(GroupError) as other:
        compiled.save(folder, 5, extra=object() if rank else None)
    texts.append(str(other.value))
    texts.append(str(compiled.load(folder, **made.parts).step))
    compiled.save(folder, 6, wait=True)
    return texts + sees_alone(rank, compiled, Path(folder))


def sees_alone(rank: int, compiled: dcpc.CompiledModel, folder: Path) -> list[str]:
    """Loads from folders of one name, of which one rank alone sees a checkpoint in its own."""
    own, texts, before = folder / f"disk {rank}", [], Path.cwd()
    own.mkdir()
    os.chdir(own)
    try:
        for where in range(2):
            if rank == where:
                shutil.copytree(folder / "step-00000006", own / "runs" / "step-00000006")
            for missing in ("error", "start"):
                with pytest.raises(CheckpointError) as told:
                    compiled.load("runs", missing=missing)
                texts.append(str(told.value))
            shutil.rmtree(own / "runs", ignore_errors=True)
        with pytest.raises(CheckpointError) as told:
            compiled.load("runs")
        texts.append(str(told.value))
        assert compiled.load("runs", missing="start").step == 0
    finally:
        os.chdir(before)
    return texts


@pytest.mark.multirank
def test_what_one_rank_cannot_write_is_an_error_on_every_rank(tmp_path):
    for texts in run_ranks(fails, 2, str(tmp_path)):
        assert all("rank 1: OSError: [Errno 28] No space left" in t for t in texts[:2])
        assert "save step 4" in texts[2]
        assert "extra: got a value that is no plain one" in texts[3]
        assert texts[4] == "2"
        assert all("rank 1 does not see it" in t for t in texts[5:7])
        assert all("got step-00000006 on rank 1, and no checkpoint on" in t for t in texts[7:9])
        assert "got no such folder" in texts[9]
        assert "disk 0" in texts[9], "what rank 0 found is told on both"
    names = {p.name for p in tmp_path.glob("*step*")}
    assert names == {"step-00000001", "step-00000002", "step-00000006"}


def damaged(rank: int, folder: str) -> tuple[int, int]:
    made = Training(rate=0.0)
    with (
        pytest.warns(UserWarning, match=r"passed over.*__1_0.distcp")
        if rank == 0
        else mock.patch("os.getpid")
    ):
        return made.compiled.load(folder, **made.parts).step, made.loader.state_dict()["consumed"]


@pytest.mark.multirank
def test_ranks_pass_over_the_same_damaged_one(tmp_path):
    run_ranks(saves, 2, "step", 0.0, str(tmp_path))
    newest = sorted(tmp_path.iterdir())[-1]
    file = newest / "__1_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    first, second = run_ranks(damaged, 2, str(tmp_path))
    assert first == second
    assert first[0] == 6


KILLED = """
import json, os, signal, sys, time
from tests.cases.resuming import Training

folder, log = sys.argv[1:]
rank, restarts = os.environ["RANK"], int(os.environ["TORCHELASTIC_RESTART_COUNT"])
made = Training("rounds", seed=7 * restarts)
done = made.compiled.load(folder, **made.parts, missing="start").step
train_step = made.compiled.train_step
calls = []

def killed(planned):
    calls.append(planned)
    if restarts == 0 and rank == "1" and len(calls) == 6:
        for _ in range(600):  # the checkpoint of step 3 is written meanwhile
            if os.path.exists(folder + "/step-00000003"):
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.1)
    return train_step(planned)

made.compiled.train_step = killed
found = made.run(folder, done=done)
if rank == "0":
    with open(log, "w") as file:
        json.dump([done, found], file)
"""


@pytest.mark.multirank
@pytest.mark.slow
def test_torchrun_starts_a_killed_rank_again(tmp_path):
    expected = run_ranks(straight, 2, "rounds", 0.2)[0]
    script, log = tmp_path / "train.py", tmp_path / "log.json"
    script.write_text(KILLED)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
        "--max-restarts=1", "--monitor-interval=0.2", str(script), str(tmp_path / "c"), str(log),
    ]  # fmt: skip
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=150, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    assert "Signal 9" in run.stderr or "-9" in run.stderr
    done, found = json.loads(log.read_text())
    assert done == 3
    assert_same({int(n): tuple(v) for n, v in found.items()}, expected, done)
