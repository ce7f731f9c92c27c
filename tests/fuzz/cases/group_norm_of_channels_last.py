"""Seed 333473301: a group norm's backward is not laid out as its fake says; a view has to copy."""

import torch
from torch import nn
from torch.nn import functional as F

INPUTS = {"x": "float64[batch, h, 4]"}
POINTS = [{"batch": 2, "h": 5}, {"batch": 1, "h": 4}, {"batch": 2, "h": 11}]
LAYOUT = "strided"


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.p0 = nn.Parameter(torch.randn(4, 4) * 0.5)
        self.p1 = nn.Parameter(torch.randn(3) * 0.5)
        self.p4 = nn.Parameter(torch.randn(4, 12) * 0.5)
        self.p10 = nn.GroupNorm(2, 4)

    def forward(self, x):
        v0 = x @ self.p0
        v1 = (v0 @ self.p4).unflatten(-1, (3, 4)).permute(0, 3, 1, 2)
        v1 = self.p10(v1)
        v1 = v1.flatten(2).transpose(1, 2)
        v1 = v1.unflatten(-1, (2, 2)).transpose(1, 2)
        v2 = F.scaled_dot_product_attention(v1, v1.sin(), v1).transpose(1, 2).flatten(2)
        v3 = v2.sin().sum()
        return v3
