"""A fixed slice of random training runs, alone and on two ranks."""

import pytest

from tests.fuzz.runs.draw import PER_SETUP, Run, generate
from tests.fuzz.runs.hunt import outcomes

# Packed by documents and by positions, a grid, uint8 labels, weights, a mean over samples.
ALONE = [s * PER_SETUP + n for s in (9, 19, 16, 20, 24, 25) for n in range(7)]
# Steps of one and of two ranks a micro-batch, and both.
OF_TWO = [s * PER_SETUP + n for s in (17, 20, 9) for n in range(5)]


def check(runs: list[Run]) -> None:
    found = outcomes(runs)
    bad = [(o, run) for run, o in zip(runs, found, strict=False) if o.kind in ("wrong", "crash")]
    assert not bad, f"{bad[0][0].text}\n{bad[0][1].text()}"
    assert [o.kind for o in found].count("right") >= 0.9 * len(runs)


def test_random_runs_alone_train_as_the_plain_model():
    check([generate(seed) for seed in ALONE])


@pytest.mark.multirank
def test_random_runs_on_two_ranks_train_as_the_plain_model():
    check([generate(seed, 2) for seed in OF_TWO])
