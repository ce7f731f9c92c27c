"""What can be captured, where the loss is found, and what an error says where it cannot."""

import dataclasses
import re
import warnings
from typing import NamedTuple

import pytest
import torch
from torch import nn
from transformers.utils import ModelOutput

from dcpc.buckets import Buckets
from dcpc.errors import TraceError
from dcpc.trace import trace
from dcpc.trace.capture.capture import hash_of

BUCKETS = Buckets(inputs={"x": "float32[batch, seq, 4]"}, sizes=[{"seq": 8}, {"seq": 32}])


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    loss: torch.Tensor


@dataclasses.dataclass
class Unnamed:
    value: torch.Tensor


class Named(NamedTuple):
    metric: torch.Tensor
    loss: torch.Tensor


@dataclasses.dataclass
class LibraryOutput(ModelOutput):
    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None


class Net(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.function = function

    def forward(self, x):
        return self.function(self.linear(x))


@pytest.mark.parametrize(
    "output",
    [
        lambda z: z.mean(),
        lambda z: {"logits": z, "loss": z.mean()},
        lambda z: Output(z, z.mean()),
        lambda z: LibraryOutput(z.mean(), z),
        lambda z: (z.mean(), z),
        lambda z: [z, z.mean(), z.sum()],
    ],
    ids=["tensor", "dict", "dataclass", "ModelOutput", "tuple", "list"],
)
def test_loss_is_found(output):
    program = trace(Net(output), BUCKETS)
    assert program.info[program.loss].shape == ()


@pytest.mark.parametrize(
    ("output", "got"),
    [
        (lambda z: z, r"a tensor of shape .* and dtype torch.float32"),
        (lambda z: {"logits": z, "l": z}, r"a dict without the key 'loss' \(it has logits, l\)"),
        (lambda z: LibraryOutput(None, z), r"a LibraryOutput without the key 'loss' .*logits\)"),
        (lambda z: Unnamed(z), r"an? Unnamed without the field 'loss' \(it has value\)"),
        (lambda z: Output(z, None), "an? Output whose field 'loss' is None"),
        (lambda z: {"loss": z}, r"a dict whose key 'loss' is a tensor of shape .*"),
        (lambda z: (z, z), "a tuple of 2 outputs, none of them a floating scalar"),
        (lambda z: z.long().sum(), r"a tensor of shape \(\) and dtype torch.int64"),
    ],
)
def test_no_loss_is_an_error_that_says_what_came_back(output, got):
    message = rf"forward \(.*\): got {got} returned; expected a floating scalar loss.*labels"
    with pytest.raises(TraceError, match=message):
        trace(Net(output), BUCKETS)


def test_one_of_several_scalars_is_named():
    with pytest.warns(UserWarning, match=r"tuple of 3 outputs, got 2.*\(outputs 1, 2.*output 1 is"):
        trace(Net(lambda z: (z, z.mean(), z.sum())), BUCKETS)


@pytest.mark.parametrize(
    "output",
    [
        lambda z: (z.mean(), z.long().sum()),
        lambda z: {"metric": z.sum(), "loss": z.mean()},
        lambda z: Named(z.sum(), z.mean()),
    ],
)
def test_one_scalar_or_a_name_needs_no_warning(output):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="the model's forward")
        trace(Net(output), BUCKETS)


def unlearned(z):
    with torch.no_grad():
        return z.square().mean()


@pytest.mark.parametrize(
    ("output", "where"),
    [
        (lambda z: z.mean().detach(), r" \(forward detaches at capture/test_capture.py:\d+\)"),
        (unlearned, r" \(forward detaches at capture/test_capture.py:\d+\)"),
        (lambda z: torch.ones(()), ""),
    ],
)
def test_a_loss_without_gradient_is_refused_where_the_model_trains(output, where):
    told = rf"the loss has no gradient{where}: got .* none of 2 trainable tensors \(linear.weight, "
    with pytest.raises(TraceError, match=told):
        trace(Net(output), BUCKETS)
    for evaluated in (Net(output).eval(), Net(output).requires_grad_(False)):
        assert not trace(evaluated, BUCKETS).begins


