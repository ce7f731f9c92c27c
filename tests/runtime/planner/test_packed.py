"""Packed micro-batches: valid, near the best of all, above their bound; more turns, better ones."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcpc.buckets import Bucket
from dcpc.ir import PlanRow
from dcpc.runtime.planner.own_lengths import BatchLengths, OwnLengths
from dcpc.runtime.planner.packed import bins
from dcpc.runtime.planner.packed.bins import PackedPrices
from dcpc.runtime.planner.step_planner import plan_rows, plan_step
from dcpc.runtime.planner.table import PlanTable

LAUNCH_S, TOKEN_S, SQUARE_S, WIRE_S = 0.5, 2e-3, 2e-5, 4e-4


def seconds_at(bucket, row, sizes, count):
    """A model's: some seconds a launch, a token, a pair of tokens; a group also sends tokens."""
    n = sizes["seq"]
    wire_s = WIRE_S * (row.sp > 1)
    return LAUNCH_S + count * (n * (TOKEN_S + wire_s) + SQUARE_S * n * n) / row.sp


def lengths_of(world=2, multiple=1):
    return OwnLengths(lambda b, s: True, seconds_at, lambda b: {"seq": 1}, multiple)


def table_of(sizes, degrees, world, counts=(1,)):
    """A table in which each rank of a group holds as many tokens as the shortest bucket."""
    buckets = tuple(Bucket((("seq", n),)) for n in sizes)
    rows = tuple(
        tuple(
            PlanRow(sp, count, 0, seconds_at(b, PlanRow(sp, count, 0, 0.0), b.sizes, count))
            for sp in degrees
            for count in counts
            if sp * sizes[0] >= count * b["seq"]
        )
        for b in buckets
    )
    return PlanTable(buckets, rows, world, 8)


def planned(lengths, table, to_bucket=False, **options):
    prices = PackedPrices(lengths_of(), to_bucket)
    return plan_rows(list(enumerate(lengths)), table, prices, **options)


def check(lengths, table, plan, rows):
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    used = [number for mb in plan.micro_batches for number in mb.sample_ids]
    assert sorted(used) == list(range(len(rows)))
    for mb in plan.micro_batches:
        tokens = [sum(lengths[i] for i in rows[number]) for number in mb.sample_ids]
        assert len(tokens) <= mb.micro_batch
        assert max(tokens) <= mb.shape["seq"] <= mb.bucket["seq"]
        assert len(mb.ranks) == mb.sp
        assert mb.ranks[-1] < table.world
        assert table.row_of(mb)
    assert plan.bound_s <= plan.makespan_s


@settings(deadline=None, max_examples=80)
@given(
    st.lists(st.integers(1, 200), min_size=1, max_size=40),
    st.sampled_from([(1, 1), (2, 1), (3, 1), (8, 1), (4, 3)]),
    st.booleans(),
)
def test_every_sequence_is_in_one_row_that_holds_it(lengths, world_and_counts, to_bucket):
    world, most = world_and_counts
    degrees = [d for d in (1, 2, 3, 4, 8) if d <= world]
    table = table_of([200, *(200 * d for d in degrees[1:])], degrees, world, range(1, most + 1))
    check(lengths, table, *planned(lengths, table, to_bucket=to_bucket))


def partitions(items):
    if not items:
        yield []
        return
    for parts in partitions(items[1:]):
        yield [[items[0]], *parts]
        for i, part in enumerate(parts):
            yield [*parts[:i], [items[0], *part], *parts[i + 1 :]]


def least_s(lengths, room):
    """The least seconds on two ranks, by trying all: a bin runs on one rank, or on both first."""

    def taken_s(part, sp):
        tokens, squares = sum(part), sum(n * n for n in part)
        if tokens > sp * room:
            return np.inf
        return LAUNCH_S + (tokens * (TOKEN_S + WIRE_S * (sp > 1)) + SQUARE_S * squares) / sp

    best = np.inf
    for parts in partitions(list(lengths)):
        each = [(taken_s(p, 1), taken_s(p, 2)) for p in parts]
        for where in product((0, 1, 2), repeat=len(parts)):
            ranks = [0.0, 0.0, 0.0]
            for at, (one_s, both_s) in zip(where, each, strict=True):
                ranks[at] += both_s if at == 2 else one_s
            best = min(best, max(ranks[:2]) + ranks[2])
    return best


@pytest.mark.parametrize("seed", range(12))
def test_bound_is_below_the_best_of_all_plans_and_the_plan_near_it(seed):
    random = np.random.default_rng(seed)
    lengths = random.integers(20, 390, random.integers(2, 6)).tolist()
    table = table_of([200, 400], [1, 2], 2)
    plan, _ = planned(lengths, table)
    best_s = least_s(lengths, 200)
    assert plan.bound_s <= best_s * (1 + 1e-9)
    assert best_s * (1 - 1e-9) <= plan.makespan_s <= 1.2 * best_s


def test_seconds_count_what_each_sequence_costs_by_itself():
    """As on a CPU, whose attention works through the sequences of a row by single calls."""
    each_s = 0.05

    def apart_s(bucket, row, sizes, count):
        return seconds_at(bucket, row, sizes, count) + count * each_s

    bucket = Bucket((("seq", 256),))
    row = PlanRow(1, 1, 0, apart_s(bucket, PlanRow(1, 1, 0, 0.0), bucket.sizes, 1))
    table = PlanTable((bucket,), ((row,),), 1, 8)
    own = OwnLengths(lambda b, s: True, apart_s, lambda b: {"seq": 1})
    for lengths in ([256], [64] * 4, [16] * 16, [128, 64, 32, 16, 16], [200, 20, 20, 16]):
        for to_bucket in (False, True):
            prices = PackedPrices(own, to_bucket=to_bucket)
            plan, rows = plan_rows(list(enumerate(lengths)), table, prices)
            squares = sum(n * n for n in lengths)
            expected_s = LAUNCH_S + 256 * TOKEN_S + SQUARE_S * squares + len(lengths) * each_s
            assert len(rows) == 1
            assert type(plan.micro_batches[0].seconds_s) is float, "other ranks print it alike"
            assert plan.makespan_s == pytest.approx(expected_s, rel=0.02)


