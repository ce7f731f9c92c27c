"""Products along a dim of one element: torch's backward returns the gradient itself."""

import torch
from torch import nn

INPUTS = {"x": "float64[batch, h, 4]"}
POINTS = [{"batch": 2, "h": 5}, {"batch": 1, "h": 4}]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.p0 = nn.Parameter(torch.randn(4, 4) * 0.5)

    def forward(self, x):
        return ((x @ self.p0) * 0.2 + 1).cumprod(0).square().mean()
