"""Buckets in which a dim is 1 have a trace of their own: an image is a video of one frame."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dcpc
from tests.cases.exactness import compiled_error
from tests.cases.launch import run_prepared
from tests.cases.ready import Ready

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


def ready(sp: int = 1) -> Ready:
    torch.manual_seed(0)
    model = FramesOrImage().double()
    buckets = dcpc.Buckets(INPUTS, [{"frames": t, "space": s} for t, s in SIZES])
    return Ready(model, buckets, sp, backend="eager", sp=sp, verify="off")


@pytest.fixture(scope="module")
def compiled() -> dcpc.CompiledModel:
    return ready().compile()


def samples(frames: int, space: int, batch: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(frames * 100 + space)
    shape = (batch, frames, space, 8)
    return {n: torch.randn(shape, dtype=torch.float64, generator=generator) for n in INPUTS}


def worst_error(compiled: dcpc.CompiledModel) -> float:
    return max(compiled_error(compiled, compiled.model, samples(t, s, 3)) for t, s in SIZES)


def test_buckets_with_a_dim_of_one_are_traced_apart(compiled):
    images, videos = compiled.planned.traces
    assert {b["frames"] for b, v in compiled.planned.by_bucket.items() if v is images} == {1}
    assert "attention" not in images.traced.program.gm.code
    assert "attention" in videos.traced.program.gm.code
    assert worst_error(compiled) < 1e-12
    report = compiled.report()
    assert all(f"frames: {t}, space: {s}" in report for t, s in SIZES)
    assert "frames" in compiled.source({"frames": 5, "space": 7})


def test_what_needs_one_trace_says_that_there_are_several(compiled):
    with pytest.raises(AssertionError, match="2 traces"):
        _ = compiled.program


def over_ranks(rank: int, made: Ready) -> float:
    return worst_error(made.compile())


@pytest.mark.multirank
def test_images_and_videos_over_two_ranks_equal_the_plain_model():
    assert max(run_prepared(ready, over_ranks, 2, 2)) < 1e-10
