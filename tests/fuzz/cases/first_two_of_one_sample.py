"""The first two samples of one: the trace takes them for two, and a mean would divide by two."""

import torch
from torch import nn

REFUSED = "forward does something else at a batch of 1"
INPUTS = {"x": "float64[batch, h, 4]"}
POINTS = [{"batch": 2, "h": 5}, {"batch": 1, "h": 8}]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.p0 = nn.Parameter(torch.randn(4, 4) * 0.5)

    def forward(self, x):
        return (x @ self.p0)[:2].square().mean()