def branch(z):
    if z.sum() > 0:
        return z.mean()
    return -z.mean()


def experts(z):
    total = z.new_zeros(())
    for i in range(4):
        rows = (z.argmax(-1) == i).nonzero()
        if len(rows):
            total = total + z[rows[:, 0], rows[:, 1]].mean()
    return total


def item(z):
    return z.mean() * int(z.abs().sum().item() > 3)


@pytest.mark.parametrize(
    ("function", "line"),
    [
        (branch, r"if z\.sum\(\) > 0:"),
        (experts, r"if len\(rows\):"),
        (item, r"z\.abs\(\)\.sum\(\)"),
    ],
)
def test_control_flow_by_values_is_an_error_with_reason_line_and_hint(capfd, function, line):
    with pytest.raises(TraceError) as caught:
        trace(Net(function), BUCKETS)
    text = str(caught.value)
    assert re.search("data-dependent|branches on the values|__len__.. of rows that a mask", text)
    assert capfd.readouterr().err == "", "torch prints the graph"
    assert "torch.where" in text
    assert re.search(line, text), text
    assert "test_capture.py:" in text


def test_data_dependent_size_is_an_error():
    with pytest.raises(TraceError, match=r"torch\.where"):
        trace(Net(lambda z: z[z > 0].unique().square().sum()), BUCKETS)


def test_wrong_argument_name_is_an_error_that_names_it():
    buckets = Buckets(inputs={"z": "float32[batch, 4]"}, sizes=[{}])
    with pytest.raises(TraceError, match=r"Net.forward .*: got .*: z, which it does not take"):
        trace(Net(lambda z: z.mean()), buckets)


def test_running_statistics_are_refused_by_name_and_fine_in_eval():
    model = Net(lambda z: z.mean())
    model.linear = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    buckets = Buckets(inputs={"x": "float32[batch, 4]"}, sizes=[{}])
    with pytest.raises(
        TraceError, match=r"linear\.1\.num_batches_tracked.*linear\.1\.running_mean"
    ):
        trace(model, buckets)
    program = trace(model.eval(), buckets)
    assert "linear.1.running_mean" in program.buffers.values()


def test_parameters_buffers_and_inputs_go_by_the_users_names():
    model = Net(lambda z: z.mean())
    model.linear.bias.requires_grad_(False)
    program = trace(model, BUCKETS)
    names = {name: program.info[p].requires_grad for p, name in program.parameters.items()}
    assert names == {"linear.weight": True, "linear.bias": False}
    assert list(program.inputs.values()) == ["x"]


def test_trace_leaves_the_model_as_it_was():
    model = Net(lambda z: z.mean())
    before = {k: v.clone() for k, v in model.state_dict().items()}
    trace(model, BUCKETS)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert model(torch.ones(1, 3, 4)).shape == ()


def test_equal_models_have_equal_hashes_and_others_do_not():
    hashes = [trace(Net(f), BUCKETS).graph_hash for f in (torch.mean, torch.mean, torch.sum)]
    assert hashes[0] == hashes[1] != hashes[2]


def test_a_hash_does_not_depend_on_the_device():
    """Ranks of one node have GPUs of their own, and compare hashes."""
    devices = ("cuda", 0), ("cuda", 1), ("meta",)
    codes = [f"arange(seq, device = {torch.device(*d)!r}, pin_memory = False)" for d in devices]
    assert len({hash_of(code, "") for code in codes}) == 1
    assert hash_of(codes[0], "a") != hash_of(codes[0], "b")
    traced = trace(Net(lambda z: (z * torch.arange(4, device=z.device)).mean()), BUCKETS).gm.code
    assert repr(torch.device("cpu")) in traced  # what a graph's code says of a device
