"""Stages are held against the model before they run: with dropout, and where one is wrong."""

import pytest
import torch
from torch import nn

import dcpc
from dcpc.api import plan_with
from dcpc.codegen import Variant, summed
from dcpc.compiled.pipeline import ProgramStage, cut_model, stages_problem
from dcpc.compiled.pipeline.trained import together
from dcpc.plan.options import PlanOptions
from dcpc.verify import Verifier

BUCKETS = dcpc.Buckets({"x": "float64[batch, seq, 6]"}, [{"seq": 4}, {"seq": 9}])


class Dropping(nn.Module):
    """Layers with dropout; the first's weight is the last's, too."""

    def __init__(self, share=0.3):
        super().__init__()
        torch.manual_seed(0)
        self.share = share
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.layers[3].weight = self.layers[0].weight
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x):
        for layer in self.layers:
            x = x + self.dropped(torch.tanh(layer(x))) * self.scale
        return x.square().mean()

    def dropped(self, x):
        return nn.functional.dropout(x, self.share, self.training) if self.share else x


@pytest.fixture(scope="module")
def parts():
    model = Dropping().double()
    planned = plan_with(model, BUCKETS, PlanOptions(backend="eager"), partly=True)
    return model, planned, cut_model(model, BUCKETS, planned, 2, 2)


def said_of(parts, mode="auto", rank=0):
    model, planned, cut = parts
    verifier = Verifier(model, BUCKETS, planned, mode)
    return stages_problem(cut, model, verifier, rank), verifier.lines


def test_stages_with_dropout_are_compared_and_gradients_are_left_as_they_were(parts):
    model = parts[0]
    kept = model.scale.grad = torch.full((6,), 3.0, dtype=torch.float64)
    problem, lines = said_of(parts)
    assert problem is None
    assert [line.partition(" at ")[0] for line in lines] == [
        "2 stages, the least recompute: loss and every gradient",
        "2 stages, the most recompute: loss and every gradient",
        "2 stages, backwards in two parts: loss and every gradient",
    ]
    assert model.scale.grad is kept
    assert bool((kept == 3).all())
    assert said_of(parts, "off") == (None, [])


@pytest.mark.parametrize("number", [0, 1])
def test_a_stage_that_loses_a_part_of_its_gradient_is_refused(parts, number, monkeypatch):
    backward = ProgramStage.backward

    def worse(self, saved, grads):
        if self.index == number:
            grads = tuple(None if g is None else g * 0.99 for g in grads)
        return backward(self, saved, grads)

    monkeypatch.setattr(ProgramStage, "backward", worse)
    problem, _ = said_of(parts)
    assert "2 stages, the least recompute, run in turn, do not compute" in str(problem)
    assert "largest difference" in str(problem)


