"""The training script of docs/train.md: the same losses alone, on two ranks, and started again."""

import threading

import pytest

from examples import train_text
from tests.cases.launch import run_ranks


def train(rank, steps, folder=None):
    return train_text.main(steps, folder)


@pytest.mark.slow
@pytest.mark.multirank
def test_same_losses_alone_and_on_two_ranks():
    (alone,) = run_ranks(train, 1, 3)
    assert alone[-1] < alone[0]
    for losses in run_ranks(train, 2, 3):
        assert losses == pytest.approx(alone, rel=1e-5)


@pytest.mark.slow
@pytest.mark.multirank
def test_it_goes_on_from_the_last_checkpoint_on_other_ranks(tmp_path):
    (straight,) = run_ranks(train, 1, 7)
    run_ranks(stopped, 2, 6, str(tmp_path))
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000005"]
    (rest,) = run_ranks(train, 1, 7, str(tmp_path))
    assert rest == pytest.approx(straight[5:], rel=1e-5)


def stopped(rank, steps, folder):
    """Trains, and lives until what it saves is written."""
    losses = train_text.main(steps, folder)
    for thread in [t for t in threading.enumerate() if t.name.startswith("dcpc save")]:
        thread.join()
    return losses
