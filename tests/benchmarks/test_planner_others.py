"""Other systems' planners on a formula: valid plans, and their exact parts against all choices."""

from itertools import combinations, combinations_with_replacement, product

import pytest

from benchmarks.planner_others import PLANNERS, bucketed, widened
from dcpc.commands.simulate.formula import LinearCost, Recompute

COST = LinearCost(
    ranks=8, fixed_s=0.1, quadratic_s=1e-8, linear_s=1e-4, comm_bytes=1e4,
    bandwidth_bytes_per_s={2: 1e9, 4: 5e8, 8: 2e8}, memory_bytes=1e6,
    recompute=(Recompute("none", 1e3),),
)  # fmt: skip
LENGTHS = (7000, 3100, 3000, 1500, 900, 900, 800, 640, 500, 320, 300, 200, 200, 100, 64, 64)


@pytest.mark.parametrize("name", PLANNERS)
def test_every_sequence_runs_once_on_ranks_that_hold_it(name):
    plan = PLANNERS[name](LENGTHS, COST)
    ids = sorted(i for mb in plan.micro_batches for i in mb.sample_ids)
    assert ids == list(range(len(LENGTHS)))
    for mb in plan.micro_batches:
        assert sum(LENGTHS[i] for i in mb.sample_ids) <= mb.sp * COST.tokens()
        load_s = sum(COST.load_s(LENGTHS[i], mb.sp) for i in mb.sample_ids)
        assert mb.seconds_s == pytest.approx(COST.fixed_s + load_s)


def test_flexsp_is_near_the_best_of_all_groups_of_one_micro_batch():
    lengths = (3000, 1900, 900, 900)
    best_s = float("inf")
    for count in range(1, 5):
        for degrees in combinations_with_replacement((1, 2, 4, 8), count):
            for groups in product(range(count), repeat=4) if sum(degrees) <= 8 else ():
                tokens, load_s = [0] * count, [0.0] * count
                for n, g in zip(lengths, groups, strict=True):
                    tokens[g] += n
                    load_s[g] += COST.load_s(n, degrees[g])
                if all(n <= d * COST.tokens() for n, d in zip(tokens, degrees, strict=True)):
                    best_s = min(best_s, max(load_s))
    plan = PLANNERS["FlexSP"](lengths, COST)
    assert best_s <= plan.makespan_s - COST.fixed_s <= best_s * 1.02


def test_buckets_of_least_padding_are_the_best_of_all():
    sizes = [1, 2, 4, 4, 9, 10, 30]

    def padding(cuts):
        ends = [*cuts, len(sizes)]
        return sum(
            sizes[b - 1] - n for a, b in zip([0, *cuts], ends, strict=True) for n in sizes[a:b]
        )

    buckets = bucketed(sizes, 3)
    assert [i for own in buckets for i in own] == list(range(7))
    least = min(padding(cuts) for cuts in combinations(range(1, 7), 2))
    assert padding([own[0] for own in buckets[1:]]) == least


def test_ranks_are_dealt_to_groups_as_well_as_can_be():
    groups = [(2, [1]), (1, [3, 8]), (1, [4])]
    found = widened(LENGTHS, groups, COST)

    def end_s(degrees):
        pairs = zip(degrees, groups, strict=True)
        return max(sum(COST.load_s(LENGTHS[i], d) for i in own) for d, (_, own) in pairs)

    least = [range(d, 9) for d, _ in groups]
    every = [degrees for degrees in product(*least) if sum(degrees) <= 8]
    assert sum(d for d, _ in found) <= 8
    assert end_s([d for d, _ in found]) == min(map(end_s, every))
