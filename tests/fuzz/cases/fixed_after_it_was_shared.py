"""A slice of one element fixes a dim whose call was the pattern of another dim's: w became 3."""

import torch
from torch import nn
from torch.nn import functional as F

INPUTS = {"x": "float64[batch, h, 4]", "y": "float64[batch, w, 4]"}
POINTS = [{"batch": 2, "h": 3, "w": 5}, {"batch": 1, "h": 5, "w": 8}]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.p0 = nn.Parameter(torch.randn(4, 4) * 0.5)
        self.p1 = nn.Parameter(torch.randn(4, 4) * 0.5)

    def forward(self, x, y):
        v0 = x @ self.p0
        v1 = y @ self.p1
        v2 = F.layer_norm(v0[:, :-2], (4,))
        return v1.repeat_interleave(2, -2).square().mean() + v2.square().cos().sum()
