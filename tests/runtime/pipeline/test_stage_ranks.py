"""Traced models in stages on gloo ranks: the plain model's numbers on random schedules."""

import pytest

from dcpc.compiled.pipeline import stages_of
from dcpc.runtime.groups.groups import Groups
from dcpc.runtime.pipeline.executor import PipelineBatch
from dcpc.runtime.pipeline.grid import PipelineGrid
from dcpc.runtime.pipeline.step import pipeline_step
from tests.cases.launch import run_ranks
from tests.cases.stages import CASES, captured, evenly, plain_gradients
from tests.fuzz.pipelines import drawn_schedule

pytestmark = pytest.mark.multirank


def errors_of(rank: int, name: str, stages: int, steps: int) -> list[float]:
    """Returns the largest relative errors of loss and gradients of this rank's stage.

    Each step has other shapes and another number of micro-batches.
    """
    groups, case = Groups.default(), CASES[name]
    model, traced, chain = captured(case)
    stage = stages_of(traced, model, chain, evenly(chain, stages))[rank % stages]
    grid = PipelineGrid.make(groups, stages, stage.parameters)
    found = []
    for step in range(steps):
        count = 1 + (step + 1) % 3
        sizes = [case.runs[(step + n) % len(case.runs)] for n in range(count * grid.replicas)]
        data = [case.data(each, 10 * step + n) for n, each in enumerate(sizes)]
        weights = [1.0 + 0.5 * n for n in range(len(data))]
        batches = [PipelineBatch(*each) for each in zip(data, sizes, weights, strict=True)]
        own = batches[grid.replica * count :][:count]
        schedule = drawn_schedule(step, stages, count)
        model.zero_grad()
        result = pipeline_step([stage], own, schedule, grid, model.named_parameters())
        mine = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        shares = [w / sum(weights) for w in weights]
        losses, wanted = plain_gradients(model, data, shares)
        loss = sum(float(x) * share for x, share in zip(losses, shares, strict=True))
        found.append(abs(result.loss - loss) / abs(loss))
        assert mine.keys() == wanted.keys() & set(stage.parameters)
        found += [float((g - wanted[n]).norm() / wanted[n].norm()) for n, g in mine.items()]
    return found


def test_stage_graphs_on_ranks_have_the_plain_models_numbers():
    for errors in run_ranks(errors_of, 2, "gpt_tied", 2, 3, timeout_s=240.0):
        assert max(errors) < 1e-10
