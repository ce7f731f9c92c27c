"""The lower bound of a step: no plan is below it, and it is reached where samples force it."""

from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcpc.buckets import Bucket
from dcpc.ir import PlanRow
from dcpc.runtime.planner.bound import step_bound
from dcpc.runtime.planner.step_planner import plan_step
from dcpc.runtime.planner.table import PlanTable
from tests.cases.best_plan import brute_force
from tests.cases.plan_tables import BUCKETS, tables

SHORT, MIDDLE, LONG = range(3)


def table_of(seconds, world, speeds=()):
    """A table of one bucket for each list of (sp, micro_batch, seconds)."""
    rows = tuple(tuple(PlanRow(sp, m, 0, s) for sp, m, s in own) for own in seconds)
    return PlanTable(BUCKETS, rows, world, node_ranks=8, speeds=speeds)


@settings(deadline=None, max_examples=60)
@given(tables(worlds=(1, 2, 3)), st.lists(st.sampled_from(BUCKETS), min_size=1, max_size=4))
def test_no_plan_ends_before_the_bound(table, buckets):
    keys = [table.key(b) for b in buckets]
    bound = step_bound(keys, table)
    best_s = brute_force(buckets, table)
    assert 0 < bound.work_s <= bound.seconds_s <= best_s * (1 + 1e-9)
    slow = PlanTable(
        table.buckets, table.rows, table.world, table.node_ranks,
        speeds=(0.5, 1.0, 0.8)[: table.world],
    )  # fmt: skip
    assert step_bound(keys, slow).seconds_s <= brute_force(buckets, slow) * (1 + 1e-9)
    assert step_bound(keys, table, pads=True).seconds_s <= best_s * (1 + 1e-9)


@settings(deadline=None, max_examples=60, derandomize=True)
@given(st.data())
def test_the_bound_is_near_the_best(data):
    ratios = []
    for _ in range(3):
        table = data.draw(tables(worlds=(1, 2, 3)))
        buckets = data.draw(st.lists(st.sampled_from(BUCKETS), min_size=1, max_size=4))
        bound_s = step_bound([table.key(b) for b in buckets], table).seconds_s
        ratios.append(bound_s / brute_force(buckets, table))
    assert mean(ratios) > 0.8  # of 300 tables 0.983 in the mean, 71% exact; work alone 0.885


def test_one_long_sample_forces_the_step():
    table = table_of([[(1, 1, 1.0)], [(1, 1, 2.0)], [(1, 1, 30.0), (4, 1, 10.0)]], 8)
    buckets = [BUCKETS[SHORT]] * 6 + [BUCKETS[LONG]]
    assert step_bound([table.key(b) for b in buckets], table).seconds_s == 10.0
    plan = plan_step(list(enumerate(buckets)), table)
    assert plan.makespan_s == plan.bound_s == 10.0
    assert "the longest samples force 10 s" in plan.binds


def test_samples_that_must_run_wide_cost_all_their_ranks():
    # At 10 s each runs on four ranks of eight: three of them take twice as long.
    table = table_of([[(1, 1, 1.0)], [(1, 1, 2.0)], [(1, 1, 30.0), (4, 1, 10.0)]], 8)
    assert step_bound([LONG] * 2, table).seconds_s == 10.0
    assert step_bound([LONG] * 3, table).seconds_s == pytest.approx(20.0)


@pytest.mark.parametrize(("count", "ranks", "best_s"), [(3, 2, 12.0), (5, 2, 18.0), (4, 3, 12.0)])
def test_samples_are_not_halved(count, ranks, best_s):
    table = table_of([[(1, 1, 6.0)], [(1, 1, 6.0)], [(1, 1, 6.0)]], ranks)
    assert step_bound([SHORT] * count, table).seconds_s == pytest.approx(best_s)


def test_few_samples_share_no_more_launches_than_they_can():
    table = table_of([[(1, 1, 3.0), (1, 8, 10.0)]] * 3, 1)
    assert step_bound([SHORT], table).seconds_s == 3.0
    assert step_bound([SHORT] * 2, table).seconds_s == pytest.approx(4.0)
    assert step_bound([SHORT] * 16, table).seconds_s == pytest.approx(20.0)


def test_a_bound_of_many_buckets_is_the_same_in_any_order():
    many = tuple(Bucket.of({"seq": 8 * n}) for n in range(1, 20))
    rows = tuple(tuple(PlanRow(d, 1, 0, b["seq"] / d) for d in (1, 2)) for b in many)
    table = PlanTable(many, rows, 4, node_ranks=8)
    keys = [k for k in range(len(many)) for _ in range(k % 3 + 1)]
    assert step_bound(keys, table) == step_bound(keys[::-1], table)
