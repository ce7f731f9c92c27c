"""Seed 576637364: torch writes a question about sizes in a symbol that it knows to be equal."""

import torch
from torch import nn

INPUTS = {"x": "float64[batch, h, 4]", "keep": "bool[batch, h]"}
POINTS = [{"batch": 2, "h": 10}]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.p0 = nn.Parameter(torch.randn(4, 4) * 0.5)

    def forward(self, x, keep):
        pieces = torch.cat((x @ self.p0).tensor_split(2, 1)[::-1], 1)
        return torch.where(keep.unsqueeze(2), pieces, pieces.sin()).square().sum()
