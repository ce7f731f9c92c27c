"""The backward of a call fixed a dim (batch became 2) of which another call was in other names."""

import torch
from torch import nn

INPUTS = {"x": "float64[batch, h, 4]", "y": "float64[batch, w, 4]"}
POINTS = [{"batch": 2, "h": 4, "w": 11}, {"batch": 1, "h": 5, "w": 4}]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.p0 = nn.Parameter(torch.randn(4, 4) * 0.5)
        self.p1 = nn.Parameter(torch.randn(4, 4) * 0.5)

    def forward(self, x, y):
        v2 = (x @ self.p0 * 0.3 + 1).prod(-3, keepdim=True)
        v4 = v2.reshape(1, x.shape[1], 2, -1).transpose(1, 2)
        v5 = (y @ self.p1 * 0.3 + 1).prod(-3, keepdim=True)
        return v4.square().mean() + v5.square().mean()