class Tail(nn.Module):
    """All parameters come first: what is behind them has a backward of one part."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        x = x + torch.tanh(self.layer(x))
        for _ in range(4):
            x = x + torch.tanh(x * 0.5).cumsum(1) * 0.1
        return x.square().mean()


def test_a_stage_without_parameters_runs_its_backward_as_a_whole_where_others_run_two_parts():
    model = Tail().double()
    planned = plan_with(model, BUCKETS, PlanOptions(backend="eager"), partly=True)
    parts = model, planned, cut_model(model, BUCKETS, planned, 2, 2)
    assert parts[2].plan.stages[1].parameters == ()
    problem, lines = said_of(parts)
    assert problem is None
    assert "2 stages, backwards in two parts: loss and every gradient" in lines[-1]


@pytest.mark.parametrize("number", [0, 1])
def test_a_second_part_that_loses_a_gradient_is_refused(parts, number, monkeypatch):
    backward = ProgramStage.backward_weight
    monkeypatch.setattr(
        ProgramStage, "backward_weight", lambda s, rest: s.index == number or backward(s, rest)
    )
    problem, _ = said_of(parts)
    assert "2 stages, backwards in two parts, run in turn, do not compute" in str(problem)


def test_a_stage_whose_value_is_lost_on_its_way_is_refused(parts, monkeypatch):
    forward = ProgramStage.forward

    def worse(self, inputs, received, seed=0):
        return forward(self, inputs, tuple(x * 0.9 for x in received), seed)

    monkeypatch.setattr(ProgramStage, "forward", worse)
    problem, _ = said_of(parts)
    assert "2 stages, the least recompute, run in turn, do not compute" in str(problem)


def test_all_ranks_of_a_stage_are_compared_and_one_that_is_left_out_is_refused(parts, monkeypatch):
    model, planned, _ = parts
    parts = model, planned, cut_model(model, BUCKETS, planned, 2, 4, sp=2)
    problem, lines = said_of(parts)
    assert problem is None
    assert [line.partition(" at ")[0] for line in lines] == [
        "2 stages of 2 ranks, the least recompute: loss and every gradient",
        "2 stages of 2 ranks, the most recompute: loss and every gradient",
    ]
    monkeypatch.setattr(together, "summed", lambda ranks: summed(ranks[:1]))
    problem, _ = said_of(parts)
    assert "2 stages of 2 ranks, the least recompute, run in turn, do not compute" in str(problem)


def test_a_slow_rank_gets_less_wherever_it_is(parts):
    model, planned, _ = parts  # it can be cut at one place alone, so its stages change places
    for slow, speeds in enumerate([(0.25, 1.0), (1.0, 0.25)]):
        cut = cut_model(model, BUCKETS, planned, 2, 2, speeds=speeds)
        work = [_calls_of(cut.plan.stages[cut.layout.stage(rank)].by_trace[0]) for rank in (0, 1)]
        assert work[slow] < work[1 - slow]
        assert cut.layout.order == ((0, 1) if slow == 0 else (1, 0))
    # A place is as fast as its slowest rank, in any pipeline and any lane: here they are alike.
    alike = cut_model(model, BUCKETS, planned, 2, 8, sp=2, speeds=(1, 0.5, 1, 1, 1, 1, 0.5, 1))
    assert {device.speed for device in alike.planner.cost.devices} == {0.5}


def _calls_of(stage: ProgramStage) -> int:
    return sum(n.op == "call_function" for n in stage.part.program.gm.graph.nodes)


@pytest.fixture(scope="module")
def compiled_parts():
    """Stages that Inductor compiles; the model draws nothing."""
    model = Dropping(share=0.0).double()
    planned = plan_with(model, BUCKETS, PlanOptions(backend="inductor"), partly=True)
    return model, planned, cut_model(model, BUCKETS, planned, 2, 2)


@pytest.mark.slow
def test_the_graphs_that_inductor_compiles_are_compared_and_a_ranks_own_stage_as_compiled(
    compiled_parts,
):
    problem, lines = said_of(compiled_parts, rank=1)
    assert problem is None
    assert [line.partition(" at ")[0] for line in lines] == [
        "2 stages, the least recompute, the graphs that inductor compiles: loss and every gradient",
        "2 stages, the least recompute, stage 1 as inductor compiled it: loss and every gradient",
        "2 stages, the most recompute, the graphs that inductor compiles: loss and every gradient",
    ]
    counts = [s[0].by_trace[0].runnable.compiled_count for s in compiled_parts[2].planner.cost.rows]
    assert counts == [0, 1], "of other stages nothing is compiled"


def test_compiled_stages_that_draw_are_compared_as_graphs():
    model = Dropping().double()
    planned = plan_with(model, BUCKETS, PlanOptions(backend="inductor"), partly=True)
    cut = cut_model(model, BUCKETS, planned, 2, 2)
    problem, lines = said_of((model, planned, cut), rank=1)  # the other stage draws nothing
    assert problem is None
    assert len(lines) == 2
    assert all("the graphs that inductor compiles" in line for line in lines)
    assert all(row[0].by_trace[0].runnable.compiled_count == 0 for row in cut.planner.cost.rows)


@pytest.mark.slow
@pytest.mark.parametrize("which", ["outputs", "backward"])
def test_a_compiled_stage_that_differs_from_its_graphs_is_refused(
    compiled_parts, which, monkeypatch
):
    right = getattr(ProgramStage if which == "backward" else Variant, which)

    def worse(self, *args):
        return tuple(None if x is None else x * 0.99 for x in right(self, *args))

    monkeypatch.setattr(ProgramStage if which == "backward" else Variant, which, worse)
    problem, _ = said_of(compiled_parts, rank=1)
    assert "stage 1 as inductor compiled it, run in turn, do not compute" in str(problem)
