"""The example of one small card, the small one as a user starts it."""

import pytest

from examples.one_small_card import CHECK, FULL, main
from tests.cases.fresh import fresh


@pytest.mark.parametrize("setting", [FULL, CHECK])
def test_whole_state_takes_eight_times_the_memory(setting):
    assert 4 * sum(p.nbytes for p in setting.on_meta().parameters()) >= 8 * setting.memory_bytes


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_it_trains_to_the_plain_models_losses_within_the_memory():
    found = fresh(main, "--check")  # ends with an error where losses or bytes are off
    assert found.losses[-1] < found.losses[0]
    assert 0 < found.measured_bytes <= CHECK.memory_bytes
    assert found.copied_bytes <= found.read_bytes
