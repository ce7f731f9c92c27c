"""Random runs of pairs of options on two ranks; tests/test_combinations.py has every pair."""

import random

import pytest

from tests.fuzz.judge import Outcome
from tests.fuzz.pairs.draw import OPTIONS, PAIRS, generate, run_of
from tests.fuzz.pairs.hunt import expected, judged, tried

pytestmark = pytest.mark.multirank


def drawn(pairs):
    for number, pair in enumerate(pairs):
        yield pair, run_of(pair, random.Random(number))


def check(found, right):
    bad = [o.text for o in found if o.kind in ("wrong", "crash")]
    assert not bad, bad[0]
    assert [o.kind for o in found].count("right") >= right


def test_a_pair_runs_as_the_plain_model_or_is_refused_as_expected():
    check(judged([*drawn([("pipeline", "unpad"), ("rounds", "outputs")])]), 1)


@pytest.mark.slow
def test_random_runs_of_pairs_train_as_the_plain_model():
    found = [Outcome(kind, text) for _, kind, text in tried(0, 40)]
    check(found, 0.8 * len(found))


def test_a_refusal_that_nobody_expects_is_a_crash():
    said = Outcome("refused", "PlanError: pipeline=2: got unpad=True")
    assert expected(("pipeline", "unpad"), said) is said
    assert expected(("packing", "unpad"), said).kind == "crash"
    assert expected(("pipeline", "sp"), said).kind == "crash"


def test_a_seed_has_one_run_and_each_pair_comes():
    assert generate(7) == generate(7) != generate(9)
    assert {pair for pair, _ in map(generate, range(0, 9000, 2))} == set(PAIRS)
    assert {name for pair in PAIRS for name in pair} == set(OPTIONS)
