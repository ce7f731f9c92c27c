"""Ops that say several things at once become the plain ones, with the same numbers."""

import pytest
import sympy
import torch
from torch import Tensor, nn

import dcpc
from dcpc.commands.check import SplitModel
from dcpc.trace import trace
from dcpc.trace.capture import dims

INPUTS = {"x": "float64[batch, seq, 4]", "y": "float64[batch, words, 4]"}
SIZES = [{"batch": 1, "seq": 7, "words": 5}, {"batch": 2, "seq": 12, "words": 9}]


def split_sizes(x: Tensor, y: Tensor) -> Tensor:
    joined = torch.cat([x, y], 1)
    first, second = joined.split_with_sizes([x.shape[1], y.shape[1]], 1)
    return first.sum() + 3 * second.square().sum()


def grid(x: Tensor, y: Tensor) -> Tensor:
    columns, rows = torch.meshgrid(x[0, :, 0], y[0, :, 1], indexing="xy")
    more, others = torch.meshgrid(x[0, :, 2], y[0, :, 3], indexing="ij")
    return (columns * rows.square()).sum() + (more.square() * others).sum()


def broadcast(x: Tensor, y: Tensor) -> Tensor:
    a, b = torch.broadcast_tensors(x[:, :, None], y[:, None])
    return (a * b.square()).sum()


def repeat(x: Tensor, y: Tensor) -> Tensor:
    copies = x[:, :1].repeat(1, y.shape[1], 1) * y
    return copies.sum() + x.repeat(2, 3, 1).square().sum() + x.repeat(2, 1, 1, 1).sum()


def interleave(x: Tensor, y: Tensor) -> Tensor:
    wide = x.repeat_interleave(3, dim=1, output_size=3 * x.shape[1])
    weight = torch.arange(wide.shape[1]).type_as(x)
    many = x.repeat_interleave(y.shape[1], dim=0)  # as often as a dim is long
    total = (wide * weight[:, None]).sum() + (many * torch.arange(4)).sum()
    return total + y.repeat_interleave(2, dim=-1).square().sum()


class Case(nn.Module):
    def __init__(self, function: object) -> None:
        super().__init__()
        self.function, self.linear = function, nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.function(self.linear(x), self.linear(y)) / x.shape[0]  # type: ignore[operator]


GONE = ("split_with_sizes", "meshgrid", "broadcast_tensors", "repeat", "type_as", "getitem")


@pytest.mark.parametrize("function", [split_sizes, grid, broadcast, repeat, interleave])
def test_spelling_is_gone_and_the_numbers_stay(function):
    torch.manual_seed(0)
    split = SplitModel(Case(function).double(), dcpc.Buckets(inputs=INPUTS, sizes=SIZES), SIZES[1])
    ops = [str(n.target) for n in split.program.gm.graph.nodes if n.op == "call_function"]
    assert not [op for op in ops if any(gone in op for gone in GONE)]
    for sizes in SIZES:
        inputs = {
            n: torch.randn(spec.shape(sizes), dtype=torch.float64)
            for n, spec in dcpc.Buckets(inputs=INPUTS, sizes=SIZES).inputs.items()
        }
        assert split.difference(sizes, inputs).worst < 1e-12


def test_largest_is_decided_where_dims_of_at_least_one_decide_it():
    n, m = (sympy.Symbol(s, integer=True, positive=True) for s in "nm")
    assert dims.plain(dims.Max(0, 1 - n), {}) == 0
    assert dims.plain(dims.Max(n * m, n), {}) == n * m
    assert dims.plain(dims.Min(n * m, n), {}) == n
    assert dims.plain(dims.Min(32, n), {}) == sympy.Min(32, n)


class Cropped(nn.Module):
    """The middle rows of a table of 16: no longer input fits."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        seq = x.shape[1]
        start = (16 - seq) // 2
        return (x * self.table[start : start + seq]).square().mean()


def test_sizes_in_the_joint_trace_are_those_a_model_takes():
    torch.manual_seed(0)
    sizes = [{"batch": 1, "seq": 7}, {"batch": 1, "seq": 16}]
    buckets = dcpc.Buckets(inputs={"x": "float64[batch, seq, 4]"}, sizes=sizes)
    assert trace(Cropped(), buckets).hints["seq"] <= 16
    split = SplitModel(Cropped().double(), buckets, sizes[0])
    for at in sizes:
        x = torch.randn(1, at["seq"], 4, dtype=torch.float64)
        assert split.difference(at, {"x": x}).worst < 1e-12
