"""A write in place whose number is a float of a size: it came into the graph as it was, no node."""

import torch
from torch import nn

INPUTS = {"x": "float64[batch, h, 4]", "y": "float64[batch, w, 4]"}
POINTS = [{"batch": 2, "h": 9, "w": 5}, {"batch": 1, "h": 4, "w": 8}]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.p0 = nn.Parameter(torch.randn(4, 4) * 0.5)

    def forward(self, x, y):
        h, w = x.shape[1], y.shape[1]
        v0 = x @ self.p0
        v1 = v0 * 1.0
        v1.add_(v0.cos(), alpha=1.0 / h)
        v1.sub_((w - 1) / 2)
        v1.mul_(h / w)
        v1[:, 1:].mul_(w / 8)
        return v1.square().sum()
