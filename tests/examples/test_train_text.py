"""The training script of docs/train.md: the same losses alone and on two ranks."""

import pytest

from examples import train_text
from tests.cases.launch import run_ranks


def train(rank, steps):
    return train_text.main(steps)


@pytest.mark.slow
@pytest.mark.multirank
def test_same_losses_alone_and_on_two_ranks():
    (alone,) = run_ranks(train, 1, 3)
    assert alone[-1] < alone[0]
    for losses in run_ranks(train, 2, 3):
        assert losses == pytest.approx(alone, rel=1e-5)