@pytest.mark.parametrize(("world", "count", "most_gap"), [(4, 120, 0.05), (8, 400, 0.03)])
def test_buckets_that_hold_no_long_sequences_do_not_mislead(world, count, most_gap):
    """A short bucket takes many rows, and so fewer launches, but not the longer sequences."""
    random = np.random.default_rng(0)
    lengths = random.lognormal(4.5, 0.8, count).clip(2, 1600).astype(int).tolist()
    buckets = tuple(Bucket((("seq", n),)) for n in (100, 400, 800, 1600))
    rows = tuple(
        tuple(
            PlanRow(1, m, 0, seconds_at(b, PlanRow(1, m, 0, 0.0), b.sizes, m))
            for m in (1, 2, 4, 8, 16, 32, 64)
            if m <= most
        )
        for b, most in zip(buckets, (64, 16, 4, 2), strict=True)
    )
    table = PlanTable(buckets, rows, world, 8)
    samples = [(i, next(b for b in buckets if b["seq"] >= n)) for i, n in enumerate(lengths)]
    dims = {i: (("seq", n),) for i, n in enumerate(lengths)}
    padded = plan_step(samples, table, "auto", None, BatchLengths(lengths_of(), dims))
    plan, packed = planned(lengths, table)
    check(lengths, table, plan, packed)
    assert plan.gap < most_gap
    assert plan.makespan_s < padded.makespan_s


def test_what_all_lengths_share_is_no_room_between_them():
    """Rows of 200 tokens hold two sequences of 96, with 8 that none can use: 10 take 5 rows."""
    plan, _ = planned([96] * 10, table_of([200], [1], 1))
    assert len(plan.micro_batches) == 5
    assert plan.gap < 2e-3


WIDE = table_of([200, 400, 800, 1600], [1, 2, 3, 4, 6, 8], 8)


def drawn(seed, count=40):
    """Lengths with a heavy tail: few sequences have most of the tokens."""
    lengths = 30 * (1 + np.random.default_rng(seed).pareto(1.1, count))
    return np.minimum(lengths, 1600).astype(int).tolist()


def evolved(lengths, turns, table=WIDE):
    return planned(lengths, table, mode="evolve", turns=range(turns))


@pytest.mark.parametrize("seed", range(4))
def test_more_turns_never_end_later_and_every_sequence_is_in_one_row(seed):
    lengths = drawn(seed)
    plans = [evolved(lengths, turns) for turns in (0, 10, 40)]
    ends_s = [plan.makespan_s for plan, _ in plans]
    assert ends_s == sorted(ends_s, reverse=True)
    assert len({plan.bound_s for plan, _ in plans}) == 1
    check(lengths, WIDE, *plans[-1])


def test_turns_close_part_of_what_the_start_lacks():
    first, last = zip(*([evolved(drawn(s), t)[0] for t in (0, 60)] for s in range(4)), strict=True)
    lacks_s = sum(plan.makespan_s - plan.bound_s for plan in first)
    assert sum(plan.makespan_s - plan.bound_s for plan in last) < 0.9 * lacks_s


def test_an_evolution_goes_on_from_the_search_that_was_made(monkeypatch):
    searched, search = [], bins.search
    monkeypatch.setattr(bins, "search", lambda work: searched.append(work) or search(work))
    lengths, prices = list(enumerate(drawn(0))), PackedPrices(lengths_of())
    first, _ = plan_rows(lengths, WIDE, prices)
    further, _ = plan_rows(lengths, WIDE, prices, turns=range(20))
    assert len(searched) == 1
    assert further.makespan_s <= first.makespan_s
    plan_rows(lengths[1:], WIDE, prices)
    assert len(searched) == 2


def test_equal_turns_give_equal_plans():
    for seed in range(4):
        (plan, rows), (again, rows_again) = (evolved(drawn(seed), 60) for _ in range(2))
        assert (plan.fingerprint, rows) == (again.fingerprint, rows_again)


@pytest.mark.parametrize("lengths", [[5], [3, 3, 3], [1600], [1600, 200, 200, 1]])
def test_small_batches_stay_valid(lengths):
    check(lengths, WIDE, *evolved(lengths, 10))


def test_aligned_groups_stay_aligned():
    table = table_of([200, 400, 800, 1600], [1, 2, 4, 8], 8)
    table = type(table)(table.buckets, table.rows, 8, 8, aligned=True)
    plan, rows = evolved(drawn(2), 30, table)
    check(drawn(2), table, plan, rows)
    assert all(mb.ranks[0] % mb.sp == 0 for mb in plan.micro_batches)


def test_rows_that_differ_by_rounding_are_one_bin_of_a_degree():
    table = table_of([210, 420, 830, 1650], [1, 2, 4, 8], 8)
    every, worth_having = PackedPrices(lengths_of()).kinds(table, range(4))
    assert len(every) == 4 + 3 + 2 + 1
    assert [kind.degree for kind in worth_having] == [1, 2, 4, 8]
