"""Lengths that are numbers to Inductor or to forward: each is calibrated by its own excerpt."""

import math

import pytest
import torch
from torch import nn

import dcpc
from dcpc.commands.calibrate import calibrate


class Audio(nn.Module):
    """Convolutions of frames, the second at half their rate, and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv1d(8, 16, 3, padding=1)
        self.two = nn.Conv1d(16, 16, 3, stride=2, padding=1)
        self.norm, self.query, self.out = nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = nn.functional.gelu(self.one(x.transpose(1, 2)))
        h = nn.functional.gelu(self.two(h)).transpose(1, 2)
        q = self.query(self.norm(h)).unflatten(-1, (2, 8)).transpose(1, 2)
        attended = nn.functional.scaled_dot_product_attention(q, q, q)
        return self.out(h + attended.transpose(1, 2).flatten(2)).square().mean()


@pytest.mark.slow
def test_an_audio_model_is_calibrated_at_lengths_it_was_not_compiled_for():
    sizes = [{"batch": 1, "frames": n} for n in (64, 200)]
    buckets = dcpc.Buckets({"x": "float32[batch, frames, 8]"}, sizes)
    found = calibrate(Audio(), buckets, backend="inductor", budget_s=0.5)
    assert {p.sizes["frames"] for p in found.points} == {64, 200}
    assert all(0 < p.measured_s < math.inf for p in found.points)


class Loop(nn.Module):
    """A loop over frames."""

    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.zeros_like(x[:, 0])
        for t in range(x.shape[1]):
            h = torch.tanh(self.step(h + x[:, t]))
        return h.square().mean()


def test_lengths_that_forward_takes_for_numbers_have_a_trace_each():
    buckets = dcpc.Buckets(
        {"x": "float32[batch, frames, 8]"}, [{"batch": 1, "frames": 3}, {"batch": 1, "frames": 5}]
    )
    found = calibrate(Loop(), buckets, backend="eager", budget_s=0.1)
    assert {p.sizes["frames"] for p in found.points} == {3, 5}
    assert dcpc.compile(Loop(), buckets, backend="eager", calibration=found).stats() is not None
