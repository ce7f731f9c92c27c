"""From a traced model to a planned step on ranks: its stages' own costs, recompute included."""

import pytest

from dcpc.compiled.pipeline import ScheduledStages, StageDevice, stages_of
from dcpc.runtime.groups.groups import Groups
from dcpc.runtime.pipeline.executor import PipelineBatch
from dcpc.runtime.pipeline.grid import PipelineGrid
from dcpc.runtime.pipeline.planning import plan_pipeline
from dcpc.runtime.pipeline.step import pipeline_step
from tests.cases.launch import run_ranks
from tests.cases.stages import CASES, captured, evenly, plain_gradients

LENGTHS = (48, 16, 16, 37, 24, 16, 48, 24)


def scheduled(memory_bytes):
    model, traced, chain = captured(CASES["gpt_tied"])
    parts = stages_of(traced, model, chain, evenly(chain, 2))
    steps = [p.study({"batch": 2, "seq": 48}).steps for p in parts]
    rows = [
        [p.recomputing(k) for k in (0, most // 2, most)]
        for p, most in zip(parts, steps, strict=True)
    ]
    devices = [StageDevice(memory_bytes=memory_bytes + p.resident_bytes(4)) for p in parts]
    return model, ScheduledStages(rows, lambda n: {"seq": n}, devices)


def on_rank(rank: int, memory_bytes: float) -> tuple[float, int]:
    """Returns the worst error of a planned step, and how often it recomputes."""
    model, cost = scheduled(memory_bytes)
    plan = plan_pipeline(LENGTHS, cost, limit=200)
    data, sizes = [], []
    for number, batch in enumerate(plan.batches):
        sizes.append({"batch": len(batch), "seq": max(LENGTHS[i] for i in batch)})
        data.append(CASES["gpt_tied"].data(sizes[-1], number))
    weights = [float((x["labels"] != -100).sum()) for x in data]
    batches = [PipelineBatch(*row) for row in zip(data, sizes, weights, strict=True)]
    grid = PipelineGrid.make(Groups.default(), 2, cost.rows[rank][0].parameters)
    schedule = plan.found.schedule
    result = pipeline_step(cost.rows[rank], batches, schedule, grid, model.named_parameters())
    mine = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    shares = [w / sum(weights) for w in weights]
    losses, wanted = plain_gradients(model, data, shares)
    loss = sum(float(x) * share for x, share in zip(losses, shares, strict=True))
    errors = [float((g - wanted[n]).norm() / wanted[n].norm()) for n, g in mine.items()]
    return max([abs(result.loss - loss) / loss, *errors]), sum(map(sum, schedule.settings))


@pytest.mark.multirank
def test_a_planned_step_has_the_plain_models_numbers_and_recomputes_where_memory_is_short():
    _, cost = scheduled(1e12)
    tight = 1.3 * max(cost.options(s, 1, 48)[2].backward_bytes for s in range(2))
    found = run_ranks(on_rank, 2, tight, timeout_s=240.0)
    assert all(error < 1e-10 for error, _ in found)
    assert found[0][1] == found[1][1] > 0


def test_costs_are_those_of_the_stages_graphs():
    _, cost = scheduled(1e9)
    assert cost.memory_bytes == pytest.approx((1e9, 1e9))
    for stage in range(2):
        none, _, every = cost.options(stage, 3, 37)
        found = cost.rows[stage][0].predict({"batch": 3, "seq": 37})
        assert none.forward_s + none.backward_s == pytest.approx(found.seconds_s)
        assert none.held_bytes > every.held_bytes
        assert none.backward_s < every.backward_s
    hop = cost.hop(0, 3, 37)
    assert hop.forward_bytes == hop.backward_bytes == 3 * 37 * 32 * 8
    padded = cost.padded(0, 2)
    alone = [cost.options(s, 4, 16)[0] for s in range(2)]
    assert float(padded.seconds(4, 16)) == max(c.forward_s + c.backward_s for c in alone)
