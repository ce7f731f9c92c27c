"""A model of ids, a mask and labels, in float64, with a function of its own."""

import torch
import torch.nn.functional as F
from torch import nn

import dcpc

WORDS = 9


class RowsOfAMask(nn.Module):
    """x [batch, n, 8] of ids, and a function of it, a mask and labels [batch, n]."""

    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.mix = nn.Embedding(WORDS, 8), nn.Linear(8, 8)
        self.head, self.norm = nn.Linear(8, WORDS), nn.LayerNorm(8)
        self.rows, self.token = nn.Parameter(torch.randn(30, 8)), nn.Parameter(torch.randn(8))
        self.function = function
        self.double()

    def forward(self, ids, mask, labels):
        x = torch.tanh(self.mix(self.embed(ids)))
        return self.function(self, x, mask != 0, labels)

    def loss(self, x, labels):
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


INPUTS = dict.fromkeys(("ids", "mask", "labels"), "int64[batch, n]")
BUCKETS = dcpc.Buckets(inputs=INPUTS, sizes=[{"n": 11}, {"n": 14}])


def inputs(batch, n):
    g = torch.Generator().manual_seed(n)
    ids, labels = (torch.randint(0, WORDS, (batch, n), generator=g) for _ in range(2))
    mask = torch.randint(0, 2, (batch, n), generator=g)
    mask[:, 0], mask[:, -1] = 1, 0
    return {"ids": ids, "mask": mask, "labels": labels}
