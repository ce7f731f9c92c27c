"""Checks of values that only raise are passed; all other branches on values are torch's."""

import pytest
import torch
from torch import nn

import dcpc
from dcpc.trace import trace
from dcpc.trace.capture.capturable import Capturable
from dcpc.trace.loss import MicroStatistics

X = torch.tensor([3.0, -1.0])  # fails all checks below


def above(x, most=2):
    if most is not None and x.max() > most:
        raise ValueError


def below(x):
    if not (x >= 0).all():
        message = "negative"
        raise ValueError(message)


def either(x):
    if x.max() > 2 or (not x.any() or x.min() < 0):
        raise ValueError


def asserted(x):
    assert (x > 0).all(), "negative"


def asserted_not(x):
    assert not (x < 0).any()


def of_items(x):
    assert torch.all(x >= 0).item(), "negative"


def both(x):
    if (x.max() > 2 and
            x.min() < 0):  # fmt: skip
        raise ValueError


def said_again(x):
    try:
        above(x)
    except ValueError as error:
        raise TypeError from error


CHECKS = [above, below, either, asserted, asserted_not, of_items, both, said_again]


@pytest.mark.parametrize("check", CHECKS)
def test_a_check_is_passed(check):
    with pytest.raises((ValueError, AssertionError, TypeError)):
        check(X)
    with Capturable() as told:
        MicroStatistics(check)(X)  # called by dcpc's code, as forward is
    assert all("test_value_checks.py" in line for line in told.checks)
    assert told.checks


def branch(x):
    if x.max() > 2:
        return 1
    return 0


def otherwise(x):
    if x.max() < 2:
        raise ValueError
    else:
        return 1


def kept(x):
    most = x.max().gt(2).item()
    if x.numel() and most:
        return 1
    raise ValueError


def caught(x):
    try:
        if x.max() > 2:
            raise ValueError
    except ValueError:
        return 1
    return 0


def caught_by_its_caller(x):
    try:
        above(x)
    except (TypeError, ValueError):
        return 1
    return 0


def chosen(x):
    if 1 if x.max() > 2 else 0:
        return 1
    raise ValueError


def nested(x):
    if x.numel():
        if x.max() > 2:
            return 1
        raise ValueError
    return 0


@pytest.mark.parametrize(
    "function", [branch, otherwise, kept, caught, caught_by_its_caller, chosen, nested]
)
def test_other_branches_are_as_they_are(function):
    with Capturable() as told:
        assert MicroStatistics(function)(X) == 1
    assert not told.checks


class Checked(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(9, 4)

    def forward(self, ids):
        if ids.max() >= self.table.num_embeddings:
            raise ValueError("ids")
        return self.table(ids).square().sum()


def test_a_model_with_a_check_is_captured_with_a_warning():
    buckets = dcpc.Buckets(inputs={"ids": "int64[batch, n]"}, sizes=[{"n": 8}])
    with pytest.warns(UserWarning, match=r"raises an error for some values at .*ids.max"):
        trace(Checked(), buckets)
