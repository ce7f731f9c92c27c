import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcpc.buckets import Bucket
from dcpc.errors import PlanError
from dcpc.runtime.planner.deal import deal
from dcpc.runtime.planner.plans import (
    PlannedMicroBatch,
    imbalance,
    rounds,
    rounds_of,
    step_plan,
)
from tests.cases.fakes import plan_for


def bucket(seq: int) -> Bucket:
    return Bucket.of({"seq": seq})


@st.composite
def problems(draw):
    world = draw(st.sampled_from([1, 2, 4, 6, 8]))
    degrees = [d for d in range(1, world + 1) if world % d == 0]
    lengths = draw(st.lists(st.integers(1, 500), min_size=1, max_size=5, unique=True))
    plans = {
        bucket(n): plan_for(
            bucket(n),
            draw(st.sampled_from(degrees)),
            draw(st.integers(1, 9)),
            draw(st.floats(1e-3, 100)),
        )
        for n in lengths
    }
    chosen = draw(st.lists(st.sampled_from(lengths), min_size=1, max_size=60))
    return [(i * 7, bucket(n)) for i, n in enumerate(chosen)], plans, world


@given(problems())
def test_every_sample_is_dealt_exactly_once(problem):
    samples, plans, world = problem
    plan = deal(samples, plans, world)
    dealt = [(i, mb.bucket) for mb in plan.micro_batches for i in mb.sample_ids]
    assert sorted(dealt, key=lambda x: x[0]) == samples


@given(problems())
def test_micro_batches_keep_the_settings_of_their_bucket(problem):
    samples, plans, world = problem
    sizes: dict[Bucket, list[int]] = {}
    for mb in deal(samples, plans, world).micro_batches:
        setting = plans[mb.bucket]
        assert mb.sp == setting.sp
        assert mb.ranks == tuple(range(mb.ranks[0], mb.ranks[0] + mb.sp))
        assert mb.ranks[0] % mb.sp == 0
        assert mb.seconds_s == pytest.approx(
            setting.seconds_s * len(mb.sample_ids) / setting.micro_batch
        )
        sizes.setdefault(mb.bucket, []).append(len(mb.sample_ids))
    for b, counts in sizes.items():
        assert max(counts) <= plans[b].micro_batch
        assert max(counts) - min(counts) <= 1


@given(problems())
def test_running_the_order_never_overlaps_on_a_rank_and_ends_as_predicted(problem):
    samples, plans, world = problem
    plan = deal(samples, plans, world)
    free_s = [0.0] * world
    for mb in plan.micro_batches:
        end_s = max(free_s[r] for r in mb.ranks) + mb.seconds_s
        for r in mb.ranks:
            free_s[r] = end_s
    assert plan.makespan_s == pytest.approx(max(free_s))
    for r in range(world):
        assert plan.busy_s[r] == pytest.approx(sum(mb.seconds_s for mb in plan.of(r)))
    # Longest first is at most twice the optimum plus one micro-batch's wait for wider blocks.
    longest_s = max(mb.seconds_s for mb in plan.micro_batches)
    if world in (1, 2, 4, 8):
        assert plan.makespan_s <= sum(plan.busy_s) / world + longest_s * (1 + 1e-9)


@given(problems(), st.randoms())
def test_plan_is_a_function_of_its_arguments(problem, rng: random.Random):
    samples, plans, world = problem
    assert deal(samples, plans, world) == deal(list(samples), dict(plans), world)
    assert deal(samples, plans, world).fingerprint == deal(samples, plans, world).fingerprint


def test_few_samples_are_spread_over_idle_ranks():
    plan = deal([(i, bucket(8)) for i in range(8)], {bucket(8): plan_for(bucket(8), 1, 8)}, 4)
    assert [len(mb.sample_ids) for mb in plan.micro_batches] == [2, 2, 2, 2]
    assert plan.imbalance == 0


def test_wide_micro_batches_come_first():
    plans = {bucket(9): plan_for(bucket(9), 4, 1), bucket(2): plan_for(bucket(2), 1, 1)}
    plan = deal([(0, bucket(2)), (1, bucket(9)), (2, bucket(2))], plans, 4)
    assert [mb.sample_ids for mb in plan.micro_batches] == [(1,), (0,), (2,)]
    assert [mb.ranks for mb in plan.micro_batches] == [(0, 1, 2, 3), (0,), (1,)]


def test_imbalance_is_videosys_own():
    assert imbalance([4.0, 2.0]) == pytest.approx((0 + 2) / 2 / 4)
    assert imbalance([]) == imbalance([0.0, 0.0]) == 0


def test_empty_batch_is_an_empty_plan():
    assert deal([], {}, 2).micro_batches == ()


def test_bucket_without_a_plan_is_named():
    with pytest.raises(PlanError, match=r"bucket \{seq: 3\}: got no plan; expected one of \{seq"):
        deal([(0, bucket(3))], {bucket(8): plan_for(bucket(8), 1, 1)}, 1)


def test_degree_that_does_not_divide_the_world_is_refused():
    with pytest.raises(PlanError, match=r"got sp=4, micro_batch=1 for 2 ranks"):
        deal([(0, bucket(8))], {bucket(8): plan_for(bucket(8), 4, 1)}, 2)


@given(st.lists(st.tuples(st.sampled_from([1, 2, 4]), st.integers(0, 3)), min_size=1, max_size=20))
def test_rounds_keep_each_ranks_order_and_share_no_rank(drawn):
    ranks = [tuple(range(first // sp * sp, first // sp * sp + sp)) for sp, first in drawn]
    found = rounds(ranks, 4)
    assert sorted(n for together in found for n in together) == list(range(len(ranks)))
    for together in found:
        held = [r for n in together for r in ranks[n]]
        assert len(held) == len(set(held))
    for rank in range(4):
        own = [n for together in found for n in together if rank in ranks[n]]
        assert own == sorted(own)
    mbs = [PlannedMicroBatch(bucket(8), len(r), r, (i,), 1.0 + i) for i, r in enumerate(ranks)]
    free, lock = step_plan(mbs, 4), step_plan(mbs, 4, block=4)
    assert lock.makespan_s == lock.lockstep_s == free.lockstep_s >= free.makespan_s == free.free_s
    assert lock.makespan_s == sum(max(mbs[n].seconds_s for n in together) for together in found)
    blocks = step_plan(mbs, 4, block=2)
    assert free.makespan_s <= blocks.makespan_s == blocks.lockstep_s <= lock.makespan_s
    for block in (2, 4):
        for rank in range(4):
            seen = rounds_of(lock, rank, block)
            assert seen == rounds_of(lock, rank // block * block, block)
            own = [mb for together in seen for mb in together if rank in mb.ranks]
            assert own == list(lock.of(rank))
    if all(mb.sp < 4 for mb in mbs):  # blocks do not meet
        longest = [[max(mb.seconds_s for mb in together) for together in rounds_of(blocks, r, 2)]
                   for r in (0, 2)]  # fmt: skip
        assert blocks.makespan_s == pytest.approx(max(map(sum, longest)))


def test_a_group_of_parts_of_blocks_is_refused():
    plan = step_plan([PlannedMicroBatch(bucket(8), 4, (1, 2, 3, 4), (0,), 1.0)], 6)
    for block in (2, 3):
        with pytest.raises(PlanError, match=rf"got ranks 1 to 4; expected.*block of {block}"):
            rounds_of(plan, 0, block)
    assert len(rounds_of(plan, 0, 6)) == 1
