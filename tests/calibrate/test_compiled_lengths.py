"""Inductor takes a convolution's length for a number: other lengths have an excerpt of their own."""

import math

import pytest
import torch
from torch import nn

import dcpc
from dcpc.calibrate import calibrate


class Audio(nn.Module):
    """A convolution of frames, at half their rate."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.out = nn.Conv1d(8, 8, 3, stride=2, padding=1), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = nn.functional.gelu(self.conv(x.transpose(1, 2))).transpose(1, 2)
        return self.out(h).square().mean()


@pytest.mark.slow
def test_an_audio_model_is_calibrated_at_lengths_it_was_not_compiled_for():
    sizes = [{"batch": 1, "frames": n} for n in (64, 200)]
    buckets = dcpc.Buckets({"x": "float32[batch, frames, 8]"}, sizes)
    found = calibrate(Audio(), buckets, backend="inductor", budget_s=0.5)
    assert {p.sizes["frames"] for p in found.points} == {64, 200}
    assert all(0 < p.measured_s < math.inf for p in found.points)
