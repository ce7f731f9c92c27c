"""The video demo's second codec, trained a few steps as a user trains it."""

import pytest
import torch

pytest.importorskip("av", reason="decoding needs PyAV: pip install av")

import numpy as np

from examples.video_codec import DctCodec, VideoCodec
from examples.video_vae import Blocks, VaeCodec, VaeWorkload, mean_psnr, psnr, small_clips, trained
from tests.cases.films import film, with_square

SMALL = VaeWorkload(channels=4, width=8, depth=1, seconds=200.0, steps=12, blocks_per_step=2_000)


@pytest.mark.slow
@pytest.mark.multirank
def test_a_few_steps_bring_held_out_clips_nearer_and_are_kept(tmp_path):
    slope = np.linspace(0, 120, 128).astype(np.uint8)[None, :, None].repeat(72, 0).repeat(3, 2)
    paths, said = [film(tmp_path / "square.mp4", with_square(slope, 104))], []
    codec = trained(paths, tmp_path / "out", SMALL, said.append, world=2)
    assert isinstance(codec, VideoCodec)
    seen, held = small_clips(paths)
    assert {c.frames for c in seen} == {c.frames for c in held} == {1, 17}
    assert max(c.first + c.frames for c in seen) <= min(c.first for c in held)
    before = VaeCodec(SMALL.make_model().model, codec.channels)
    assert mean_psnr(held, before) == pytest.approx(mean_psnr(held, DctCodec(4)), abs=1e-3)
    assert mean_psnr(held, codec) > mean_psnr(held, before) + 0.02
    again = trained(paths, tmp_path / "out", SMALL, said.append)
    assert said[-1].startswith("[bold]codec[/]: a VAE trained before")
    assert all(map(torch.equal, codec.parameters(), again.parameters()))


@pytest.mark.parametrize("frames", [1, 17, 34])
def test_latents_have_the_shape_of_the_fixed_transforms(frames):
    codec = VaeCodec(SMALL.make_model().model, 4)
    clip = torch.rand(3, frames, 24, 40) * 2 - 1
    latents = codec.encode(clip)
    assert latents.shape == DctCodec(4).encode(clip).shape
    assert codec.decode(latents).shape == clip.shape
    # A run of 17 frames is coded by itself.
    assert torch.allclose(codec.encode(clip[:, :17]), latents[:, :5], atol=1e-5)
    with pytest.raises(ValueError, match="got 20 frames"):
        codec.encode(torch.zeros(3, 20, 8, 8))


def test_blocks_are_the_clip_and_psnr_is_that_of_its_definition():
    clip = torch.rand(3, 17, 16, 24) * 2 - 1
    assert torch.allclose(Blocks().decode(Blocks().encode(clip)), clip)
    assert psnr(torch.zeros_like(clip), torch.full_like(clip, 0.2)) == pytest.approx(20.0)
