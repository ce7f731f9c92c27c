"""Stages are held against the model before they run: with dropout, and where one is wrong."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import dcpc
from dcpc.api import plan_with
from dcpc.codegen import summed
from dcpc.compiled.pipeline import ProgramStage, cut_model, stages_problem
from dcpc.compiled.pipeline.trained import together
from dcpc.plan.options import PlanOptions
from dcpc.verify import Verifier

BUCKETS = dcpc.Buckets({"x": "float64[batch, seq, 6]"}, [{"seq": 4}, {"seq": 9}])


class Dropping(nn.Module):
    """Layers with dropout; the first's weight is the last's, too."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.layers[3].weight = self.layers[0].weight
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x):
        for layer in self.layers:
            x = x + nn.functional.dropout(torch.tanh(layer(x)), 0.3, self.training) * self.scale
        return x.square().mean()


@pytest.fixture(scope="module")
def parts():
    model = Dropping().double()
    planned = plan_with(model, BUCKETS, PlanOptions(backend="eager"), partly=True)
    return model, planned, cut_model(model, BUCKETS, planned, 2, 2)


def said_of(parts, mode="auto"):
    model, planned, cut = parts
    verifier = Verifier(model, BUCKETS, planned, mode)
    return stages_problem(cut, model, verifier), verifier.lines


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
        work = [_calls_of(cut.plan.stages[cut.layout.stage(rank)]) for rank in (0, 1)]
        assert work[slow] < work[1 - slow]
        assert cut.layout.order == ((0, 1) if slow == 0 else (1, 0))
    # A place is as fast as its slowest rank, in any pipeline and any lane: here they are alike.
    alike = cut_model(model, BUCKETS, planned, 2, 8, sp=2, speeds=(1, 0.5, 1, 1, 1, 1, 0.5, 1))
    assert {device.speed for device in alike.planner.cost.devices} == {0.5}


def _calls_of(stage: ProgramStage) -> int:
    return sum(n.op == "call_function" for n in stage.part.program.gm.graph.nodes)


def test_what_inductor_compiles_is_said_not_to_be_compared(parts):
    model, planned, cut = parts
    (runnable,) = planned.traces
    other = replace(runnable.traced, backend="inductor")
    verifier = Verifier(model, BUCKETS, planned, "auto")
    runnable.traced, kept = other, runnable.traced
    try:
        assert stages_problem(cut, model, verifier) is None
    finally:
        runnable.traced = kept
    assert verifier.lines == ["stages: NOT compared with the model: compiled by inductor"]
