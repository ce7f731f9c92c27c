"""Sizes that a graph is traced at: what follows from one another fits, and small ones are right."""

import pytest
import sympy
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._sympy.functions import FloorDiv, Mod

import dcpc
from dcpc.codegen import broken_guards
from dcpc.commands.check import SplitModel
from dcpc.errors import CodegenError
from tests.fuzz.program import data, seeded


class Of(nn.Module):
    """A line, and a function of it."""

    def __init__(self, function):
        super().__init__()
        self.line, self.patches = nn.Linear(4, 4), nn.Conv1d(4, 4, 3, stride=3)
        self.function = function

    def forward(self, x):
        return self.function(self, self.line(x)).square().sum()


def thirds(m, y):
    n = y.shape[1] // 3
    return y[:, : 3 * n].unflatten(1, (n, 3)).sum(2)


def patches(m, y):
    return m.patches(y.mT)


def written(m, y):
    z, n = y * 2, y.shape[1] // 3
    z[:, : 3 * n] = y[:, -3 * n :] if n else y[:, :0]
    return z


def without_first(m, y):
    return F.interpolate(y[1:].mT, size=y.shape[1] + 1, mode="linear")


def errors(function, points, sp):
    torch.manual_seed(0)
    model, inputs = seeded(lambda: Of(function)), {"x": "float64[batch, seq, 4]"}
    buckets = dcpc.Buckets(inputs, points)
    split = SplitModel(model, buckets, {**points[0], "batch": 2}, sp=sp)
    found = (split.difference(p, data(inputs, p), in_step=True) for p in points)
    return [error.worst for error in found]


@pytest.mark.parametrize("sp", [1, 2])
@pytest.mark.parametrize("function", [thirds, patches, written])
def test_numbers_are_right_where_a_quotient_is_1_at_every_size(function, sp):
    assert max(errors(function, [{"batch": 2, "seq": 3}, {"batch": 2, "seq": 4}], sp)) <= 1e-10


@pytest.mark.parametrize("sp", [1, 2])
def test_a_batch_of_1_does_not_run_a_graph_of_2_alone(sp):
    points = [{"batch": 1, "seq": 5}, {"batch": 2, "seq": 6}, {"batch": 3, "seq": 4}]
    assert max(errors(without_first, points, sp)) <= 1e-10


def test_an_equation_is_no_guard_that_sizes_raised_to_2_satisfy():
    s, t = sympy.symbols("s t", integer=True, nonnegative=True)
    assert broken_guards([sympy.Eq(s, 2)], {s: 1})
    assert broken_guards([sympy.Eq(s, t)], {s: 1, t: 2})
    assert not broken_guards([sympy.Ne(s, 1), sympy.Ge(s, 2), sympy.Eq(s, t)], {s: 1, t: 1})
    assert not broken_guards([sympy.Eq(sympy.Max(1, s) * t, s * t), t / s > 1], {s: 0, t: 3})


def test_an_equation_that_divides_by_0_is_a_broken_guard():
    s, t = sympy.symbols("s t", integer=True, nonnegative=True)
    for divided in (Mod(t, s), FloorDiv(t, s), sympy.floor(t / s)):
        assert broken_guards([sympy.Eq(divided, 0)], {s: 0, t: 3})


def test_an_equation_that_holds_whatever_is_empty_is_no_broken_guard():
    s, t, u = sympy.symbols("s t u", integer=True, nonnegative=True)
    assert not broken_guards([sympy.Eq(Mod(s * (t + 1), s * (u + 1)), 0)], {s: 0, t: 3, u: 3})
    assert broken_guards([sympy.Eq(Mod(s * (t + 1), s * (u + 1)), 0)], {s: 0, t: 3, u: 2})


class Halved(nn.Module):
    """A layer of attention behind a convolution that halves the length."""

    def __init__(self):
        super().__init__()
        self.halve = nn.Conv1d(4, 8, 3, stride=2)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)

    def forward(self, x):
        h = self.layer(torch.relu(self.halve(x.transpose(1, 2))).transpose(1, 2))
        return torch.log_softmax(h, -1).transpose(0, 1).square().sum()


def test_a_rank_without_samples_runs_the_graph_of_a_split_batch():
    sizes = [{"batch": b, "seq": n} for b, n in ((2, 9), (1, 9), (1, 16), (3, 11))]
    buckets = dcpc.Buckets(
        {"x": "float64[batch, seq, 4]"}, [{"batch": 2, "seq": n} for n in (9, 16)]
    )
    split = SplitModel(seeded(Halved), buckets, {"batch": 2, "seq": 16}, sp=2)
    points = [(s, {"x": torch.randn(*s.values(), 4, dtype=torch.float64)}) for s in sizes]
    for at, inputs in points:
        assert split.difference(at, inputs, in_step=True).worst < 1e-10


def test_a_variant_whose_guards_stay_broken_is_refused_by_name(monkeypatch):
    inputs = {"x": "float64[batch, seq, 4]"}
    buckets = dcpc.Buckets(inputs, [{"batch": 2, "seq": 5}])
    split = SplitModel(seeded(lambda: Of(thirds)), buckets, {"batch": 2, "seq": 5}, sp=1)
    symbol = split.program.symbols["seq"]
    never = (sympy.Eq(symbol, 7),)
    monkeypatch.setattr("dcpc.codegen.joint.library.Library.guards", lambda *_: never)
    with pytest.raises(CodegenError, match=r"seq = 5.*assumes Eq\(seq, 7\)"):
        split.runnable.variant(split.placement, 0, {"batch": 2, "seq": 5}, 0)
