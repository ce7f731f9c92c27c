"""STDiT-3: published sizes, golden sums of the original model, FLOPs, and the loss's meaning."""

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from models.stdit import (
    STDIT_3B,
    XL,
    RectifiedFlow,
    STDiT,
    STDiTConfig,
    draw,
    positions,
    shift_timesteps,
)

TINY = STDiTConfig(depth=2, dim=48, heads=4, text_dim=20, text_len=6)
EVERY_FRAME = None
SOME_FRAMES = torch.tensor([[True, True, True], [False, True, True]])


def ramp(*shape: int) -> Tensor:
    count = math.prod(shape)
    return torch.cos(0.37 * torch.arange(count, dtype=torch.float64)).view(shape)


def golden_model() -> STDiT:
    """Every parameter but the rotary frequencies a sine of its position; norms around one."""
    model = STDiT(TINY).double().eval()
    for name, p in model.named_parameters():
        if p.requires_grad:
            values = 0.2 * torch.sin(0.7 * torch.arange(1, p.numel() + 1, dtype=torch.float64))
            p.data = values.view(p.shape) + (1 if "_norm" in name else 0)
    return model


def golden_inputs() -> dict[str, Tensor]:
    return {
        "timestep": torch.tensor([900.0, 250.0]),
        "text": ramp(2, 6, 20),
        "text_mask": torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]]).bool(),
        "fps": torch.full((2,), 24.0),
        "pixel_height": torch.full((2,), 144.0),
        "pixel_width": torch.full((2,), 256.0),
    }


def count(parameters: Iterator[torch.nn.Parameter], trainable: bool = False) -> int:
    return sum(p.numel() for p in parameters if p.requires_grad or not trainable)


# Source: shared/specs/stdit.md 1.4, taken from the original model
@pytest.mark.parametrize(
    ("config", "block", "total"),
    [(XL, 21_255_696, 1_207_643_972), (STDIT_3B, 56_105_856, 3_182_211_572)],
)
def test_parameters_are_as_many_as_published(config, block, total):
    with torch.device("meta"):
        model = STDiT(config)
    assert count(model.spatial[0].parameters()) == block
    assert count(model.temporal[-1].parameters()) == block
    assert count(model.parameters()) == total
    assert count(model.parameters(), trainable=True) == total - config.head_dim // 2


# Source: as above; the original adds in float32
@pytest.mark.parametrize(
    ("frame_mask", "sums"),
    [
        (EVERY_FRAME, (74.47202, 1835.05224, 2934.28213)),
        (SOME_FRAMES, (81.57829, 2071.11462, 3960.55176)),
    ],
)
def test_output_equals_the_original_at_golden_parameters(frame_mask, sums):
    model = golden_model()
    assert count(model.parameters()) == 200_534
    out = model(ramp(2, 4, 3, 5, 6), **golden_inputs(), frame_mask=frame_mask).detach()
    assert out.shape == (2, 8, 3, 5, 6)
    got = (out.sum(), out.abs().sum(), out.square().sum())
    assert [float(x) for x in got] == pytest.approx(sums, abs=1e-3)


def test_masked_text_equals_text_without_its_padding():
    model, inputs = golden_model(), golden_inputs()
    first = {n: x[:1] for n, x in inputs.items()}
    short = first | {"text": first["text"][:, :4], "text_mask": first["text_mask"][:, :4]}
    x = ramp(1, 4, 3, 5, 6)
    torch.testing.assert_close(model(x, **first), model(x, **short), rtol=1e-12, atol=1e-12)


def test_dropped_text_is_the_fixed_buffer():
    model, inputs = golden_model(), golden_inputs()
    x = ramp(2, 4, 3, 5, 6)
    dropped = model(x, **inputs, drop_text=torch.tensor([True, False]))
    kept = model(x, **inputs)
    text = torch.stack((model.no_text, inputs["text"][1]))
    replaced = model(x, **(inputs | {"text": text}))
    assert torch.equal(dropped, replaced)
    assert not torch.allclose(dropped[0], kept[0])


