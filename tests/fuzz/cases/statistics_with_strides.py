"""A batch norm's statistics are every other element of a tensor: torch's backward reads them amiss.

It takes them one after the other where the channels are last: gradients of the memory beside them.
"""

import torch
from torch import nn

INPUTS = {"x": "float64[batch, h, 4]"}
POINTS = [{"batch": 2, "h": 9}, {"batch": 1, "h": 5}]
LAYOUT = "strided"


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.p0 = nn.Parameter(torch.randn(4, 4) * 0.5)
        self.p1 = nn.Parameter(torch.randn(4, 4) * 0.5)
        self.norm = nn.BatchNorm2d(4).eval()

    def forward(self, x):
        y = self.norm((x @ self.p0).unflatten(-1, (1, 4)).permute(0, 3, 1, 2))
        y = y.flatten(2).mT
        return ((y[:, :1] @ (y @ self.p1).transpose(1, 2)).softmax(-1) @ y).square().sum()
