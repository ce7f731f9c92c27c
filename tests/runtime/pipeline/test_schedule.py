"""Schedules of a pipeline: the check, the replay, the bound and the search, on random costs."""

import random
from dataclasses import replace
from itertools import permutations, product
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcpc.errors import PlanError
from dcpc.runtime.pipeline.schedule import (
    Action,
    Hop,
    PipelineSchedule,
    PipelineWork,
    StageCost,
    WaitFree,
    adaptive,
    check,
    fitted,
    lower_bound,
    one_f_one_b,
    replay,
    search,
)
from tests.fuzz.pipelines import random_schedule, random_work, runs, spoiled


def passes(schedule: PipelineSchedule, count: int) -> bool:
    try:
        check(schedule, count)
    except PlanError:
        return False
    return True


def uniform(stages: int, count: int, held: float = 1.0) -> PipelineWork:
    cost = StageCost(1.0, 2.0, held_bytes=held, forward_bytes=held, backward_bytes=held)
    return PipelineWork(
        (((cost,),) * count,) * stages, ((Hop(),) * count,) * (stages - 1), (inf,) * stages
    )


def plain(count: int, stages: int) -> PipelineSchedule:
    return one_f_one_b(range(count), ((0,) * count,) * stages)


@given(st.integers(0, 10**9), st.integers(1, 4), st.integers(1, 6))
@settings(max_examples=400, deadline=None)
def test_check_passes_exactly_what_runs(seed, stages, count):
    rng = random.Random(seed)
    schedule = random_schedule(rng, random_work(rng, stages, count))
    if rng.random() < 0.4:
        schedule = spoiled(rng, schedule)
    assert passes(schedule, count) == runs(schedule, count)


def test_fuzz_has_schedules_of_both_kinds():
    found = []
    for seed in range(200):
        rng = random.Random(seed)
        work = random_work(rng, 3, 3)
        found.append(passes(random_schedule(rng, work), 3))
    assert 20 < sum(found) < 180


@pytest.mark.parametrize(
    ("orders", "text"),
    [
        (
            ["F0 B0 F1 B1", "F1 B1 F0 B0"],
            "got micro-batch 0 as number 0 of the forwards of stage 0",
        ),
        (["F0 B0 F1 B1", "F0 F1 B0 B1"], "B0 of stage 0, F1 of stage 1 waiting for each other"),
        (["F0 B0 F1", "F0 B0 F1 B1"], "got no whole backward of micro-batch 1 on stage 0"),
        (["F0 B0 B0 F1 B1", "F0 B0 F1 B1"], "got B0 on stage 0 after F B of this micro-batch"),
        (["B0 F0 F1 B1", "F0 B0 F1 B1"], "got B0 on stage 0 after nothing"),
        (["F0 B0 F1 B1 F2 B2", "F0 B0 F1 B1"], "got F2 on stage 0"),
    ],
)
def test_check_says_what_is_wrong(orders, text):
    actions = tuple(tuple(Action(a[0], int(a[1:])) for a in o.split()) for o in orders)
    with pytest.raises(PlanError, match=text):
        check(PipelineSchedule(actions, ((0, 0), (0, 0))), 2)


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_1f1b_of_equal_micro_batches_takes_what_the_formula_says(stages):
    work = uniform(stages, 8)
    found = replay(work, plain(8, stages))
    assert found.makespan_s == pytest.approx(3.0 * (8 + stages - 1))
    assert found.bubble_share == pytest.approx((stages - 1) / (8 + stages - 1))
    assert found.peak_bytes == pytest.approx([float(stages - s) for s in range(stages)])
    assert lower_bound(work).seconds_s == pytest.approx(found.makespan_s)


def test_messages_count_with_the_sender_until_they_arrive_and_with_the_receiver_from_the_post():
    cost = StageCost(1.0, 1.0, held_bytes=10.0, forward_bytes=10.0, backward_bytes=10.0)
    work = PipelineWork((((cost,),), ((cost,),)), ((Hop(0.5, 0.25, 3.0, 2.0),),), (inf, inf))
    found = replay(work, one_f_one_b([0], ((0,),) * 2))
    assert [(r.begin_s, r.end_s) for r in found.ran[0]] == [(0.0, 1.0), (3.75, 4.75)]
    assert found.peak_bytes == (10.0 + 3.0 + 2.0, 10.0)


@given(st.integers(0, 10**9), st.integers(1, 4), st.integers(1, 5), st.booleans())
@settings(max_examples=150, deadline=None)
def test_no_schedule_is_faster_than_the_bound(seed, stages, count, split):
    rng = random.Random(seed)
    work = random_work(rng, stages, count, rng.choice([inf, 12.0, 8.0]))
    bound_s = lower_bound(work).seconds_s
    for _ in range(10):
        schedule = random_schedule(rng, work, split)
        if not passes(schedule, count):
            continue
        found = replay(work, schedule)
        if all(p <= m for p, m in zip(found.peak_bytes, work.memory_bytes, strict=True)):
            assert found.makespan_s >= bound_s - 1e-9


