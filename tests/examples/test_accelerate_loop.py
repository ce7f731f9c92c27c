"""The loop of Accelerate: losses of the loop of train_text, on ranks, and gone on with."""

import pytest

from examples import accelerate_loop
from tests.cases.launch import run_ranks


def train(rank, steps, folder=None):
    return accelerate_loop.main(steps, folder)


@pytest.mark.slow
@pytest.mark.multirank
def test_same_losses_alone_on_two_ranks_and_resumed(tmp_path):
    (alone,) = run_ranks(train, 1, 6)
    assert alone[-1] < alone[0]
    folder = str(tmp_path / "state")
    halves = run_ranks(train, 2, 3, folder), run_ranks(train, 2, 3, folder)
    for first, rest in zip(*halves, strict=True):
        assert [*first, *rest] == pytest.approx(alone, rel=1e-5)
