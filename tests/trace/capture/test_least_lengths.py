"""A trace is for lengths below the smallest bucket, as far down as the model's own code allows."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dcpc
from dcpc.trace import trace


def turned(x):
    return x.transpose(1, 2)


class Model(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.function = function

    def forward(self, x):
        return self.function(self.linear(x)).square().mean()


def program(function, inputs="float32[batch, seq, 8]", seq=512):
    return trace(Model(function), dcpc.Buckets({"x": inputs}, [{"seq": seq}, {"seq": 2 * seq}]))


CUT = {
    "nothing": (lambda x: x, 2),
    "a branch": (lambda x: x * 2 if x.shape[1] > 20 else x * 3, 21),
    "a window": (lambda x: F.pad(turned(x), (9, 9), mode="reflect"), 10),
    "one position": (lambda x: x[:, 30], 31),
    "sizes that are simpler for buckets": (lambda x: x[:, : max(x.shape[1] - 30, 1)], 512),
}


@pytest.mark.parametrize("name", CUT)
def test_a_trace_begins_where_forward_takes_its_path(name):
    function, least = CUT[name]
    assert program(function).least["seq"] == least


def test_a_length_at_which_forward_does_something_else_is_told():
    found = program(lambda x: x * 2 if x.shape[1] != 40 else x * 3)
    assert found.least["seq"] == 2
    assert [n for n in range(2, 60) if not found.holds_at({"seq": n})] == [40]


def test_no_dim_of_an_input_falls_below_two():
    assert program(lambda x: x, "float32[batch, seq-3, 8]").least["seq"] == 5
    assert program(lambda x: x, "float32[batch, seq*2, 8]").least["seq"] == 2


def test_the_graph_is_that_of_the_buckets(monkeypatch):
    def function(x):
        return torch.cat([x, x.softmax(1)], 1)

    low = program(function)
    monkeypatch.setattr("dcpc.trace.capture.dims.least_sizes", lambda buckets: {})
    own = program(function)
    assert own.least["seq"] == 512
    assert (low.graph_hash, low.info, low.hints) == (own.graph_hash, own.info, own.hints)
