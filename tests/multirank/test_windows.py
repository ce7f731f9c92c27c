"""Convolutions and group norms of which ranks have pieces of positions equal the plain ones."""

import warnings
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dcpc
from dcpc.plan.runnable import Runnable
from tests.cases import latents_models as latents
from tests.cases.exactness import SplitModel, wrong
from tests.cases.launch import run_ranks

CHANNELS = ("n", "g", "o", "c")
DIMS = ("length", "height", "width")


class Windows(nn.Module):
    """A convolution of one kernel and step, a norm, one of kernel 1."""

    def __init__(self, dims: int, kernel: int, stride: int, causal: bool) -> None:
        super().__init__()
        conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
        self.padding = (kernel // 2, kernel // 2) * (dims - 1)
        self.padding += (kernel - 1, 0) if causal else (kernel // 2, kernel // 2)
        self.wide = conv(4, 6, kernel, stride=stride)
        self.norm = nn.GroupNorm(2, 6)
        self.last = conv(6, 4, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Returns a scalar."""
        return self.last(F.silu(self.norm(self.wide(F.pad(x, self.padding))))).square().mean()


def spatial(model: nn.Module, points: list[dict[str, int]], sp: int) -> SplitModel:
    """Returns a model that may be split along positions alone."""
    specs = {"x": f"float64[batch, 4, {', '.join(n for n in points[0] if n != 'batch')}]"}
    sizes = [{n: s for n, s in p.items() if n != "batch"} for p in points]
    split = SplitModel(model, dcpc.Buckets(inputs=specs, sizes=sizes), points[0], "eager", sp=sp)
    kept = {
        name: tuple(a for a in ways if a.name not in CHANNELS)
        for name, ways in split.sharding.alternatives.items()
    }
    split.sharding = replace(split.sharding, alternatives=kept)
    split.traced = replace(split.traced, sharding=split.sharding)
    split.runnable = Runnable(split.traced)
    split.priced = split.runnable.priced
    split.placement = split.priced.placement(points[0], sp)
    return split


CONVOLUTIONS = [
    # dims, kernel, stride, causal, ranks, lengths: none that the ranks divide, fewer than ranks
    (1, 5, 2, True, 4, [(17,), (5,)]),
    (1, 1, 2, False, 3, [(11,), (4,)]),
    (2, 3, 1, False, 3, [(7, 5), (2, 4)]),
    (2, 5, 1, True, 4, [(6, 7), (3, 5)]),
    (3, 3, 2, True, 2, [(5, 7, 6), (7, 5, 8)]),
    (3, 3, 1, False, 3, [(5, 4, 3), (2, 5, 4)]),
]


@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_convolution_and_norm_over_pieces_of_positions_equal_the_plain_ones(case):
    dims, kernel, stride, causal, sp, lengths = case
    torch.manual_seed(0)
    model = Windows(dims, kernel, stride, causal).double()
    points = [{"batch": 1, **dict(zip(DIMS, sizes, strict=False))} for sizes in lengths]
    split = spatial(model, points, sp)
    names = {p.name for n, p in split.placement.nodes.items() if "conv" in n or "norm" in n}
    assert any(name.startswith(("out", "same")) for name in names), names
    for point, recompute in zip(points, ("none", "all"), strict=True):
        x = torch.randn(1, 4, *(point[d] for d in DIMS[:dims]), dtype=torch.float64)
        found = split.difference(point, {"x": x}, recompute, in_step=True)
        assert found.worst < 1e-10, found


def test_zeros_around_a_convolution_are_its_padding():
    split = spatial(Windows(2, 3, 1, True).double(), [{"batch": 1, "length": 7, "height": 5}], 2)
    convolutions = [n for n in split.nodes.values() if "conv" in str(n.target)]
    conv = convolutions[0]
    assert conv.args[4] == [0, 1]
    assert conv.args[0].args[1] == [0, 0, 2, 0]


def split_errors(rank: int) -> dict[str, float]:
    warnings.simplefilter("ignore")
    sizes = [{n: s for n, s in p.items() if n != "batch"} for p in latents.POINTS]
    buckets = dcpc.Buckets(inputs=latents.INPUTS, sizes=sizes)
    split = SplitModel(latents.model(), buckets, latents.POINTS[0], "eager")
    points = [(point, latents.data(point)) for point in latents.POINTS]
    return split.errors("vae3d", points, ("none",))


@pytest.mark.slow
@pytest.mark.multirank
@pytest.mark.timeout(600)
@pytest.mark.parametrize("world", [3])
def test_video_autoencoder_over_gloo_ranks_equals_the_plain_one(world):
    assert not wrong(run_ranks(split_errors, world, timeout_s=500), 1e-10)
