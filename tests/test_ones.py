"""Buckets in which a dim is 1 have a trace of their own: an image is a video of one frame."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dcpc
from tests.cases.exactness import compiled_error
from tests.cases.launch import run_ranks

INPUTS = {"x": "float64[batch, frames, space, 8]", "y": "float64[batch, frames, space, 8]"}
SIZES = [(1, 7), (5, 7), (3, 5), (1, 9)]


class FramesOrImage(nn.Module):
    """Attention over frames, left out where there is one: forward branches in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.only_videos = nn.Linear(8, 8)
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        batch, frames, space, width = x.shape
        h = self.norm(x)
        if frames > 1:
            h = self.only_videos(h)
            qkv = self.qkv(h).reshape(batch, frames, space, 3, 2, 4).permute(3, 0, 2, 4, 1, 5)
            h = F.scaled_dot_product_attention(*qkv.unbind(0))
            h = h.permute(0, 3, 1, 2, 4).reshape(batch, frames, space, width)
        else:
            h = self.qkv(h)[..., 2 * width :]
        return ((x + self.out(h) - y) ** 2).mean()


def make(sp: int | str = "auto") -> tuple[nn.Module, dcpc.CompiledModel]:
    torch.manual_seed(0)
    model = FramesOrImage().double()
    buckets = dcpc.Buckets(INPUTS, [{"frames": t, "space": s} for t, s in SIZES])
    return model, dcpc.compile(model, buckets, backend="eager", sp=sp)


def samples(frames: int, space: int, batch: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(frames * 100 + space)
    shape = (batch, frames, space, 8)
    return {n: torch.randn(shape, dtype=torch.float64, generator=generator) for n in INPUTS}


def worst_error(model: nn.Module, compiled: dcpc.CompiledModel) -> float:
    return max(compiled_error(compiled, model, samples(t, s, 3)) for t, s in SIZES)


def test_buckets_with_a_dim_of_one_are_traced_apart():
    model, compiled = make()
    images, videos = compiled.planned.traces
    assert {b["frames"] for b, v in compiled.planned.by_bucket.items() if v is images} == {1}
    assert "attention" not in images.traced.program.gm.code
    assert "attention" in videos.traced.program.gm.code
    assert worst_error(model, compiled) < 1e-12
    report = compiled.report()
    assert all(f"frames: {t}, space: {s}" in report for t, s in SIZES)
    assert "frames" in compiled.source({"frames": 5, "space": 7})


def test_what_needs_one_trace_says_that_there_are_several():
    _, compiled = make()
    with pytest.raises(AssertionError, match="2 traces"):
        _ = compiled.program


def over_ranks(rank: int) -> float:
    model, compiled = make(sp=2)
    return worst_error(model, compiled)


@pytest.mark.multirank
def test_images_and_videos_over_two_ranks_equal_the_plain_model():
    assert max(run_ranks(over_ranks, 2)) < 1e-10
