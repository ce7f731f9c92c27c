"""The pipeline benchmark's cost models and baselines."""

import random
from itertools import pairwise
from math import inf

import numpy as np
import pytest

from benchmarks.pipeline_exact import run_world
from benchmarks.pipeline_models import any_split_s, gpt, t5, tasks
from benchmarks.pipeline_others import (
    best_fit,
    dynapipe,
    even,
    packing,
    padded_1f1b,
    thinned_split,
)
from benchmarks.pipeline_runs import wrong_pairs
from dcpc.runtime.pipeline.planning import plan_pipeline, work_of
from dcpc.runtime.pipeline.schedule import lower_bound


def test_layers_keep_what_the_published_formula_says():
    (layer, *_), *_ = gpt().layers
    assert layer.kept(2, 100) == 34 * 100 * 2 * 4096
    assert 5 * layer.scores(2, 100) == 5 * 32 * 100 * 100 * 2


def test_the_bound_of_any_split_is_below_random_splits():
    rng, lengths, cost = random.Random(0), tasks(5, samples=9), gpt()
    bound_s, found_s = any_split_s(lengths, cost), inf
    for _ in range(300):
        order = rng.sample(range(9), 9)
        cuts = sorted(rng.sample(range(1, 9), rng.randrange(9)))
        work = work_of(lengths, [order[a:b] for a, b in pairwise([0, *cuts, 9])], cost)
        found_s = min(found_s, max(work.busy_s(s, work.fastest[s]) for s in range(4)))
        assert bound_s <= lower_bound(work).seconds_s * (1 + 1e-12)
    assert bound_s < found_s < 1.2 * bound_s


def test_what_lives_between_the_parts_is_what_products_take_and_give_back():
    (layer, *_), *_ = gpt().layers
    assert layer.apart(2, 100) == (3 + 1 + 1 + 1 + 1 + 1 + 4 + 4) * 2 * 2 * 100 * 4096
    decoder = t5().layers[-1][-1]
    inner, ffn, share = 16384 / 4, 65536 / 4, 0.25
    own = 100 * share * (6 * 1024 + 4 * inner + 2 * ffn)
    assert decoder.apart(1, 100) == 2 * (own + 100 * 2 * inner * (share + 1.0))


@pytest.mark.parametrize("cost", [gpt(), t5()], ids=["gpt", "t5"])
def test_more_recompute_holds_less_and_takes_longer(cost):
    for stage in range(4):
        options = cost.options(stage, 4, 500)
        held = [o.held_bytes for o in options]
        assert held == sorted(held, reverse=True)
        assert [o.backward_s for o in options] == sorted(o.backward_s for o in options)


def test_no_system_is_below_the_bound_of_any_split_and_dcpc_is_not_above_the_others():
    lengths, cost = tasks(5, samples=48), gpt()
    own = plan_pipeline(lengths, cost, split=True, limit=500).found.replay.makespan_s
    others = [
        dynapipe(lengths, cost),
        padded_1f1b(lengths, cost)[2],
        packing(lengths, cost, 2048),
    ]
    assert any_split_s(lengths, cost) <= own <= min(o.makespan_s for o in others)


def test_thinned_split_has_every_sample_once_in_ascending_length():
    lengths, cost = tasks(5, samples=48), gpt()
    batches = thinned_split(lengths, cost, 1)
    flat = [lengths[i] for batch in batches for i in batch]
    assert flat == sorted(lengths)
    assert work_of(lengths, batches, cost).micro_batches == len(batches)


def test_best_fit_and_even_groups():
    assert best_fit([6, 5, 4, 3, 2], 10) == 2
    assert even(5, 2) == [[0, 1], [2, 3], [4]]


def test_wrong_pairs_counts_those_that_differ_by_a_tenth():
    assert wrong_pairs([1.0, 1.05, 2.0], [1.0, 0.9, 0.95]) == (1, 2)


def test_tasks_have_the_tokens_asked_for():
    assert sum(tasks(0)) >= 65_536
    assert len(tasks(0, samples=7)) == 7
    assert np.mean(tasks(1, samples=2000)) == pytest.approx(209, rel=0.15)


@pytest.mark.multirank
def test_stages_need_the_bytes_that_the_replay_says_and_have_the_plain_models_numbers():
    (found,) = run_world(("gpt_tied",), 2, 2, 1, 12)
    assert found.apart > 0
    assert found.worst < 1e-10
    assert 0 < found.peak < 0.01


@pytest.mark.slow
@pytest.mark.multirank
def test_stages_of_several_ranks_need_the_bytes_that_the_replay_says():
    """Of a stage's three ranks, which hold different bytes in a ring, the one that holds most."""
    (found,) = run_world(("llama",), 6, 2, 3, 8)
    assert found.worst < 1e-10
    assert 0 < found.peak < 0.01
