"""Seed 576637213: queries whose scores a mask of -1e30 drowns, by torch's math kernel.

Its fused kernel, which takes no values with such strides, has other gradients for them.
"""

import torch
from torch import nn
from torch.nn import functional as F

INPUTS = {"x": "float64[batch, h, 4]", "y": "float64[batch, w, 4]"}
POINTS = [{"batch": 2, "h": 11, "w": 4}, {"batch": 2, "h": 5, "w": 5}]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.p0 = nn.Parameter(torch.randn(4, 4) * 0.5)
        self.p1 = nn.Parameter(torch.randn(2, 4) * 0.5)
        self.p2 = nn.Parameter(torch.randn(2, 4) * 0.5)

    def forward(self, x, y):
        h, w = x.shape[1], y.shape[1]
        key, query = F.linear(y, self.p1), F.linear(x, self.p0)
        distance = torch.arange(h)[:, None] - torch.arange(w)
        mask = torch.where((distance >= 0) & (distance < 2), 0.0, -1e30).to(torch.float64)
        out = F.scaled_dot_product_attention(
            torch.stack([query, query.sin()], -1)[..., 1].unflatten(-1, (2, 2)).transpose(1, 2),
            key[:, None],
            F.linear(y, self.p2)[:, None],
            attn_mask=mask,
            enable_gqa=True,
        )
        return out.square().sum()
