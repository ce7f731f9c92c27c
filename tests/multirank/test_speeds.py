"""A slow rank: its seconds are measured, later plans deal by its speed, and numbers stay exact."""

import warnings

import pytest

import dcpc
from dcpc.runtime.planner.speeds import slowness
from dcpc.runtime.step import on_group
from tests.cases.exactness import SPLITTING
from tests.cases.launch import run_prepared
from tests.cases.ragged import Ragged, gpt
from tests.cases.ready import Ready
from tests.cases.steps import compared

SIZES = [{"seq": 24, "batch": 1}]
PAD = {"input_ids": 0, "labels": -100}


class PlannedClock:
    """Tells the seconds that were planned, over this rank's speed."""

    speed, spans = 1.0, ()

    def __init__(self, device):
        pass

    def mark(self):
        pass

    def spans_s(self):
        return [*(s / PlannedClock.speed for s in PlannedClock.spans), 0.0]


def ready(speeds: object) -> Ready:
    warnings.simplefilter("ignore")
    buckets = dcpc.Buckets(dict.fromkeys(("input_ids", "labels"), "int64[batch, seq]"), SIZES)
    options = {"backend": "eager", "device": SPLITTING, "verify": "off", "sp": 1}
    return Ready(gpt(), buckets, 2, speeds=speeds, **options)


def train(rank: int, made: Ready) -> dict[str, object]:
    warnings.simplefilter("ignore")
    on_group.Clock, PlannedClock.speed = PlannedClock, 0.4 if rank == 1 else 1.0
    compiled = made.compile()
    loader = dcpc.DataLoader(
        Ragged(), compiled, tokens_per_step=70, pad=PAD, weight="labels", lookahead=1
    )
    found: dict[str, object] = {"errors": [], "tokens": [], "report": "", "plans": []}
    for _ in range(4):
        for step in loader:
            own = [step.plan.micro_batches[mb.number] for mb in step.micro_batches]
            plan = step.plan
            PlannedClock.spans = [m.seconds_s / slowness(plan.speeds, rank, 1) for m in own]
            found["errors"].append(compared(compiled, step, Ragged()))
            found["tokens"].append(sum(m.shape["seq"] * len(m.sample_ids) for m in own))
            found["plans"].append((plan.fingerprint, plan.speeds))
    stats = compiled.stats()
    found["speeds"], found["changes"] = stats.speeds, stats.speed_changes
    found["report"] = compiled.report().splitlines()[-1]
    return found


@pytest.mark.multirank
def test_a_slow_rank_gets_less_once_it_is_known():
    first, second = run_prepared(ready, train, 2, "auto", timeout_s=200)
    for found in (first, second):
        assert max(found["errors"]) < 1e-10
        assert found["speeds"] == (1.0, 0.4)
        assert found["changes"] == 1
        assert "as fast as 1.00 0.40 of the fastest, as measured" in found["report"]
    assert first["plans"] == second["plans"]
    assert first["plans"][0][1] == ()
    assert first["plans"][-1][1] == (1.0, 0.4)
    before, after = (
        sum(second["tokens"][at]) / sum(first["tokens"][at])
        for at in (slice(0, 8), slice(-2, None))
    )
    assert before > 0.7
    assert after < 0.6


@pytest.mark.multirank
def test_given_speeds_are_dealt_by_from_the_first_step():
    first, second = run_prepared(ready, train, 2, [1.0, 0.4], timeout_s=200)
    assert max(first["errors"] + second["errors"]) < 1e-10
    assert {speeds for _, speeds in first["plans"]} == {(1.0, 0.4)}
    assert first["changes"] == 0
    assert sum(second["tokens"]) < 0.6 * sum(first["tokens"])
