"""The Evoformer's training run: it learns, and two ranks have the losses of one."""

import pytest

from examples import folding
from tests.cases.launch import run_ranks


def train(rank: int, steps: int) -> list[float]:
    return folding.main(steps)


@pytest.mark.slow
@pytest.mark.multirank
def test_two_ranks_learn_as_one():
    (alone,) = run_ranks(train, 1, 8, timeout_s=200)
    assert alone[-1] < alone[0] / 2
    for losses in run_ranks(train, 2, 8, timeout_s=200):
        assert losses == pytest.approx(alone, rel=1e-4)
