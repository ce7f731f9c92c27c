"""A depthwise convolution, one of 2 groups and a norm of 2 groups of the same channels."""

from torch import nn

INPUTS = {"x": "float64[batch, n, 8]"}
POINTS = [{"batch": 1, "n": 12}, {"batch": 2, "n": 7}]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv1d(8, 16, 3, padding=1)
        self.depthwise = nn.Conv1d(16, 16, 3, padding=1, groups=16)
        self.halves = nn.Conv1d(16, 16, 3, padding=1, groups=2)
        self.norm = nn.GroupNorm(2, 16)

    def forward(self, x):
        y = self.norm(self.halves(self.depthwise(self.first(x.mT))))
        return y.softmax(2).square().sum(1).mean()
