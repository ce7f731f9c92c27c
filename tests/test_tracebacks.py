"""A `DcpcError` shows the user's own lines and its message, and all else where it is asked for."""

import re
import traceback
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import dcpc
from dcpc.errors import DataError, DefectError, checking_call
from dcpc.plan.options.kinds import PlanOptions
from dcpc.plan.options.signatures import commanded

# sp= is a number besides, device= is read by find(), autocast= is a dtype in Python.
APART = ("sp", "device", "autocast")


class Wide(nn.Module):
    """Its forward wants 8 features."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.inner.weight).mean()


@pytest.fixture(autouse=True)
def _as_for_a_user(monkeypatch):
    monkeypatch.delenv("DCPC_TRACEBACK")


def shown(call):
    with pytest.raises(dcpc.DcpcError) as told:
        call()
    return "".join(traceback.format_exception(told.value))


def wide(spec="float32[batch, seq, 8]"):
    return dcpc.compile(Wide(), dcpc.Buckets(inputs={"x": spec}, sizes=[{"seq": 4}]))


@checking_call("load", DataError)
def load(dataset, error=DataError):
    try:
        return dataset()
    except KeyError as e:
        raise error("got no sample; expected one; add it") from e


def users_dataset():
    return torch.stack([{}["a"]])


def test_a_model_that_fails_shows_its_line_and_named_dims_without_a_frame_of_torch(caplog):
    text = shown(wide)
    assert "return (x @ self.inner.weight).mean()" in text
    assert "batch" in text.splitlines()[-1]
    assert "s33" not in text.splitlines()[-1]
    assert not any(
        f"{folder}/" in text for folder in ("site-packages", str(Path(dcpc.__file__).parent))
    )
    assert len(text.splitlines()) < 20
    assert not caplog.records, "torch logs each try with all its frames"


def test_users_lines_of_the_cause_stay(monkeypatch):
    text = shown(lambda: load(users_dataset))
    assert all(part in text for part in ('{}["a"]', "KeyError: 'a'", "raise error"))
    monkeypatch.setenv("DCPC_TRACEBACK", "full")
    assert "errors.py" in shown(lambda: load(users_dataset))


def test_a_defect_shows_all_of_it():
    assert "errors.py" in shown(lambda: load(users_dataset, DefectError))


def test_specs_of_other_names_say_which_was_meant_and_where_forward_is():
    def misnamed():
        buckets = dcpc.Buckets(inputs={"xs": "float32[batch, seq, 8]"}, sizes=[{"seq": 4}])
        dcpc.compile(Wide(), buckets)

    last = shown(misnamed).splitlines()[-1]
    assert re.search(r"Wide.forward \(\S+test_tracebacks.py:\d+\)", last)
    assert "got inputs of the buckets: xs, which it does not take, and no x; " in last
    assert last.endswith("did you mean x?")


@pytest.mark.parametrize(
    ("name", "value"),
    [(n, c) for n, (_, read, _) in commanded().items() for c in read.choices if n not in APART],
)
def test_a_mistyped_value_of_any_option_names_the_one_that_was_meant(name, value):
    with pytest.raises(dcpc.DcpcError, match=f"did you mean {value}") as told:
        PlanOptions(**{name: value[:-1] + "_" + value[-1]})
    assert type(told.value).__name__ in ("PlanError", "ProfileError")
