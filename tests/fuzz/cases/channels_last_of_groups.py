"""A convolution of two groups over pixels in one column, its weight with channels last.

torch's backward reads a dim of size 1 amiss and makes another gradient of the weight, in the plain
model too, which is why it is compared by kernels that read it right.
"""

import torch
from torch import nn
from torch.nn import functional as F

INPUTS = {"x": "float64[batch, h, 4]"}
POINTS = [{"batch": 2, "h": 11}, {"batch": 1, "h": 5}]
LAYOUT = "turned"


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.p0 = nn.Parameter(torch.randn(4, 4) * 0.5)
        self.p1 = nn.Parameter(torch.randn(4, 2, 3, 3) * 0.5)

    def forward(self, x):
        v = (x @ self.p0).unflatten(-1, (4, 1)).transpose(1, 2)
        v = F.conv2d(v, self.p1, padding=(1, 1), groups=2)
        return F.scaled_dot_product_attention(v, v.sin(), v).square().sum()
