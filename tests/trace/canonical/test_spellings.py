"""Ops that say several things at once become the plain ones, with the same numbers."""

import pytest
import sympy
import torch
from torch import Tensor, nn

import dcpc
from dcpc.commands.check import SplitModel
from dcpc.trace import trace
from dcpc.trace.capture import dims
from tests.fuzz.judge import Setting, judge

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


def masked_rows(x: Tensor, y: Tensor) -> Tensor:
    a, b, c = x.clone(), x.clone(), y.clone()
    a[x[..., 0] > 0] = y[0, 0]
    b[:, x[0, :, 1] > 0] = y[:1, :1].sum(2, keepdim=True)
    c[y > 0.5] = 0.25
    a = a.index_put((x[..., 2] > 0,), y[0, 1], accumulate=True)
    return a.square().sum() + b.cumsum(1).square().sum() + c.square().sum()


class Case(nn.Module):
    def __init__(self, function: object) -> None:
        super().__init__()
        self.function, self.linear = function, nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.function(self.linear(x), self.linear(y)) / x.shape[0]  # type: ignore[operator]


GONE = (
    "split_with_sizes",
    "meshgrid",
    "broadcast_tensors",
    "repeat",
    "type_as",
    "getitem",
    "index_put",
)


@pytest.mark.parametrize(
    "function", [split_sizes, grid, broadcast, repeat, interleave, masked_rows]
)
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


# ------------------------------------------------------------------- memory that is read by strides

SPLIT = [Setting(1), Setting(2, recompute="all"), Setting(3)]


def turned(x):
    """A copy in another order: a canonical graph leaves copies out."""
    y = x.transpose(0, 1).contiguous()
    h, b = y.shape[:2]
    return [y.as_strided((h, 4), (4 * b, 1)) * torch.arange(h)[:, None]]


def lying_as_its_operand(x):
    y = x.mT + 1
    b, c, h = y.shape
    return [y.as_strided((b, h), (h * c, 1)), y.as_strided((), (), 5)]


def windows(x):
    b, h, c = x.shape
    return [x.as_strided((b, h - 2, 3, c), (h * c, c, c, 1)) * torch.arange(3)[:, None]]


def written(x):
    y = x.mT.clone(memory_format=torch.contiguous_format)
    b, c, h = y.shape
    y.as_strided((b, h), (h * c, 1), 1).mul_(torch.arange(h))
    return [y, y.cumsum(2).cos()]


class Strided(nn.Module):
    def __init__(self, read):
        super().__init__()
        torch.manual_seed(0)
        self.weight, self.read = nn.Parameter(torch.randn(4, 4).double()), read

    def forward(self, x):
        return sum((y.square() * (i + 1)).sum() for i, y in enumerate(self.read(x @ self.weight)))


@pytest.mark.parametrize("read", [turned, lying_as_its_operand, windows, written])
def test_memory_is_read_as_it_lies_in_the_plain_model(read):
    points = [{"batch": 2, "h": 9}, {"batch": 3, "h": 6}]
    found = judge(Strided(read), {"x": "float64[batch, h, 4]"}, points, SPLIT)
    assert found.kind == "right", found.text


def test_memory_that_a_value_has_a_part_of_is_refused():
    """Of what a view does not show, torch has the value and no gradient."""
    model = Strided(lambda x: [x[:, 1:].as_strided((2, 4), (4, 1), 0)])
    found = judge(model, {"x": "float64[batch, h, 4]"}, [{"batch": 2, "h": 9}], SPLIT)
    assert (found.kind, "all elements of its memory" in found.text) == ("refused", True)


# ------------------------------------------------------------------------------- complex numbers


class Turned(nn.Module):
    def __init__(self, function: object) -> None:
        super().__init__()
        self.weight, self.function = nn.Parameter(torch.randn(4, 4)), function

    def forward(self, x: Tensor) -> Tensor:
        y = self.function(x @ self.weight)  # type: ignore[operator]
        return torch.view_as_real(y).square().mean()


@pytest.mark.parametrize(
    "function",
    [
        lambda y: torch.exp(1j * y) + y,
        lambda y: (y - 2j * y.cos()) * (1 + 2j),
        lambda y: torch.complex(y, y.sin()) / (2 - 1j),
    ],
    ids=["exponent", "products", "quotient"],
)
def test_complex_numbers_are_factors_of_tensors_that_learn(function):
    inputs, points = {"x": "float64[batch, h, 4]"}, [{"batch": 2, "h": h} for h in (8, 9, 13)]
    found = judge(Turned(function).double(), inputs, points, SPLIT)
    assert found.kind == "right", found.text
