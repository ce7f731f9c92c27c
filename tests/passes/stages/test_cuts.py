"""Cuts into stages against every cut there is, on small chains."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcpc.errors import PlanError
from dcpc.passes.stages import mixture
from dcpc.passes.stages.bottleneck import fractional_bound, is_monotone
from dcpc.passes.stages.cut_costs import CutCosts
from dcpc.passes.stages.mixture import best_cut


def every_cut(blocks, counts):
    """Yields (borders, kinds) of all cuts, with devices left out, in any order."""
    devices = [k for k, n in enumerate(counts) for _ in range(n)]
    for stages in range(1, min(blocks, len(devices)) + 1):
        for kinds in set(itertools.permutations(devices, stages)):
            for inner in itertools.combinations(range(1, blocks), stages - 1):
                yield (0, *inner, blocks), kinds


def least(costs):
    cuts = every_cut(costs.blocks, costs.counts)
    return min(costs.expected(costs.bottlenecks(*cut)) for cut in cuts)


def monotone(each, speeds, most=None):
    """Costs of blocks `[buckets, blocks]` on devices of these speeds; at most so many fit."""
    sums = np.concatenate([np.zeros((len(each), 1)), np.cumsum(each, axis=1)], axis=1)
    whole = sums[:, None, :] - sums[:, :, None]
    seconds = np.stack([whole / s for s in speeds], axis=1)[:, :, None]
    if most is not None:
        n = sums.shape[1]
        size, places = np.arange(n)[None] - np.arange(n)[:, None], np.arange(1, 5)
        seconds = np.where(size[None, None, None] * places[:, None, None] > most, np.inf, seconds)
    return seconds


NUMBERS = st.integers(0, 9).map(float)


@st.composite
def chains(draw, arbitrary):
    blocks, buckets = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    counts = tuple(draw(st.lists(st.integers(0, 2), min_size=1, max_size=3)))
    counts = counts if sum(counts) else (1, *counts[1:])
    counts = counts if sum(counts) <= 4 else counts[:2]
    weights = np.array(draw(st.lists(st.integers(1, 4), min_size=buckets, max_size=buckets)))
    if arbitrary:
        shape = (buckets, len(counts), draw(st.sampled_from([1, sum(counts)])), blocks + 1)
        size = int(np.prod(shape)) * (blocks + 1)
        values = draw(st.lists(st.integers(0, 12), min_size=size, max_size=size))
        seconds = np.array(values, dtype=float).reshape(*shape, blocks + 1)
        seconds[seconds == 12] = np.inf
    else:
        lists = st.lists(NUMBERS, min_size=blocks, max_size=blocks)
        each = np.array([draw(lists) for _ in range(buckets)])
        speeds = draw(st.lists(st.integers(1, 4), min_size=len(counts), max_size=len(counts)))
        seconds = monotone(each, speeds, draw(st.sampled_from([None, 2, 4, 6])))
    return CutCosts(seconds, tuple(weights / weights.sum()), counts)


def check(costs):
    wanted = least(costs)
    if not np.isfinite(wanted):
        with pytest.raises(PlanError, match="expected a cut whose every stage fits"):
            best_cut(costs)
        return
    found = best_cut(costs)
    assert found.exact
    assert found.expected_s == pytest.approx(wanted, rel=1e-11, abs=1e-11)
    assert found.expected_s == costs.expected(costs.bottlenecks(found.borders, found.kinds))
    assert (found.borders[0], found.borders[-1]) == (0, costs.blocks)
    assert all(a < b for a, b in itertools.pairwise(found.borders))
    assert all(found.kinds.count(k) <= n for k, n in enumerate(costs.counts))
    assert found.bound_s == pytest.approx(found.expected_s)


@settings(max_examples=120, deadline=None)
@given(chains(arbitrary=True))
def test_no_cut_is_better_whatever_stages_cost(costs):
    check(costs)


@settings(max_examples=120, deadline=None)
@given(chains(arbitrary=False))
def test_no_cut_is_better_of_sums_of_blocks(costs):
    assert is_monotone(costs)
    check(costs)


def test_bisection_and_search_agree():
    rng = np.random.default_rng(0)
    for _ in range(10):
        costs = CutCosts(monotone(rng.uniform(1, 3, (1, 12)), [1, 2, 3]), (1.0,), (1, 2, 1))
        twice = CutCosts(np.repeat(costs.seconds, 2, axis=0), (0.5, 0.5), costs.counts)
        assert best_cut(costs).expected_s == pytest.approx(best_cut(twice).expected_s)


def test_one_cut_for_a_mixture_beats_those_of_its_lengths():
    each = np.array([[1.0, 1, 1, 1, 4, 4], [9, 9, 1, 1, 1, 1], [1, 1, 9, 2, 1, 1]])
    costs = CutCosts(monotone(each, [1, 2]), (0.25, 0.25, 0.5), (2, 1))
    alone = [best_cut(costs.only(bucket)) for bucket in range(3)]
    others = [costs.expected(costs.bottlenecks(c.borders, c.kinds)) for c in alone]
    assert best_cut(costs).expected_s < 0.95 * min(others)


def test_a_device_that_is_too_slow_is_left_out_and_an_idle_one_takes_what_costs_nothing():
    slow = CutCosts(monotone(np.full((1, 3), 1.0), [1, 0.1]), (1.0,), (3, 1))
    assert best_cut(slow).kinds == (0, 0, 0)
    spare = CutCosts(monotone(np.full((1, 6), 1.0), [1]), (1.0,), (4,))
    found = best_cut(spare)
    assert (found.expected_s, len(found.kinds)) == (2, 4)


def test_memory_moves_blocks_to_the_last_stages():
    # A stage keeps its blocks once more for each stage behind it: the first has room for two.
    costs = CutCosts(monotone(np.full((1, 6), 1.0), [1], most=4), (1.0,), (2,))
    assert best_cut(costs).borders == (0, 2, 6)


def test_a_search_that_is_cut_short_says_so(monkeypatch):
    seconds = np.random.default_rng(1).uniform(1, 3, (3, 2, 1, 12, 12))
    costs = CutCosts(seconds, (0.2, 0.3, 0.5), (2, 2))
    whole = best_cut(costs)
    monkeypatch.setattr(mixture, "MOST_VECTORS", 0)
    found = best_cut(costs)
    assert (whole.exact, found.exact) == (True, False)
    assert found.bound_s < whole.expected_s <= found.expected_s


def test_costs_are_not_changed():
    costs = CutCosts(monotone(np.full((2, 4), 1.0), [1, 2]), (0.5, 0.5), (1, 1))
    before = costs.seconds.copy()
    best_cut(replace(costs))
    assert (costs.seconds == before).all()


def test_fractional_bound_is_below_every_cut():
    rng = np.random.default_rng(2)
    for _ in range(5):
        each, speeds = rng.uniform(1, 3, 7), np.array([1.0, 2.0])
        costs = CutCosts(monotone(each[None], speeds), (1.0,), (2, 1))
        assert fractional_bound(each, np.array([1.0, 1.0, 2.0])) <= best_cut(costs).expected_s
