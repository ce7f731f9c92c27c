"""The large-model example: its sizes, and the small one as a user starts it."""

import pytest
import torch

from examples.large_model import CHECK, FULL, init, main
from tests.cases.fresh import fresh


@pytest.mark.parametrize("setting", [FULL, CHECK])
def test_whole_state_takes_three_times_a_ranks_memory(setting):
    whole_bytes = 4 * sum(p.nbytes for p in setting.on_meta().parameters())
    assert whole_bytes >= 3 * setting.memory_bytes


def test_init_gives_every_parameter_a_value():
    model = CHECK.on_meta().to_empty(device="cpu")
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(float("nan"))
        model.apply(init)
    assert not any(p.isnan().any() for p in model.parameters())


@pytest.mark.slow
@pytest.mark.multirank
@pytest.mark.timeout(400)
def test_model_of_three_times_the_memory_has_the_plain_models_losses():
    found = fresh(main, "--check")
    assert [*found.refused] == ["whole", "step"]
    assert all("too little" in said for said in found.refused.values())
    assert found.difference < 1e-9
    assert found.losses[-1] < found.losses[0]
    assert len(found.ranks) == 4
    for rank in found.ranks:
        assert rank.losses == found.ranks[0].losses
        # Rows of parameters and of the sum of gradients, and the largest module.
        assert rank.start_bytes < found.memory_bytes / 2
        assert 0.9 * rank.predicted_bytes < rank.measured_bytes <= rank.predicted_bytes
        assert rank.predicted_bytes <= found.memory_bytes
