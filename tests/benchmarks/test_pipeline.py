"""The pipeline benchmark's cost models and baselines."""

import numpy as np
import pytest

from benchmarks.pipeline_models import gpt, tasks
from benchmarks.pipeline_runs import wrong_pairs
from tests.exact.pipeline import run_world


def test_layers_keep_what_the_published_formula_says():
    (layer, *_), *_ = gpt().layers
    assert layer.kept(2, 100) == 34 * 100 * 2 * 4096
    assert 5 * layer.scores(2, 100) == 5 * 32 * 100 * 100 * 2


def test_what_lives_between_the_parts_is_what_products_take_and_give_back():
    (layer, *_), *_ = gpt().layers
    assert layer.apart(2, 100) == (3 + 1 + 1 + 1 + 1 + 1 + 4 + 4) * 2 * 2 * 100 * 4096


def test_more_recompute_holds_less_and_takes_longer():
    cost = gpt()
    for stage in range(4):
        options = cost.options(stage, 4, 500)
        held = [o.held_bytes for o in options]
        assert held == sorted(held, reverse=True)
        assert [o.backward_s for o in options] == sorted(o.backward_s for o in options)


def test_wrong_pairs_counts_those_that_differ_by_a_tenth():
    assert wrong_pairs([1.0, 1.05, 2.0], [1.0, 0.9, 0.95]) == (1, 2)


def test_tasks_have_the_tokens_asked_for():
    assert sum(tasks(0)) >= 65_536
    assert len(tasks(0, samples=7)) == 7
    assert np.mean(tasks(1, samples=2000)) == pytest.approx(209, rel=0.15)


@pytest.mark.slow
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
