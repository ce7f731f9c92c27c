"""A mean over a length is a sum over its count, also where 16 bits cannot hold that sum."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dcpc
from tests.fuzz.judge import Setting, judge

POINTS = [{"batch": 2, "h": h} for h in (8, 9, 13)]


class Large(nn.Module):
    """Values near 10,000 in 16 bits, of which float16 holds no sum of seven."""

    def __init__(self, function, dtype):
        super().__init__()
        self.weight, self.function, self.dtype = nn.Parameter(torch.eye(4)), function, dtype

    def forward(self, x):
        y = (x @ self.weight + 10_000).to(self.dtype)
        return self.function(y).float().square().mean()


MEANS = {
    "of a dim": lambda y: y.mean(1),
    "of all": lambda y: y.mean(),
    "in another dtype": lambda y: y.float().mean(1, dtype=y.dtype),
    "pooling": lambda y: F.adaptive_avg_pool1d(y.mT, 1),
    "a loss": lambda y: F.l1_loss(y, torch.zeros_like(y)),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("function", MEANS.values(), ids=MEANS)
def test_mean_of_16_bits_is_torchs(function, dtype):
    own = Large(function, dtype)
    plain = copy.deepcopy(own)
    buckets = dcpc.Buckets({"x": "float32[batch, h, 4]"}, sizes=[{"h": 8}, {"h": 64}])
    compiled = dcpc.compile(own, buckets, backend="eager", verify="off")
    x = torch.randn(3, 64, 4)
    got, want = compiled(x=x), plain(x)
    got.backward(), want.backward()
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
    torch.testing.assert_close(own.weight.grad, plain.weight.grad, rtol=2e-2, atol=1)


class Pools(nn.Module):
    def __init__(self, pool):
        super().__init__()
        self.weight, self.pool = nn.Parameter(torch.randn(4, 4)), pool

    def forward(self, x):
        return self.pool(x @ self.weight).square().mean()


@pytest.mark.parametrize(
    "pool",
    [
        lambda x: F.adaptive_avg_pool1d(x.mT, 1),
        lambda x: F.adaptive_avg_pool1d(x[0].mT, 1),
        lambda x: F.adaptive_avg_pool2d(x.mT[..., None], 1).flatten(1),
        lambda x: F.adaptive_avg_pool2d(x[:, None], (1, 2)),
        lambda x: F.adaptive_avg_pool3d(x.unflatten(2, (2, 2))[:, None], (1, 1, 1)),
    ],
    ids=["1d", "no batch", "channels last", "one of two", "3d"],
)
def test_pooling_to_one_is_torchs(pool):
    tried = [Setting(1), Setting(2, recompute="all"), Setting(4)]
    found = judge(Pools(pool).double(), {"x": "float64[batch, h, 4]"}, POINTS, tried)
    assert found.kind == "right", found.text
