"""benchmarks.models: the references by hand, and that every large model has the published size."""

import torch

from models.evoformer import EvoformerConfig
from models.vae3d import TemporalConfig, TemporalVAE
from tests.exact.models import CASES
from tests.exact.models_references import dap_bytes, halo_bytes


def test_dap_sends_what_its_collectives_send():
    config, cells, pairs = EvoformerConfig(), 128 * 256, 256**2
    gathers = [pairs * 8, cells * 32, pairs * 128, pairs * 128, pairs * 4, pairs * 4]
    switches = [cells * 256] * 2 + [pairs * 128] * 4
    forward = sum(n / 2 for n in gathers) + sum(n / 4 for n in switches)  # of p = 2
    assert dap_bytes(config, 128, 256, 2) == 2 * 4 * forward


def test_a_window_of_three_needs_two_rows_of_neighbours():
    config = TemporalConfig(width=4, widths=(1,), halves=(), blocks=1, groups=2)
    with torch.device("meta"):
        model = TemporalVAE(config)
    point = {"batch": 1, "frames": 4, "height": 6, "width": 10}
    # Of 4 channels, 5 windows of three in the encoder and 6 in the decoder; 4 frames, 2 in front.
    channels = 4 * 5 + 4 * 6
    assert halo_bytes(model, config, point) == 2 * 2 * channels * 6 * min(6, 10) * 4


def test_large_models_have_the_published_sizes():
    assert all(case.parameters_off() == 0 for case in CASES.values())
