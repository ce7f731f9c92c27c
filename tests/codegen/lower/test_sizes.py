"""Lengths that forward pads, halves and pairs: one trace, and the plain numbers at every length."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dcpc.errors import TraceError
from tests.codegen.made import Made


class Of(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.up, self.conv = nn.Linear(8, 8), nn.Conv1d(8, 8, 3, stride=2, padding=1)
        self.function = function

    def forward(self, x):
        return self.function(self, self.up(x)).square().mean()


def padded(x, more):
    return F.pad(x, (0, 0, 0, more))


def pairs(m, x):
    n = x.shape[1]
    return padded(x, n % 2).unflatten(1, ((n + n % 2) // 2, 2))


def flat_pairs(m, x):
    return padded(x, x.shape[1] % 2).reshape(x.shape[0], -1, 16)


def fours(m, x):
    return padded(x, (4 - x.shape[1] % 4) % 4).unflatten(1, (-1, 4))


def fours_up(m, x):
    return padded(x, math.ceil(x.shape[1] / 4) * 4 - x.shape[1]).unflatten(1, (-1, 4))


def windows(m, x):
    n = x.shape[1]
    y = padded(x, (4 - n % 4) % 4)
    return y.view(y.shape[0], y.shape[1] // 4, 4, 8).transpose(2, 3).flatten(1, 2)[:, :n]


def down_and_up(m, x):
    y = m.conv(x.transpose(1, 2)).repeat_interleave(2, -1)[..., : x.shape[1]]
    return y + x.transpose(1, 2)


def halves(m, x):
    n = x.shape[1] // 2
    return torch.cat(x.split([n, x.shape[1] - n], 1)[::-1], 1) * x


def thirds(m, x):
    n = x.shape[1]
    return x[:, math.floor(n / 3) : math.ceil((n + 1) / 2) + 1] * round(n / 3)


def fours_left(m, x):
    return padded(x, -x.shape[1] % 4).unflatten(1, (-1, 4))


FUNCTIONS = (pairs, flat_pairs, fours, fours_up, fours_left, windows, down_and_up, halves, thirds)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_numbers_are_the_plain_models_at_every_length(function):
    made = Made(Of(function))
    for seq in (3, 4, 5, 6, 7, 8, 9, 31, 64, 200):
        assert made.error(2, seq) < 1e-11, seq


def test_a_python_int_of_a_size_is_refused_with_what_to_write_instead():
    with pytest.raises(TraceError, match=r"math\.floor.*for int\(n / 3\)"):
        Made(Of(lambda m, x: x[:, : int(x.shape[1] / 3) + 1]))
