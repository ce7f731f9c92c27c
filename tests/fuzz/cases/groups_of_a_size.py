"""A convolution with as many groups as there are samples and channels: a number of a size."""

import torch
from torch import nn
from torch.nn import functional as F

INPUTS = {"x": "float64[batch, h, 4]"}
POINTS = [{"batch": 2, "h": 6}]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.p0 = nn.Parameter(torch.randn(4, 4) * 0.5)
        self.p1 = nn.Parameter(torch.randn(4, 1, 3))

    def forward(self, x):
        b, h, c = x.shape
        y = (x @ self.p0).transpose(0, 1).reshape(1, h, b * c).mT
        return F.conv1d(y, self.p1.repeat(b, 1, 1), padding=1, groups=b * c).square().mean()
