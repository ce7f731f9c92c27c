"""The long-context example: its data, and the whole of it as a user starts it."""

import pytest
import torch

from examples.long_context import FULL, QUICK, Trained, main, text
from tests.cases.fresh import fresh


def test_text_is_consecutive_source_and_what_follows():
    first, second = text(1000, 2)
    for batch in (first, second):
        assert batch["input_ids"].shape == batch["labels"].shape == (1, 1000)
        assert torch.equal(batch["input_ids"][0, 1:], batch["labels"][0, :-1])
    assert second["input_ids"][0, 0] == first["labels"][0, -1]
    assert b"def " in bytes(first["input_ids"][0].tolist())


def test_heads_do_not_go_round_the_ranks():
    for setting in (FULL, QUICK):
        assert setting.model.n_heads % 4
        assert setting.length % 8 == 0


def test_error_is_of_the_prediction():
    assert Trained((), (), 110, 100).error == pytest.approx(0.1)


@pytest.mark.slow
@pytest.mark.multirank
@pytest.mark.timeout(600)
def test_one_rank_and_two_cannot_and_four_can():
    found = fresh(main, "--quick")
    assert [*found.refused] == [1, 2]
    assert all("too little" in said for said in found.refused.values())
    assert found.error < 1e-10
    losses = found.ranks[0].losses
    assert losses[-1] < losses[0] == pytest.approx(found.first_loss, rel=1e-5)
    assert len(found.ranks) == 4
    for rank in found.ranks:
        assert abs(rank.error) < 0.005
