"""Folders of checkpoints: crashes, damage, what is removed, what is refused; on one rank."""

import io
import os
import pickle
import sys
import warnings
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from dcpc.errors import CheckpointError, DataError
from dcpc.runtime.checkpoint.folders import fingerprint, read_manifest, write_manifest
from tests.cases.resuming import Dropped, Training

FILES = ("__0_0.distcp", "state.pt", ".metadata", "checkpoint.json")


@pytest.fixture(scope="module")
def made() -> Training:
    return Training()


class CrashError(RuntimeError):
    """The process is dead: nothing of it reaches the disk any more."""


class Crashing:
    """Lets so many changes of a folder happen, then none; an audit hook cannot be removed."""

    def __init__(self) -> None:
        self.folder, self.left = "", -1
        sys.addaudithook(self.see)

    def see(self, event: str, args: tuple[Any, ...]) -> None:
        removes = event in ("os.remove", "os.rmdir")  # of a name in a folder that is open
        if not self.folder or not (removes or self.folder in str(args[:1])):
            return
        writes = event == "open" and (args[2] or 0) & (os.O_WRONLY | os.O_RDWR)
        if writes or removes or event in ("os.mkdir", "os.rename"):
            if self.left <= 0:
                raise CrashError(f"{event} {args[0]}")
            self.left -= 1


CRASHING = Crashing()


def shake(training: Training, by: float) -> None:
    with torch.no_grad():
        for p in training.compiled.parameters():
            p.fill_(by)


def value(training: Training) -> float:
    return float(training.compiled.module.up.weight.detach()[0, 0])


def test_a_crash_at_any_write_leaves_one_that_is_whole(made, tmp_path):
    """Every file that is made, renamed or removed, in turn, is what the process dies at."""
    outcomes = []
    for writes in range(100):
        folder = tmp_path / f"{writes}"
        shake(made, 1.0)
        made.compiled.save(folder, 1, keep=1, **made.parts, wait=True)
        shake(made, 2.0)
        CRASHING.folder, CRASHING.left = str(folder), writes
        try:
            made.compiled.save(folder, 2, keep=1, **made.parts, wait=True)
            crashed = False
        except (CheckpointError, CrashError):
            crashed = True
        finally:
            CRASHING.folder = ""
        shake(made, 3.0)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # nothing is damaged
            step = made.compiled.load(folder, **made.parts).step
        assert value(made) == float(step)
        outcomes.append(step)
        made.compiled.save(folder, 3, keep=1, **made.parts, wait=True)
        assert [p.name for p in folder.iterdir()] == ["step-00000003"]
        if not crashed:
            break
    assert not crashed, "in the end all of it is written"
    assert outcomes == sorted(outcomes)
    assert outcomes.count(1) > 5, "before it was renamed"
    assert outcomes.count(2) > 3, "while the older one was removed"


def test_one_that_is_saved_again_is_replaced_and_never_missing(made, tmp_path):
    steps = set()
    for writes in range(100):
        folder = tmp_path / f"{writes}"
        shake(made, 1.0)
        made.compiled.save(folder, 1, wait=True)
        shake(made, 2.0)
        CRASHING.folder, CRASHING.left = str(folder), writes
        try:
            made.compiled.save(folder, 1, wait=True)
            crashed = False
        except (CheckpointError, CrashError):
            crashed = True
        finally:
            CRASHING.folder = ""
        shake(made, 3.0)
        assert made.compiled.load(folder).step == 1
        steps.add(value(made))
        if not crashed:
            break
    assert steps == {1.0, 2.0}


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)


