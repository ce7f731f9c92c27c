"""No raw error of torch's or Python's comes out of compile, the loader or a train step."""

from unittest import mock

import pytest
import torch
from torch import nn

import dcpc
from dcpc.compiled.dispatch import Dispatch
from dcpc.plan.traced import Traced

BUCKETS = dcpc.Buckets({"x": "float32[batch, seq, 4]"}, [{"seq": 6}])
INPUT = dcpc.Buckets({"input": "float32[batch, seq, 4]"}, [{"seq": 6}])  # of a linear layer


class Scaled(nn.Module):
    def __init__(self, taken=False):
        super().__init__()
        self.linear, self.taken = nn.Linear(4, 4), taken

    def forward(self, x):
        largest = x.abs().max()
        return (self.linear(x) * (largest.item() if self.taken else largest)).square().mean()


def steps(compiled, samples=2, **options):
    data = [{"x": torch.randn(6, 4)} for _ in range(samples)]
    options["loss_depends_on"] = ("micro_batch", "padding")  # the largest of all
    return dcpc.DataLoader(data, compiled, tokens_per_step=99, pad={"x": 0.0}, **options)


def test_a_number_taken_out_of_a_tensor_is_refused_at_its_line():
    with pytest.raises(dcpc.TraceError, match=r"test_defects\.py:\d+\) is a Python number made of"):
        dcpc.compile(Scaled(taken=True), BUCKETS, backend="eager")
    dcpc.compile(Scaled(), BUCKETS, backend="eager")  # what the message says to do


# As in a prompt, in a cell of a notebook or by `exec`: no file has these lines.
TYPED = """
from torch import nn

class Typed(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return (self.linear(x) * x.mean().item()).square().mean()

def loss(outputs):
    return outputs.mean() * outputs.std().item()

def logger(step, result):
    raise ValueError("no such project")
"""


def test_lines_that_are_in_no_file_are_named_and_are_a_users():
    typed = {}
    exec(TYPED, typed)
    with pytest.raises(dcpc.TraceError, match=r"at <string>:10 is a Python number"):
        dcpc.compile(typed["Typed"](), BUCKETS, backend="eager")
    with pytest.raises(dcpc.TraceError, match=r"at <string>:13 is a Python number"):
        dcpc.compile(nn.Linear(4, 4), INPUT, backend="eager", loss=typed["loss"])
    compiled = dcpc.compile(Scaled(), BUCKETS, backend="eager", verify="off")
    (step,) = steps(compiled)
    compiled.log_to(typed["logger"])
    with pytest.raises(ValueError, match="no such project"):
        compiled.train_step(step)


class Classes(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, labels):
        return nn.functional.cross_entropy(self.linear(x).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_labels_in_a_dtype_that_torchs_losses_refuse_are_refused_at_their_line(backend):
    inputs = {"x": "float32[batch, seq, 4]", "labels": "int32[batch, seq]"}
    text = r"test_defects\.py:\d+\) has labels '.*' of torch.int32; expected torch.int64"
    with pytest.raises(dcpc.TraceError, match=text):
        dcpc.compile(Classes(), dcpc.Buckets(inputs, [{"seq": 6}]), backend=backend)


def test_backward_of_a_steps_loss_says_that_the_gradients_are_there():
    compiled = dcpc.compile(Scaled(), BUCKETS, backend="eager")
    (step,) = steps(compiled)
    result = compiled.train_step(step)
    with pytest.raises(dcpc.DispatchError, match=r"leave it out: optimizer\.step"):
        result.loss.backward()
    assert float(result.loss) > 0


def test_an_error_within_compile_is_a_defect_with_its_cause(monkeypatch):
    monkeypatch.setattr(Traced, "lowering", mock.Mock(side_effect=KeyError("planted")))
    with pytest.raises(dcpc.DefectError, match=r"dcpc\.compile: got KeyError: 'planted'") as told:
        dcpc.compile(Scaled(), BUCKETS, backend="eager")
    assert isinstance(told.value.__cause__, KeyError)


def test_an_error_within_a_step_is_a_defect(monkeypatch):
    compiled = dcpc.compile(Scaled(), BUCKETS, backend="eager")
    (step,) = steps(compiled)
    monkeypatch.setattr(Dispatch, "own_casts", mock.Mock(side_effect=RuntimeError("shape [3]")))
    with pytest.raises(dcpc.DefectError, match="train_step: got RuntimeError: shape"):
        compiled.train_step(step)


def test_what_code_of_the_users_raises_comes_out_as_it_is():
    compiled = dcpc.compile(Scaled(), BUCKETS, backend="eager")
    (step,) = steps(compiled)

    def logger(step, result):
        raise ValueError("no such project")

    compiled.log_to(logger)
    with pytest.raises(ValueError, match="no such project"):
        compiled.train_step(step)
