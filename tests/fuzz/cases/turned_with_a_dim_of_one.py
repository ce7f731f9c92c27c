"""Dims exchanged, a dim of one added, and dims exchanged again."""

import torch
from torch import nn

INPUTS = {"x": "float64[batch, h, 4]"}
POINTS = [{"batch": 2, "h": 5}, {"batch": 1, "h": 4}]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.p0 = nn.Parameter(torch.randn(4, 4) * 0.5)

    def forward(self, x):
        b, h, _ = x.shape
        v0 = (x @ self.p0).mT.view(b, 1, 4, h).mT.cumsum(2)
        return v0.square().mean()
