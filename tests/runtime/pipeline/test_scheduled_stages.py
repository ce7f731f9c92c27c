"""What the planner of schedules is told of a traced model: its stages' own costs."""

import pytest

from dcpc.compiled.pipeline import ScheduledStages, StageDevice, StageState, stages_of
from dcpc.symbolic_profile import OptimizerMemory
from tests.cases.stages import CASES, captured, evenly, of_one_trace


def scheduled(memory_bytes):
    model, traced, chain = captured(CASES["gpt_tied"])
    parts = stages_of(traced, model, chain, evenly(chain, 2))
    steps = [p.study({"batch": 2, "seq": 48}).steps for p in parts]
    rows = [
        [of_one_trace(p.recomputing(k)) for k in (0, most // 2, most)]
        for p, most in zip(parts, steps, strict=True)
    ]
    kept = [StageState.of([p], OptimizerMemory()).resident_bytes for p in parts]
    devices = [StageDevice(memory_bytes=memory_bytes + n) for n in kept]
    return ScheduledStages(rows, lambda n: {"seq": n}, devices)


def test_costs_are_those_of_the_stages_graphs():
    cost = scheduled(1e9)
    assert cost.memory_bytes == pytest.approx((1e9, 1e9))
    for stage in range(2):
        none, _, every = cost.options(stage, 3, 37)
        found = cost.rows[stage][0].by_trace[0].predict({"batch": 3, "seq": 37})
        assert none.forward_s + none.backward_s == pytest.approx(found.seconds_s)
        assert none.held_bytes > every.held_bytes
        assert none.backward_s < every.backward_s
    hop = cost.hop(0, 3, 37)
    assert hop.forward_bytes == hop.backward_bytes == 3 * 37 * 32 * 8
    padded = cost.padded(0, 2)
    alone = [cost.options(s, 4, 16)[0] for s in range(2)]
    assert float(padded.seconds(4, 16)) == max(c.forward_s + c.backward_s for c in alone)
