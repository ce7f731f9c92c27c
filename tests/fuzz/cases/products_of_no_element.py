"""Seed 816021542: products along a dim on a rank without elements: torch returned the gradient."""

import torch
from torch import nn

INPUTS = {"x": "float64[batch, h, 4]"}
POINTS = [{"batch": 2, "h": 9}]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.p0 = nn.Parameter(torch.randn(2, 4) * 0.5)

    def forward(self, x):
        return ((x @ self.p0.mT) * 0.2 + 1).cumprod(-2).square().sum()