def test_positions_put_the_column_first_and_end_near_the_base():
    code = positions(3, 5, torch.tensor([512.0 * 512.0]), 16, torch.float64)
    assert code.shape == (1, 15, 16)
    step = 4.0  # round(sqrt(15)) = 4, scale 1
    assert code[0, 1, 0] == pytest.approx(math.sin(step / 5), abs=1e-12)  # place (0, 1): column 1
    assert code[0, 5, 8] == pytest.approx(math.sin(step / 3), abs=1e-12)  # place (1, 0): row 1


def attention_flops(q, k, v, *args, out_shape=None, **kwargs) -> int:
    return sdpa_flop_count(q, k, v)


@pytest.mark.parametrize("frames", [1, 5])
def test_flops_formula_equals_torchs_counter(frames):
    model = golden_model()
    x = ramp(1, 4, frames, 6, 8)
    inputs = {n: i[:1] for n, i in golden_inputs().items()}
    # Source: torch 2.13 has no formula for the CPU's attention, which would count 0
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    with FlopCounterMode(display=False, custom_mapping={op: attention_flops}) as counter:
        model(x, **inputs)
    counts = counter.get_flop_counts()
    blocks = sum(
        sum(counts[name].values())
        for name in counts
        if name.count(".") == 2 and name.split(".")[1] in ("spatial", "temporal")
    )
    assert blocks == model.config.flops(frames, 12, 6)


def training_inputs(frames: int = 3) -> dict[str, Tensor]:
    given = {"latents": ramp(2, 4, frames, 5, 6), "noise": ramp(2, 4, frames, 5, 6).flip(2)}
    return given | golden_inputs()


def test_loss_is_the_mean_squared_error_of_velocity():
    flow, inputs = RectifiedFlow(golden_model()), training_inputs()
    latents, noise = inputs["latents"], inputs["noise"]
    tau = (inputs["timestep"] / 1000).double()[:, None, None, None, None]
    out = flow.model((1 - tau) * latents + tau * noise, **golden_inputs())
    expected = ((out[:, :4] - (latents - noise)) ** 2).mean()
    torch.testing.assert_close(flow(**inputs), expected, rtol=1e-12, atol=0)


def test_frames_left_out_are_given_clean_and_do_not_count():
    flow, inputs = RectifiedFlow(golden_model()), training_inputs()
    loss = flow(**inputs, frame_mask=SOME_FRAMES)
    noise = inputs["noise"].clone()
    noise[1, :, 0] = 1e3  # of the frame that is left out
    torch.testing.assert_close(flow(**(inputs | {"noise": noise}), frame_mask=SOME_FRAMES), loss)
    everything = flow(**inputs, frame_mask=torch.ones(2, 3, dtype=torch.bool))
    torch.testing.assert_close(everything, flow(**inputs), rtol=1e-12, atol=0)


def test_shifted_timesteps_keep_the_ends_and_move_large_videos_towards_noise():
    tau, pixels = torch.tensor([0.0, 0.5, 1.0]), torch.tensor([512.0 * 512.0])
    assert torch.equal(shift_timesteps(tau, pixels, 1), tau)
    ratio = 2 * math.sqrt(10)  # twice the side, 34 frames
    got = shift_timesteps(tau, 4 * pixels, 34)
    torch.testing.assert_close(got, torch.tensor([0.0, ratio / (ratio + 1), 1.0]))


def test_draw_repeats_with_its_generator():
    latents, pixels = ramp(2, 4, 3, 5, 6), torch.full((2,), 144.0 * 256.0)
    first, second = (draw(latents, pixels, 17, torch.Generator().manual_seed(3)) for _ in "ab")
    assert all(torch.equal(first[n], second[n]) for n in first)
    assert first["noise"].shape == latents.shape
    assert bool(((first["timestep"] >= 0) & (first["timestep"] <= 1000)).all())
