"""Python integers that change from call to call: a step count, the longest of packed lengths."""

import copy
import warnings

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.utils import counters

import dcpc
from dcpc.dynamo import backend, family

EXACT = {"backend": "eager", "fallback": "error"}


@pytest.fixture
def traces(monkeypatch):
    """Collects one entry for each trace."""
    made: list[int] = []
    plan_with = family.plan_with

    def noting(*args, **kwargs):
        made.append(1)
        return plan_with(*args, **kwargs)

    monkeypatch.setattr(family, "plan_with", noting)
    return made


class Counts(nn.Module):
    """Takes an integer as a number, as a length of its own, and as a limit; returns it, too."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(8, 8)

    def forward(self, x: Tensor, steps: int, longest: int) -> tuple[Tensor, int]:
        hidden = torch.tanh(self.mix(x) * 0.9**steps)
        seen = torch.arange(x.shape[1]) < longest
        table = torch.arange(longest, dtype=x.dtype).sin()
        return (hidden * seen[:, None] + table.mean()).square().mean(), longest + 1


def test_an_integer_that_changes_has_one_graph_and_one_trace(traces):
    own = Counts().double()
    plain = copy.deepcopy(own)
    compiled = torch.compile(own, backend=backend, dynamic=True, options=EXACT)
    calls = ((5, 3, 4), (9, 700, 6), (9, 12, 7), (4, 13, 40), (6, 2, 5), (9, 11, 8), (7, 4, 9))
    for length, steps, longest in (*calls, (8, 5, 3), (3, 6, 13)):
        x = torch.randn(2, length, 8, dtype=torch.float64)
        (got, more), (want, _) = compiled(x, steps, longest), plain(x, steps, longest)
        assert more == longest + 1
        mine = torch.autograd.grad(got, [*own.parameters()])
        theirs = torch.autograd.grad(want, [*plain.parameters()])
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=0)
    assert counters["stats"]["unique_graphs"] == 1
    assert len(traces) == 1


def test_an_integer_that_is_no_length_is_a_constant_of_a_trace(traces):
    own = nn.Linear(8, 8).double()
    compiled = torch.compile(lambda x, k: own(x) * k, backend=backend, dynamic=True, options=EXACT)
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for k in (3, -7, 1 << 40, -7, 4):
            torch.testing.assert_close(compiled(x, k), own(x) * k, rtol=1e-12, atol=0)
    assert counters["stats"]["unique_graphs"] == 1
    assert len(traces) == 3


def test_what_no_trace_of_all_integers_computes_is_traced_for_each_with_a_warning(monkeypatch):
    """torch 2.13 cannot differentiate such a power; here any release refuses it."""
    plan_with = family.plan_with

    def refusing(model, buckets, *args, **kwargs):
        if any(spec.dtype == torch.bool for spec in buckets.inputs.values()):
            raise dcpc.TraceError("no trace of all integers")
        return plan_with(model, buckets, *args, **kwargs)

    def power(x, k):
        return x.sin() ** k

    monkeypatch.setattr(family, "plan_with", refusing)
    compiled = torch.compile(power, backend=backend, dynamic=True, options=EXACT)
    x = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
    with pytest.warns(UserWarning, match="each value of argument 'k' takes a trace of its own"):
        compiled(x, 3)
    for k in (5, 3):
        (got,), (want,) = (torch.autograd.grad(f(x, k).sum(), x) for f in (compiled, power))
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-15)
    assert counters["stats"]["unique_graphs"] == 1
