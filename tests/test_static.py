"""Dims that forward takes for numbers are static: a trace a length; a static batch runs alone."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dcpc
from dcpc.api.plan_model import cut_with
from dcpc.buckets import held_by
from dcpc.compiled.pipeline import run_in_turn
from dcpc.errors import DispatchError, TraceError
from dcpc.plan.options import PlanOptions
from dcpc.trace import static
from dcpc.trace.capture import capture
from tests.cases.asks import far, trained
from tests.cases.exactness import SPLITTING, compiled_error, gradient_error, loss_error, plain
from tests.cases.launch import run_prepared
from tests.cases.ready import Ready

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


def padded(model, x):
    return batch(model, F.pad(x, (0, 0, 0, -x.shape[1] % 4)))[:, : x.shape[1]]


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
    assert "'seq' is static" in looped.packable.reason
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


@pytest.mark.parametrize("mix", [batch, padded])
def test_a_static_batch_runs_samples_alone(mix):
    compiled = compiled_of(mix, verify="off")
    assert "dim 'batch' is static" in compiled.report()
    assert {plan.micro_batch for plan in compiled.plans.values()} == {1}
    assert worst_error(compiled, counts=(1,)) < 1e-10
    with pytest.raises(DispatchError, match="split the batch: forward takes it for a number at"):
        compiled(**samples(4, 2))
    data = [{n: t[0] for n, t in samples(size).items()} for size in (4, 9, 4)]
    (step,) = dcpc.DataLoader(data, compiled, samples_per_step=3, shuffle=False)
    plain = [compiled.model(**{k: t[None] for k, t in each.items()}) for each in data]
    assert compiled.train_step(step).loss.item() == pytest.approx(sum(plain).item() / 3, abs=1e-12)


def test_free_dims_are_traced_once_and_have_the_graph_of_that_trace(monkeypatch):
    monkeypatch.setattr(static, "trace", None)
    buckets = dcpc.Buckets(INPUTS, SIZES)
    torch.manual_seed(0)
    model = Mixed(free)
    planned = dcpc.api.plan(model, buckets, world=1, device="cpu", backend="eager", memory=1e5)
    assert not planned.static
    (one,) = planned.traces
    assert one.traced.program.graph_hash == capture.trace(model, buckets).graph_hash
    assert one.traced.program.gm.code == capture.trace(model, buckets.with_static({})).gm.code
    assert "static" not in " ".join(one.traced.program.notes)


def test_more_lengths_than_the_cap_are_refused(monkeypatch):
    monkeypatch.setattr(static, "MOST_STATIC_TRACES", 1)
    with pytest.raises(TraceError, match=r"'seq' at .* a trace: got 2; expected 1 at most"):
        compiled_of(loop, SHORT)


def test_buckets_are_grouped_by_the_numbers_of_their_traces():
    every = [{"frames": t, "seq": n} for t, n in ((3, 4), (1, 4), (5, 4), (1, 9), (3, 9))]
    free = dcpc.Buckets({"x": "float64[batch, frames, seq]"}, every)
    assert len(free.by_trace()) == 2
    buckets = free.with_static({"seq": " at a line"})
    assert buckets != free
    assert [len(mine) for mine in buckets.by_trace().values()] == [2, 1, 1, 1]
    for bucket in buckets:
        assert bucket in [*held_by(buckets.by_trace(), {**bucket.sizes, "batch": 2})]
    assert buckets.like([{"frames": 2, "seq": 7}]).by_trace().keys() == {frozenset({("seq", 7)})}
    alone = free.with_static({"batch": ""})
    assert {bucket.batch for bucket in alone} == {1}
    assert len(alone.by_trace()) == 2


@pytest.mark.parametrize("mix", [square, batch])
def test_stages_run_the_trace_of_their_lengths(mix):
    torch.manual_seed(0)
    model, most = Mixed(mix), 1 if mix is batch else 2
    options = PlanOptions(backend="eager", memory=1e5, world=2)
    cut = cut_with(model, dcpc.Buckets(INPUTS, SIZES), options, 2)
    assert all((n == 1) == (mix is batch) for n in cut.planner.most)
    for sizes in SIZES:
        inputs = samples(sizes["seq"], most)
        loss, gradients = plain(model, inputs)
        model.zero_grad()
        stages = [row[0].at({**sizes, "batch": most}) for row in cut.planner.cost.rows]
        assert loss_error(run_in_turn(stages, inputs), loss) < 1e-10
        assert gradient_error(model, gradients) < 1e-10


@pytest.mark.slow
def test_evaluate_takes_a_trace_of_its_own_for_another_length():
    compiled = compiled_of(lengths, verify="off")
    for size in (4, 7):
        found = compiled.evaluate(samples(size), between="compile")
        assert far(found, compiled.model(**samples(size))) < 1e-12


def ready(mix, options):
    torch.manual_seed(0)
    options = {"backend": "eager", "device": SPLITTING, "verify": "off", **options}
    return Ready(Mixed(mix), dcpc.Buckets(INPUTS, SIZES), 2, **options)


def over_ranks(rank, made):
    alone = copy.deepcopy(made.model)  # the model keeps the parameters of a rank alone
    compiled = made.compile()
    data = [{n: t[0] for n, t in samples(size).items()} for size in (4, 9, 9, 4, 9)]
    loader = dcpc.DataLoader(data, compiled, samples_per_step=5, shuffle=False)
    return trained(compiled, loader, alone, data, lambda sample: 1).worst, compiled.report()


@pytest.mark.multirank
@pytest.mark.slow
@pytest.mark.parametrize("options", [{"sp": 2}, {"pipeline": 2}, {"parameters": "rounds"}], ids=str)
@pytest.mark.parametrize("mix", [split, batch])
def test_two_ranks_have_the_plain_models_numbers(mix, options):
    for worst, report in run_prepared(ready, over_ranks, 2, mix, options):
        assert worst < 1e-10
        assert f"dim '{'batch' if mix is batch else 'seq'}' is static" in report
