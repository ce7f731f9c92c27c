"""Ranks have hash seeds of their own, and find the same graphs and plans."""

import pytest

from benchmarks.zoo_seeds import SEEDS, run


@pytest.mark.slow
def test_every_hash_seed_makes_the_same_graphs_and_plans():
    each = [run(["tests.benchmarks.seeded"], seed, 300.0) for seed in SEEDS[:3]]
    assert {*each[0]} == {"alternating"}
    assert all(found == each[0] for found in each), each


@pytest.mark.slow
def test_every_hash_seed_makes_the_same_of_the_zoo():
    each = [run(["benchmarks.zoo_seeds", "--print", "--more"], seed, 7200.0) for seed in SEEDS]
    assert len(each[0]) > 70
    assert [n for n, found in each[0].items() if any(e[n] != found for e in each)] == []
