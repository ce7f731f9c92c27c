"""The video autoencoder: published sizes, lengths, causality."""

import pytest
import torch
from torch import nn

from models.vae3d import SpatialConfig, SpatialVAE, TemporalConfig, TemporalVAE
from tests.cases import latents_models as latents


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


# Source: the encoder, the decoder and both with the convolutions around the latents, of
# `VAE_Temporal_SD` in hpcaitech/Open-Sora, tag v1.2.0. The 2-D one: diffusers' `AutoencoderKL`.
def test_parameters_are_as_many_as_published():
    with torch.device("meta"):
        temporal, spatial = TemporalVAE(TemporalConfig()), SpatialVAE(SpatialConfig())
    assert count(temporal.encoder) == 144_421_128
    assert count(temporal.decoder) == 165_265_924
    assert count(temporal) == 309_687_144
    assert count(spatial) == 83_653_863


@pytest.mark.parametrize(("frames", "shorter"), [(17, 5), (20, 5), (1, 1), (5, 2)])
def test_frames_are_padded_in_front_and_come_back(frames, shorter):
    with torch.device("meta"):
        model = TemporalVAE(TemporalConfig())
        x = torch.empty(1, 4, frames, 32, 32)
        mean, log_variance = model.encode(x)
        assert mean.shape == log_variance.shape == (1, 4, shorter, 32, 32)
        assert model.decode(mean, frames).shape == x.shape


def test_frames_have_8_by_8_fewer_positions():
    with torch.device("meta"):
        model = SpatialVAE(SpatialConfig())
        z = model.encode(torch.empty(2, 3, 2, 64, 48))
        assert z.shape == (2, 4, 2, 8, 6)
        assert model.decode(z).shape == (2, 3, 2, 64, 48)


def test_latents_see_no_later_frame_but_through_the_norms():
    model = latents.model().model
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.GroupNorm):
                setattr(module, name, nn.Identity())
    x = torch.randn(1, 4, 12, 3, 3, dtype=torch.float64)
    later = torch.cat([x[:, :, :8], torch.randn_like(x[:, :, 8:])], dim=2)
    (mean, _), (other, _) = model.encode(x), model.encode(later)
    assert torch.equal(mean[:, :, :2], other[:, :, :2])
    assert not torch.equal(mean[:, :, 2], other[:, :, 2])
    decoded, changed = model.decode(mean, 12), model.decode(other, 12)
    assert torch.equal(decoded[:, :, :8], changed[:, :, :8])
