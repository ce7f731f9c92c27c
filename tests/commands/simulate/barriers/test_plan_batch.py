"""The planner: every sequence once, ranks disjoint, memory kept, bound below, near brute force."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcpc.commands.simulate.barriers import Effort, LinearCost, Recompute, plan_batch
from dcpc.commands.simulate.barriers.baselines import BASELINES, fixed_sp
from dcpc.commands.simulate.barriers.bound import lower_bound, simple_bound
from dcpc.commands.simulate.barriers.workload import tabulate
from dcpc.errors import PlanError


def linear(ranks=8, tokens=1000, rows=((1.0, 1.0),), fixed_s=0.05, node_ranks=4):
    return LinearCost(
        ranks=ranks,
        fixed_s=fixed_s,
        quadratic_s=2e-8,
        linear_s=1e-4,
        comm_bytes=1.0,
        bandwidth_bytes_per_s={2: 2e5, 4: 1e5, 8: 2e4, 64: 1e4},
        memory_bytes=float(tokens),
        recompute=tuple(Recompute(f"row {i}", b, f) for i, (b, f) in enumerate(rows)),
        node_ranks=node_ranks,
    )


def check(plan, keys, cost):
    seen = sorted(i for s in plan.steps for g in s.groups for i in g.sequences)
    assert seen == list(range(len(keys)))
    for step in plan.steps:
        used = [rank for group in step.groups for rank in group.ranks]
        assert len(used) == len(set(used))
        assert min(used) >= 0
        assert max(used) < cost.ranks
        for group in step.groups:
            check_group(group, keys, cost)
        longest_s = max(group.load_s for group in step.groups)
        assert step.seconds_s == pytest.approx(cost.fixed_s + longest_s)
    assert plan.seconds_s == pytest.approx(sum(step.seconds_s for step in plan.steps))
    assert plan.seconds_s >= plan.bound_s >= simple_bound(tabulate(keys, cost)) - 1e-9


def check_group(group, keys, cost):
    assert group.lengths == tuple(keys[i] for i in group.sequences)
    assert group.degree in cost.degrees
    if group.degree <= cost.node_ranks:
        assert group.ranks[0] // cost.node_ranks == group.ranks[-1] // cost.node_ranks
    row = cost.recompute[cost.settings.index(group.setting)]
    assert sum(group.lengths) * row.token_bytes <= cost.memory_bytes * group.degree


lengths = st.lists(
    st.one_of(st.integers(1, 300), st.integers(1, 3000), st.sampled_from([128, 256, 7000])),
    min_size=1, max_size=60,
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(keys=lengths, ranks=st.sampled_from([8, 12]), free=st.booleans())
def test_linear_plan_holds_everything(keys, ranks, free):
    cost = linear(ranks, rows=((1.0, 1.0), (0.5, 1.3)) if free else ((1.0, 1.0),))
    plan = plan_batch(keys, cost)
    check(plan, keys, cost)
    assert plan == plan_batch(keys, cost)


@settings(max_examples=25, deadline=None)
@given(keys=lengths, name=st.sampled_from(sorted(BASELINES)))
def test_baseline_holds_everything_and_is_no_faster(keys, name):
    keys = [*keys, 5000]
    cost = linear()
    plan = BASELINES[name](keys, cost)
    check(plan, keys, cost)
    assert plan_batch(keys, cost).seconds_s <= plan.seconds_s * 1.001


def compositions(total, parts):
    """Degrees of at most `parts` groups with sum at most `total`, descending."""
    yield ()
    if parts:
        for d in range(1, total + 1):
            for rest in compositions(total - d, parts - 1):
                if not rest or rest[0] <= d:
                    yield (d, *rest)


def group_s(cost, keys, degree):
    compute_s = sum(cost.quadratic_s * key * key + cost.linear_s * key for key in keys)
    return (compute_s + cost.comm_bytes / cost.bandwidth(degree) * sum(keys)) / degree


def brute_force(keys, cost):
    """Least seconds of any plan: all set partitions into micro-steps, degrees and assignments."""
    n = len(keys)
    one: dict[tuple[int, ...], float] = {}

    def step_s(items):
        if items not in one:
            best = float("inf")
            for degrees in compositions(cost.ranks, len(items)):
                for at in product(range(len(degrees)), repeat=len(items)) if degrees else ():
                    groups = [[keys[i] for i, g in zip(items, at, strict=True) if g == h]
                              for h in range(len(degrees))]  # fmt: skip
                    if any(
                        sum(g) > cost.tokens(0) * d for g, d in zip(groups, degrees, strict=True)
                    ):
                        continue
                    loads = [group_s(cost, g, d) for g, d in zip(groups, degrees, strict=True)
                             if g]  # fmt: skip
                    best = min(best, max(loads) + cost.fixed_s)
            one[items] = best
        return one[items]

    least = {0: 0.0}
    for mask in range(1, 2**n):
        subset = mask
        best = float("inf")
        while subset:
            if subset & mask & -mask:  # the first sequence's micro-step
                items = tuple(i for i in range(n) if subset >> i & 1)
                best = min(best, step_s(items) + least[mask ^ subset])
            subset = (subset - 1) & mask
        least[mask] = best
    return least[2**n - 1]


@settings(max_examples=40, deadline=None)
@given(
    keys=st.lists(st.integers(50, 2500), min_size=1, max_size=4),
    fixed_s=st.sampled_from([0.0, 0.02, 0.3]),
)
def test_tiny_plan_is_within_3_percent_of_brute_force(keys, fixed_s):
    cost = linear(ranks=4, fixed_s=fixed_s)
    best_s = brute_force(keys, cost)
    assert lower_bound(tabulate(keys, cost)) <= best_s * (1 + 1e-9)
    assert plan_batch(keys, cost).seconds_s <= best_s * 1.03


def test_free_recompute_never_costs_time():
    keys = [6000, 2500, 900, *[120] * 40]
    fixed = plan_batch(keys, linear()).seconds_s
    assert plan_batch(keys, linear(rows=((1.0, 1.0), (0.5, 1.3)))).seconds_s <= fixed


def test_more_effort_is_no_worse():
    keys = [6000, 2500, 900, 700, *[120, 250] * 40]
    quick = plan_batch(keys, linear(), Effort(packings=500, patterns=2))
    assert plan_batch(keys, linear(), Effort(packings=50_000)).seconds_s <= quick.seconds_s


def test_unlisted_degree_has_the_next_listed_bandwidth():
    cost = linear()
    assert cost.bandwidth(3) == cost.bandwidth(4)
    assert cost.bandwidth(1) == float("inf")


def test_sequence_that_fits_nowhere_is_refused():
    with pytest.raises(PlanError, match="sequence of key 9000"):
        plan_batch([10, 9000], linear())


def test_empty_batch_is_refused():
    with pytest.raises(PlanError, match="got 0 sequences"):
        plan_batch([], linear())


def test_padded_fixed_sp_names_the_missing_bucket():
    with pytest.raises(PlanError, match="700 tokens is longer than every bucket"):
        fixed_sp([700], linear(), 4, pad_to=[512])


def test_plan_says_what_binds():
    plan = plan_batch([6000, *[100] * 20], linear())
    assert "forced by memory" in plan.binds
    assert "sequence 6000 at sp=" in plan.binds
    assert 0 < plan.busy <= 1