def every_schedule(work: PipelineWork):
    """Yields all schedules of two stages that keep one order on both."""
    count = work.micro_batches

    def walks(f, b):
        if f == b == count:
            yield ()
        if f < count:
            yield from (("F", *rest) for rest in walks(f + 1, b))
        if b < f:
            yield from (("B", *rest) for rest in walks(f, b + 1))

    paths = [*walks(0, 0)]
    for order in permutations(range(count)):
        for back in permutations(range(count)):
            for pair in product(paths, repeat=2):
                taken = []
                for path in pair:
                    f, b = iter(order), iter(back)
                    taken.append(tuple(Action(k, next(f if k == "F" else b)) for k in path))
                for row in product(*(range(len(o)) for r in work.costs for o in r)):
                    yield PipelineSchedule(tuple(taken), (row[:count], row[count:]))


@pytest.mark.parametrize("seed", range(4))
def test_search_and_bound_against_all_schedules_of_a_small_step(seed):
    rng = random.Random(seed)
    work = random_work(rng, 2, 3, rng.choice([inf, 9.0]), settings=1)
    best_s = min(
        found.makespan_s
        for schedule in every_schedule(work)
        if passes(schedule, 3)
        for found in [replay(work, schedule)]
        if max(found.peak_bytes) <= work.memory_bytes[0]
    )
    found = search(work)
    assert lower_bound(work).seconds_s <= best_s + 1e-9
    assert best_s - 1e-9 <= found.replay.makespan_s <= best_s * 1.02


@given(st.integers(0, 10**9), st.integers(1, 4), st.integers(1, 8), st.booleans())
@settings(max_examples=60, deadline=None)
def test_wait_free_orders_take_the_seconds_they_say_and_pass(seed, stages, count, split):
    rng = random.Random(seed)
    work = random_work(rng, stages, count, rng.choice([inf, 9.0]))
    sequence = rng.sample(range(count), count)
    caps = [rng.randrange(1, count + 2) for _ in range(stages)]
    flow = WaitFree(work, split)
    made = flow.order(sequence, work.fastest, caps, (0.0,) * stages)
    assert made is not None, "each micro-batch fits alone"
    schedule, seconds_s = made
    check(schedule, count)
    assert replay(work, schedule).makespan_s == pytest.approx(seconds_s, abs=1e-9)
    kinds = {a.kind for order in schedule.orders for a in order}
    if not split or work.memory_bytes[0] == inf:
        assert kinds == ({"F", "I", "W"} if split else {"F", "B"})
    silent = tuple(
        tuple(replace(h, forward_bytes=0, backward_bytes=0) for h in r) for r in work.hops
    )
    peaks = replay(replace(work, hops=silent), schedule).peak_bytes
    assert max(peaks) <= work.memory_bytes[0] + 1e-9
    # It gives up on one that takes longer, and on no other.
    again = (sequence, work.fastest, caps, (0.0,) * stages, True)
    assert flow.order(*again, limit_s=seconds_s) == made
    assert flow.order(*again, limit_s=0.999 * seconds_s) is None


@given(st.integers(0, 10**9), st.integers(1, 4), st.integers(1, 8), st.booleans())
@settings(max_examples=25, deadline=None)
def test_search_fits_and_is_no_slower_than_its_candidates(seed, stages, count, split):
    rng = random.Random(seed)
    work = random_work(rng, stages, count, rng.choice([inf, 14.0, 7.0]))
    found = search(work, split=split, limit=2_000)
    check(found.schedule, count)
    again = replay(work, found.schedule)
    assert all(p <= m for p, m in zip(again.peak_bytes, work.memory_bytes, strict=True))
    assert found.bound.seconds_s <= found.replay.makespan_s + 1e-9
    rows = fitted(work, range(count), range(stages, 0, -1))
    for other in (one_f_one_b(range(count), rows), adaptive(work, range(count), rows)):
        told = None if other is None else replay(work, other)
        if told and max(told.peak_bytes) <= work.memory_bytes[0]:
            assert found.replay.makespan_s <= told.makespan_s + 1e-9


def test_search_is_the_same_every_time():
    work = random_work(random.Random(3), 3, 6, 10.0)
    assert search(work).schedule == search(work).schedule


def test_more_memory_is_recomputed_less():
    tight, wide = (random_work(random.Random(5), 3, 8, size) for size in (6.0, 60.0))
    chosen = [sum(map(sum, search(w).schedule.settings)) for w in (tight, wide)]
    assert chosen[0] > chosen[1] == 0


def test_a_micro_batch_that_fits_nowhere_is_refused_by_name():
    with pytest.raises(PlanError, match="micro-batch 0 on pipeline stage 0: got 5e-10 GB"):
        search(PipelineWork(uniform(2, 2).costs, uniform(2, 2).hops, (0.5, 0.5)))


@pytest.mark.parametrize("held", [0, 1])
def test_what_was_sent_is_there_until_a_message_proves_that_it_was_taken(held):
    schedule = PipelineSchedule.of_text("F0 F1 F2 B0 B1 B2:0 0 0;F0 F1 B0 F2 B1 B2:0 0 0")
    cost = StageCost(1.0, 1.0, sent_held_bytes=held)
    work = PipelineWork((((cost,),) * 3,) * 2, ((Hop(forward_bytes=5.0),) * 3,), (inf, inf))
    own, at = 5.0 - held, dict(replay(work, schedule).held[0])  # bytes from each second on
    # B0, which stage 0 takes at 4, was made when F0 and F1 had been taken; B1, at 6, when F2 had.
    assert [at[s] for s in (1, 2, 3, 4, 6)] == [own, 2 * own, 3 * own, own, 0.0]
