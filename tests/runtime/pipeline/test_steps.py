"""Steps of pipelines on gloo ranks: the plain model's numbers on any schedule."""

import pytest
import torch

from dcpc.errors import DataError, PlanError
from dcpc.runtime.groups.groups import Groups
from dcpc.runtime.pipeline.executor import PipelineBatch
from dcpc.runtime.pipeline.grid import PipelineGrid
from dcpc.runtime.pipeline.schedule import Action, PipelineSchedule, one_f_one_b
from dcpc.runtime.pipeline.step import pipeline_step
from tests.cases.launch import RanksError, run_ranks
from tests.cases.pipeline_stages import HandStage, WholeStage, batch_of, plain_step, tied_model
from tests.fuzz.pipelines import drawn_schedule

pytestmark = pytest.mark.multirank


def shares(step: int, replicas: int) -> list[list[int]]:
    """Numbers of the micro-batches of each replica: other counts in other steps and replicas."""
    counts = [1 + (2 * step + r) % 4 for r in range(replicas)]
    return [list(range(sum(counts[:r]), sum(counts[: r + 1]))) for r in range(replicas)]


def errors_of(stages: int, steps: int) -> list[float]:
    """Runs steps; returns the largest relative errors of loss and this stage's gradients."""
    groups = Groups.default()
    model = tied_model()
    stage = HandStage(model, groups.rank % stages, stages)
    grid = PipelineGrid.make(groups, stages, stage.parameters)
    found = []
    for step in range(steps):
        numbers = shares(step, grid.replicas)
        own = [batch_of(step, n) for n in numbers[grid.replica]]
        batches = [
            PipelineBatch(x, {"batch": x["labels"].shape[0], "seq": x["labels"].shape[1]}, weight)
            for x, weight in own
        ]
        schedule = drawn_schedule(10 * step + grid.replica, stages, len(batches))
        model.zero_grad()
        result = pipeline_step([stage], batches, schedule, grid, model.named_parameters())
        loss, grads = plain_step(model, step, sum(map(len, numbers)))
        found.append(abs(result.loss - loss) / loss)
        for name, p in model.named_parameters():
            if name in stage.parameters:
                found.append(float((p.grad - grads[name]).norm() / grads[name].norm()))
            else:
                assert p.grad is None, "a stage has gradients of its own parameters alone"
    return found


def two_stages(rank: int) -> tuple[list[float], list[str]]:
    """Returns the errors of two stages, and what refused plans say."""
    return errors_of(2, 6), [refusal(rank, kind) for kind in ("split", "empty")]


def refusal(rank: int, kind: str) -> str:
    """Returns what a step says that cannot run."""
    groups = Groups.default()
    stage = WholeStage(tied_model(), rank, 2)
    grid = PipelineGrid.make(groups, 2, stage.parameters)
    x, weight = batch_of(0, 0)
    batch = PipelineBatch(x, {"batch": 1, "seq": 2}, 0.0 if kind == "empty" else weight)
    order = tuple(Action(k, 0) for k in "FIW")
    try:
        pipeline_step([stage], [batch], PipelineSchedule((order, order), ((0,), (0,))), grid, ())
    except (PlanError, DataError) as e:
        return str(e)
    return ""


def four_ranks(rank: int) -> list[float]:
    return errors_of(4, 3) + errors_of(2, 3) + errors_of(1, 2)


def test_two_stages_have_the_plain_models_numbers():
    for errors, said in run_ranks(two_stages, 2, timeout_s=60.0):
        assert max(errors) < 1e-10
        assert "got a backward in two parts (I, W)" in said[0]
        assert "got a total weight of 0.0" in said[1]


@pytest.mark.slow
def test_four_stages_and_two_by_two_have_the_plain_models_numbers():
    for errors in run_ranks(four_ranks, 4, timeout_s=120.0):
        assert max(errors) < 1e-10


def uneven(rank: int) -> None:
    PipelineGrid.make(Groups.default(), 3, ())


def test_ranks_that_are_no_multiple_of_the_stages_are_refused():
    with pytest.raises(RanksError, match="got 2 ranks; expected a multiple of 3"):
        run_ranks(uneven, 2, timeout_s=30.0)


def test_one_stage_alone_needs_no_messages():
    model = tied_model()
    grid = PipelineGrid.make(Groups.default(), 1, HandStage(model, 0, 1).parameters)
    x, weight = batch_of(0, 0)
    batch = PipelineBatch(x, {"batch": 1, "seq": 2}, weight)
    result = pipeline_step(
        [HandStage(model, 0, 1)], [batch], one_f_one_b([0], ((0,),)), grid, model.named_parameters()
    )
    loss, grads = plain_step(model, 0, 1)
    assert result.loss == pytest.approx(loss, rel=1e-12)
    assert torch.equal(model.embedding.weight.grad, grads["embedding.weight"])
