"""Dims that forward takes for numbers are static: a trace a length; a static batch runs alone."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dcpc
from dcpc.errors import DispatchError, TraceError
from dcpc.trace import static
from tests.cases.exactness import compiled_error

INPUTS = {"x": "float64[batch, seq, 4]", "y": "float64[batch, seq, 4]"}
SIZES = [{"seq": 4}, {"seq": 9}]
SHORT = [{"seq": 2}, {"seq": 3}]  # of a loop, whose graph grows with the length


class Mixed(nn.Module):
    """A layer whose rows a function mixes, in Python."""

    def __init__(self, mix) -> None:
        super().__init__()
        self.cell, self.out, self.mix = nn.RNNCell(4, 4), nn.Linear(4, 4), mix
        self.double()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.out(self.mix(self, x)), y)


def loop(model, x):
    h, rows = 0, []
    for t in range(x.shape[1]):
        h = torch.tanh(h + x[:, t])
        rows.append(h)
    return torch.stack(rows, 1)


def cell(model, x):
    h, rows = x.new_zeros(x.shape[0], 4), []
    for row in x.unbind(1):
        h = model.cell(row, h)
        rows.append(h)
    return torch.stack(rows, 1)


def split(model, x):
    return torch.cat([torch.tanh(part.cumsum(1)) for part in x.split(4, dim=1)], 1)


def square(model, x):
    side = int(math.sqrt(x.shape[1]))
    return x + x.view(x.shape[0], side, side, 4).roll(1, 1).reshape(x.shape)


def lengths(model, x):
    return x + len({x.shape[1], 77})


def batch(model, x):
    return x + torch.tensor([0] * x.shape[0], dtype=x.dtype)[:, None, None]


def free(model, x):
    return x.cumsum(1)


def compiled_of(mix, sizes=SIZES, **options):
    torch.manual_seed(0)
    buckets = dcpc.Buckets(INPUTS, sizes)
    return dcpc.compile(Mixed(mix), buckets, backend="eager", memory=1e5, **options)


@pytest.fixture(scope="module")
def looped():
    return compiled_of(loop, SHORT)


def samples(seq, count=2):
    generator = torch.Generator().manual_seed(seq)
    return {n: torch.randn(count, seq, 4, dtype=torch.float64, generator=generator) for n in INPUTS}


def worst_error(compiled, counts=(1, 2)):
    sizes = [bucket["seq"] for bucket in compiled.buckets]
    every = [samples(size, count) for size in sizes for count in counts]
    return max(compiled_error(compiled, compiled.model, each) for each in every)


def test_each_length_of_a_loop_has_a_trace_that_is_right_and_verified(looped):
    report = looped.report()
    assert "dim 'seq' is static, as forward takes it for a number at " in report
    assert "for t in range(x.shape[1])" in report
    assert "trace 1: loss and every gradient at {seq: 2" in report
    assert "trace 2: loss and every gradient at {seq: 3" in report
    assert worst_error(looped) < 1e-10


ROOT = pytest.param(square, id="square")
OTHERS = [
    pytest.param(mix, id=mix.__name__, marks=pytest.mark.slow) for mix in (cell, split, lengths)
]


@pytest.mark.parametrize("mix", [ROOT, *OTHERS])
def test_each_length_of_a_static_dim_has_a_trace_that_is_right(mix):
    compiled = compiled_of(mix, verify="off")
    assert "dim 'seq' is static" in compiled.report()
    assert "for each of its 2 lengths" in compiled.report()
    assert worst_error(compiled) < 1e-10


def test_lengths_that_no_trace_has_are_refused_or_padded():
    compiled = compiled_of(square, verify="off")
    with pytest.raises(DispatchError, match="'seq' is static, as forward takes it for a number at"):
        compiled(**samples(7))
    data = [{n: t[0] for n, t in samples(n).items()} for n in (4, 7)]
    pad = {"x": 0.0, "y": 0.0}
    loader = dcpc.DataLoader(
        data, compiled, samples_per_step=2, pad=pad, loss_depends_on="padding", shuffle=False
    )
    (step,) = loader
    padded = {k: F.pad(t, (0, 0, 0, 2))[None] for k, t in data[1].items()}
    whole = compiled.model(**{k: t[None] for k, t in data[0].items()}), compiled.model(**padded)
    assert compiled.train_step(step).loss.item() == pytest.approx(sum(whole).item() / 2, abs=1e-12)


def test_a_static_batch_runs_samples_alone():
    compiled = compiled_of(batch, verify="off")
    assert "dim 'batch' is static" in compiled.report()
    assert {plan.micro_batch for plan in compiled.plans.values()} == {1}
    assert worst_error(compiled, counts=(1,)) < 1e-10
    with pytest.raises(DispatchError, match="split the batch: forward takes it for a number at"):
        compiled(**samples(4, 2))
    data = [{n: t[0] for n, t in samples(size).items()} for size in (4, 9, 4)]
    (step,) = dcpc.DataLoader(data, compiled, samples_per_step=3, shuffle=False)
    plain = [compiled.model(**{k: t[None] for k, t in each.items()}) for each in data]
    assert compiled.train_step(step).loss.item() == pytest.approx(sum(plain).item() / 3, abs=1e-12)


def test_free_dims_are_traced_once(monkeypatch):
    monkeypatch.setattr(static, "trace", None)
    compiled = compiled_of(free, verify="off")
    assert "static" not in compiled.report()
    assert not compiled.buckets.static


def test_more_lengths_than_the_cap_are_refused(monkeypatch):
    monkeypatch.setattr(static, "MOST_STATIC_TRACES", 1)
    with pytest.raises(TraceError, match=r"'seq' at .* a trace: got 2; expected 1 at most"):
        compiled_of(loop, SHORT)
