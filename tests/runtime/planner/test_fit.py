"""Micro-batches are cut and widened so that all ranks end by one line."""

import pytest

from dcpc.buckets import Bucket
from dcpc.ir import PlanRow
from dcpc.runtime.planner.fit import fitted
from dcpc.runtime.planner.plans import PlannedMicroBatch, step_plan
from dcpc.runtime.planner.table import PlanTable

BUCKET = Bucket.of({"seq": 4})


def price_of(table):
    def price(mb):
        row, seconds_s = table.run(mb.bucket, mb.sp, len(mb.sample_ids))
        ranks, ids = mb.ranks, mb.sample_ids
        return PlannedMicroBatch(
            mb.bucket, mb.sp, ranks, ids, seconds_s, row.micro_batch, row.menu_step
        )

    return price


def fit(rows, world, samples, bound_s):
    table = PlanTable((BUCKET,), (tuple(rows),), world, node_ranks=8)
    price = price_of(table)
    whole = price(PlannedMicroBatch(BUCKET, 1, (0,), tuple(range(samples)), 0.0, 0, 0))
    plan = fitted(step_plan([whole], world), table, price, bound_s)
    assert sorted(i for mb in plan.micro_batches for i in mb.sample_ids) == [*range(samples)]
    return plan


def test_a_long_micro_batch_is_cut_at_the_line():
    plan = fit([PlanRow(1, 1, 0, 1.0), PlanRow(1, 8, 0, 8.0)], 2, 8, 4.0)
    assert plan.makespan_s == pytest.approx(4.0)
    assert plan.busy_s == pytest.approx((4.0, 4.0))


def test_a_single_sample_takes_a_wider_group_that_ends_by_the_line():
    plan = fit([PlanRow(1, 1, 0, 4.0), PlanRow(3, 1, 0, 1.5)], 4, 1, 1.0)
    assert plan.micro_batches[0].ranks == (0, 1, 2)
    assert plan.makespan_s == 1.5


def test_a_plan_that_cannot_end_earlier_is_returned():
    plan = fit([PlanRow(1, 4, 0, 4.0)], 1, 4, 4.0)
    assert len(plan.micro_batches) == 1
    assert plan.makespan_s == 4.0
