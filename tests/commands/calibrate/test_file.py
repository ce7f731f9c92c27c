"""A calibration's file: what is read is what was written, and nothing else is taken for it."""

import json
from dataclasses import asdict, replace

import pytest
import torch

from dcpc.errors import ProfileError
from dcpc.symbolic_profile import (
    CalibratedPoint,
    Calibration,
    CalibrationKey,
    ClassFit,
    CollectiveFit,
    Fits,
)

KEY = CalibrationKey(
    device="cpu",
    machine="some processor, 1 threads",
    world=2,
    dtype="torch.bfloat16",
    backend="eager",
    torch="2.13.0",
    graphs=("abc", "def"),
)
FITS = Fits(
    classes=(
        ClassFit("matmul", True, torch.bfloat16, 1e-6, 2e-12, 3e-11, 1e6, 4e-11),
        ClassFit("attention", False, torch.float32, 0.0, knots=((10.0, 4e-11), (99.5, 1e-11))),
    ),
    collectives=(CollectiveFit("dcpc::all_to_all", 2, 1e-4, 1e-9),),
    flops_per_s=((torch.bfloat16, 1e11),),
    memory_bytes_per_s=2e10,
    launch_s=5e-6,
    error=0.031,
)
CALIBRATION = Calibration(
    KEY, FITS, (CalibratedPoint({"batch": 1, "seq": 64}, 0.5, 0.51),), seconds_s=12.5
)


def test_round_trip(tmp_path):
    file = tmp_path / "made" / "calibration.json"
    CALIBRATION.write(file)
    found = Calibration.read(file)
    assert found.key == KEY
    assert found.points == CALIBRATION.points
    assert found.seconds_s == 12.5
    assert asdict(found.fits) == asdict(FITS)


def test_of_takes_a_file_a_calibration_or_none(tmp_path):
    CALIBRATION.write(tmp_path / "c.json")
    assert Calibration.of(None) is None
    assert Calibration.of(CALIBRATION) is CALIBRATION
    assert Calibration.of(str(tmp_path / "c.json")).key == KEY


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"device": "h200"}, "device cpu (expected h200)"),
        ({"machine": "another"}, "machine some processor, 1 threads (expected another)"),
        ({"world": 4}, "world size 2 (expected 4)"),
        ({"dtype": "torch.float32"}, "dtype torch.bfloat16 (expected torch.float32)"),
        ({"backend": "inductor"}, "backend eager (expected inductor)"),
        ({"torch": "2.14"}, "torch 2.13.0 (expected 2.14)"),
        ({"graphs": ("abc",)}, "another model, of graph hash abc, def (expected abc)"),
    ],
)
def test_stale_one_is_refused_with_the_reason(change, reason):
    with pytest.raises(ProfileError) as caught:
        CALIBRATION.check(replace(KEY, **change))
    assert reason in str(caught.value)
    assert "run `dcpc calibrate` again" in str(caught.value)


def test_right_one_is_taken_and_another_machine_may_plan_for_it():
    CALIBRATION.check(KEY)
    CALIBRATION.check(replace(KEY, machine="a laptop"), anywhere=True)


def damaged(**changes):
    def change(data):
        for path, value in changes.items():
            *way, last = path.split("__")
            at = data
            for step in way:
                at = at[int(step)] if step.isdigit() else at[step]
            at[last] = value

    return change


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (damaged(version=99), "got version 99; expected 3"),
        (damaged(fits__launch_s=-1.0), "fits.launch_s: Input should be greater than or equal to 0"),
        (damaged(fits__error=float("nan")), "fits.error: Input should be a finite number"),
        (damaged(fits__classes__0__dtype="torch.save"), "'torch.save' where a dtype"),
        (damaged(fits__collectives__0__s_per_byte=0), "Input should be greater than 0"),
        (damaged(key=[]), "expected what `dcpc calibrate` wrote"),
        (damaged(fits={}), "fits.classes: Field required"),
        (damaged(version=1), "got version 1; expected 3"),
        (damaged(fits__classes__0__s_per_flop=1e-12), "it was edited since; run `dcpc calibrate`"),
        (damaged(fits__classes=[]), "it was edited since"),
        (damaged(key__world=4), "it was edited since"),
        (damaged(key__world="2"), "it was edited since"),
    ],
)
def test_damaged_file_is_refused(tmp_path, change, reason):
    file = tmp_path / "c.json"
    CALIBRATION.write(file)
    data = json.loads(file.read_text())
    change(data)
    file.write_text(json.dumps(data))
    with pytest.raises(ProfileError) as caught:
        Calibration.read(file)
    assert reason in str(caught.value)


def test_another_layout_of_the_same_contents_is_taken(tmp_path):
    file = tmp_path / "c.json"
    CALIBRATION.write(file)
    file.write_text(json.dumps(json.loads(file.read_text()), sort_keys=True))
    assert Calibration.read(file).key == KEY


def test_no_file_and_no_json(tmp_path):
    with pytest.raises(ProfileError, match="No such file"):
        Calibration.read(tmp_path / "none.json")
    (tmp_path / "c.json").write_text("{")
    with pytest.raises(ProfileError, match="JSONDecodeError"):
        Calibration.read(tmp_path / "c.json")