@pytest.mark.parametrize("damage", [cut, flip, os.remove], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_one_is_named_and_passed_over(made, tmp_path, name, damage):
    for step in (1, 2):
        shake(made, step)
        made.compiled.save(tmp_path, step, **made.parts, wait=True)
    damage(tmp_path / "step-00000002" / name)
    with pytest.warns(UserWarning, match=rf"passed over: .*step-00000002: {name}"):
        assert made.compiled.load(tmp_path, **made.parts).step == 1
    assert value(made) == 1.0
    made.compiled.save(tmp_path, 3, keep=1, **made.parts, wait=True)
    left = {p.name for p in tmp_path.iterdir()}
    assert left == {"step-00000002", "step-00000003"}, "damaged ones are not counted, and stay"
    cut(tmp_path / "step-00000003" / name)
    with pytest.raises(CheckpointError, match=r"2 checkpoints, all damaged .*step-00000003"):
        made.compiled.load(tmp_path)


def test_the_last_ones_stay(made, tmp_path):
    for step in (5, 10, 15, 20):
        made.compiled.save(tmp_path, step, keep=2)
    made.compiled.save(tmp_path, 20, keep=2, wait=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000015", "step-00000020"]
    made.compiled.save(tmp_path, 7, keep=1, wait=True)  # one goes back, and later ones stay
    assert len([*tmp_path.iterdir()]) == 3


def test_without_a_checkpoint_training_starts_only_where_that_is_asked_for(made, tmp_path, caplog):
    caplog.set_level("INFO", "dcpc")
    shake(made, 4.0)
    made.compiled.save(tmp_path / "lr 3e-4", 7, wait=True)
    (tmp_path / "lr 3e-4" / ".step-00000009-tmp").mkdir()  # of a crash
    (tmp_path / "notes.txt").write_text("")
    (tmp_path / "other").mkdir()
    for name, text in {
        "lr 3e4": rf"no such folder \({str(tmp_path)!r} holds 'lr 3e-4' with step-00000007, 'o",
        "lr 3e4/a/b": rf"no such folder \({str(tmp_path)!r} holds 'lr 3e-4' with step-00000007",
        "other/deep": rf"no such folder \({str(tmp_path / 'other')!r} holds no folder\)",
        "other": "a folder without a whole checkpoint .*/other' holds nothing",
        "": r"a folder without a whole checkpoint .*lr 3e-4' with step-00000007, 'notes.txt', 'o",
    }.items():
        with pytest.raises(CheckpointError, match=f"got {text}.* pass missing='start' to begin"):
            made.compiled.load(tmp_path / name, **made.parts)
        found = made.compiled.load(tmp_path / name, **made.parts, missing="start")
        assert (found.step, found.extra, found.folder) == (0, None, None)
        assert "training starts at step 0" in caplog.records[-1].message
    for missing in ("error", "start"):
        one = tmp_path / "lr 3e-4" / "step-00000007"
        with pytest.raises(CheckpointError, match=r"a checkpoint, which .*4' holds; .*name$"):
            made.compiled.load(one, missing=missing)
        assert made.compiled.load(tmp_path / "lr 3e-4", missing=missing).step == 7
    assert "goes on from" in caplog.records[-1].message
    assert len(caplog.records) == 7, "each is logged once"
    with pytest.raises(CheckpointError, match="missing='begin'; expected one of error, start"):
        made.compiled.load(tmp_path, missing="begin")
    assert value(made) == 4.0


class Hostile:
    """Runs what it says when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, (os.environ["DCPC_HOSTILE"],)


def replaced(folder: Path, name: str, content: bytes) -> None:
    """Replaces a file and makes the manifest true again, as one who can write there may do."""
    manifest = read_manifest(folder)
    (folder / name).write_bytes(content)
    manifest["files"][name] = fingerprint(folder / name)
    write_manifest(folder, manifest)


def saved_by_torch(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


@pytest.mark.parametrize("name", [".metadata", "state.pt", "__0_0.distcp", "a parameter group"])
def test_no_pickle_is_run(made, tmp_path, name, monkeypatch):
    trap = tmp_path / "trap"
    monkeypatch.setenv("DCPC_HOSTILE", str(trap))
    folder = made.compiled.save(tmp_path / "c", 1, **made.parts, wait=True).folder
    if name == ".metadata":
        replaced(folder, name, pickle.dumps(Hostile()))
        assert made.compiled.load(tmp_path / "c", **made.parts).step == 1
    else:
        file = "__0_0.distcp" if name == "a parameter group" else name
        replaced(folder, file, saved_by_torch(Hostile()))
        manifest = read_manifest(folder)
        size = (folder / file).stat().st_size
        for row in manifest["tensors"].values():
            if name == "a parameter group" and "place" in row:
                row["place"] = [file, 0, size]
            elif name == file and "chunks" in row:
                row["chunks"] = [[*c[:2], file, 0, size] for c in row["chunks"]]
        write_manifest(folder, manifest)
        with pytest.raises(CheckpointError, match="UnpicklingError"):
            made.compiled.load(tmp_path / "c", **({} if name == file else made.parts))
    assert not trap.exists()
    pickle.loads(pickle.dumps(Hostile()))
    assert trap.exists(), "the trap works"


def test_torch_alone_reads_it(tmp_path):
    one = Training()
    for step in one.loader:
        one.compiled.train_step(step)
        one.optimizer.step()
    folder = one.compiled.save(tmp_path, 1, **one.parts, wait=True).folder
    model = Dropped()
    used = [p for n, p in model.named_parameters() if n != "unused"]
    names = {n for n, _ in model.named_parameters()} - {"unused"}
    optimizer = torch.optim.AdamW(used, lr=1.0)
    empty = get_optimizer_state_dict(model, optimizer)
    state = {"model": get_model_state_dict(model), "optimizer": {"state": empty["state"]}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch is alone
        dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, empty | state["optimizer"])
    own = one.compiled.module
    for name, p in model.named_parameters():
        q = own.get_parameter(name)
        assert torch.equal(p, q)
        if name in names:
            for key in ("exp_avg", "exp_avg_sq", "step"):
                assert torch.equal(optimizer.state[p][key], one.optimizer.state[q][key])
    rest = torch.load(folder / "state.pt", weights_only=True)
    assert rest["loader"] == one.loader.state_dict()


def test_what_is_saved_comes_back_as_it_was(tmp_path):
    one = Training()
    extra = {"best": 0.5, 3: (1, None, "x"), "counts": Counter(a=2), "ema": torch.arange(3.0)}
    scheduler = torch.optim.lr_scheduler.MultiStepLR(one.optimizer, [2, 2, 5])
    scheduler.step()
    one.compiled.save(tmp_path, 3, scheduler=scheduler, extra=extra)
    extra["best"] = 0.7  # saved before
    scheduler.step()
    found = one.compiled.load(tmp_path, scheduler=scheduler)  # waits
    assert found.extra.pop("ema").tolist() == [0.0, 1.0, 2.0]
    assert found.extra == {"best": 0.5, 3: (1, None, "x"), "counts": Counter(a=2)}
    assert scheduler.last_epoch == 1
    assert scheduler.milestones == Counter({2: 2, 5: 1})


def an_epoch(folder: Path, name: str, options: dict[str, Any]) -> list[float]:
    """Returns losses; saves after the second step, or goes on from there."""
    one, losses = Training(rate=0.0), []
    made = getattr(torch.optim, name)(one.compiled.parameters(), lr=1e-2, **options)
    parts = {"optimizer": made, "loader": one.loader}
    done = one.compiled.load(folder, **parts, missing="start").step

    def closure(step: Any) -> torch.Tensor:
        made.zero_grad()
        return one.compiled.train_step(step).loss

    for n, step in enumerate(one.loader, done + 1):
        losses.append(float(made.step(partial(closure, step))))
        if n == 2:
            one.compiled.save(folder, n, optimizer=made, loader=one.loader, wait=True)
    return losses


@pytest.mark.parametrize(
    ("name", "options"),
    [("SGD", {}), ("Adafactor", {}), ("LBFGS", {"max_iter": 2}),
     *(pytest.param(*case, marks=pytest.mark.slow)
       for case in (("SGD", {"momentum": 0.9}), ("Adam", {"amsgrad": True}),
                    ("RMSprop", {"centered": True})))],
)  # fmt: skip
def test_optimizers_go_on(name, options, tmp_path):
    first = an_epoch(tmp_path, name, options)
    then = an_epoch(tmp_path, name, options)
    assert len(then) > 2
    assert then == pytest.approx(first[2:], rel=1e-10)


def test_calls_by_hand_draw_on(tmp_path):
    x = {"ids": torch.arange(8)[None], "labels": torch.arange(8)[None]}
    one, other = Training(), Training(seed=9)
    before = float(one.compiled(**x))
    one.compiled.save(tmp_path, 1, wait=True)
    expected = [float(one.compiled(**x)) for _ in range(2)]
    other.compiled.load(tmp_path)
    assert [float(other.compiled(**x)) for _ in range(2)] == expected
    assert len({before, *expected}) == 3


def test_what_does_not_fit_is_refused(made, tmp_path):
    compiled, parts = made.compiled, made.parts
    compiled.save(tmp_path, 1, optimizer=made.optimizer, wait=True)
    other = Training(width=5)
    with pytest.raises(CheckpointError, match=r"got 'model.up.weight' as torch.float64 \(5, 8\)"):
        other.compiled.load(tmp_path)
    with pytest.raises(CheckpointError, match="got loader=, which was not saved"):
        compiled.load(tmp_path, **parts)
    sgd = torch.optim.SGD(compiled.parameters(), lr=0.1)
    with pytest.raises(CheckpointError, match="got SGD; expected AdamW, which was saved"):
        compiled.load(tmp_path, optimizer=sgd)
    two = torch.optim.AdamW([{"params": [p]} for p in compiled.parameters()])
    with pytest.raises(CheckpointError, match=r"got 7 groups of parameters; expected 1"):
        compiled.load(tmp_path, optimizer=two)
    some = torch.optim.AdamW([*compiled.parameters()][1:])
    with pytest.raises(CheckpointError, match=r"other parameters \('gain': saved alone\)"):
        compiled.load(tmp_path, optimizer=some)
    foreign = torch.optim.AdamW(Dropped().parameters())
    with pytest.raises(CheckpointError, match="that the compiled model has not"):
        compiled.save(tmp_path, 2, optimizer=foreign)
    with pytest.raises(CheckpointError, match="extra: got a value that is no plain one"):
        compiled.save(tmp_path, 2, extra={"path": made})
    for step in (-1, 1.5, True, "3"):
        with pytest.raises(CheckpointError, match="step: got"):
            compiled.save(tmp_path, step)
    with pytest.raises(CheckpointError, match="keep: got 0"):
        compiled.save(tmp_path, 2, keep=0)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="expected a folder to write to"):
        compiled.save(tmp_path / "file", 2)
    state = made.loader.state_dict() | {"samples": 13}
    methods = {"state_dict": lambda _: state}
    with pytest.raises(CheckpointError, match="loader=: got Loader; expected an object with"):
        compiled.save(tmp_path, 2, loader=type("Loader", (), methods)())
    methods["load_state_dict"] = lambda _, state: None
    fake = type("Loader", (), methods)()
    compiled.save(tmp_path, 2, loader=fake, wait=True)
    with pytest.raises(DataError, match="samples=13"):
        compiled.load(tmp_path, loader=made.loader)
    assert [p.name for p in tmp_path.glob(".*")] == []


def test_the_manifest_knows_itself(tmp_path):
    content = {"format": 1, "step": 1, "world": 1, "parameters": "whole", "optimizer": None,
               "files": {}, "tensors": {}}  # fmt: skip
    write_manifest(tmp_path, content)
    assert read_manifest(tmp_path) == content
    write_manifest(tmp_path, content | {"format": 2})
    with pytest.raises(CheckpointError, match="its format is 2, not 1"):
        read_manifest(tmp_path)
    write_manifest(tmp_path, content | {"files": {"../x": {}}})
    with pytest.raises(CheckpointError, match="files of other folders"):
        read_manifest(tmp_path)
    for text in ("", "{}", "[1]", '{"sha256": "", "content": {"format": 1}}', "[" * 10**5):
        (tmp_path / "checkpoint.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"checkpoint\.json"):
            read_manifest(tmp_path)
