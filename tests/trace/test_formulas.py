"""What a model computes of a length by `math`, or makes of one, is captured for all lengths."""

import math
from math import log as natural
from math import sqrt

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dcpc
from dcpc.errors import TraceError
from dcpc.trace import trace
from tests.fuzz.judge import Setting, judge

POINTS = [{"batch": 2, "h": h} for h in (8, 9, 13)]
TRIED = [Setting(1), Setting(1, recompute="all"), Setting(4)]
INPUTS = {"x": "float64[batch, h, 4]"}
DTYPE = {"dtype": torch.float64}


class Formula(nn.Module):
    """x [batch, h, 4] and a function of its projection and h."""

    def __init__(self, formula):
        super().__init__()
        self.layer, self.formula = nn.Linear(4, 4), formula

    def forward(self, x):
        return self.formula(self.layer(x), x.shape[1]).square().mean()


def judged(formula) -> str:
    torch.manual_seed(0)
    found = judge(Formula(formula).double(), INPUTS, POINTS, TRIED)
    return f"{found.kind} {found.text}".strip()


TYPES = {
    "is": lambda y, h: y.exp() if type(y) is torch.Tensor else y,
    "one of": lambda y, h: y.exp() if type(y) in (list, torch.Tensor) else y,
    "of others": lambda y, h: y.exp() if type(h) is not list and isinstance(int, type) else y,
}


@pytest.mark.parametrize("name", [*TYPES])
def test_the_type_of_a_tensor_is_that_without_a_trace(name):
    assert judged(TYPES[name]) == "right"
    assert "type" not in globals()


NUMBERS = {
    "sqrt": lambda y, h: y / math.sqrt(h),
    "sqrt of a formula": lambda y, h: y * math.sqrt(2 * h + 1),
    "by name": lambda y, h: y * natural(h) / sqrt(h),
    "log of a base": lambda y, h: y * math.log(h, 512),
    "log10, log1p": lambda y, h: y * math.log10(h) + math.log1p(h),
    "exp": lambda y, h: y * math.exp(-h / 10),
    "angles": lambda y, h: y * math.sin(h) + math.cos(h) - math.tanh(1 / h),
    "rounded": lambda y, h: y[:, : math.ceil(math.log2(h))] * math.isqrt(h),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_functions_of_math_take_lengths(name):
    assert judged(NUMBERS[name]) == "right"
    assert (math.sqrt(4), sqrt(9), natural(1)) == (2.0, 3.0, 0.0)
    assert type(math.log).__name__ == type(natural).__name__ == "builtin_function_or_method"


WINDOWS = {
    "hann": lambda n: torch.hann_window(n, **DTYPE),
    "hann, symmetric": lambda n: torch.hann_window(n, periodic=False, **DTYPE),
    "hamming": lambda n: torch.hamming_window(n, True, 0.5, 0.4, **DTYPE),
    "blackman": lambda n: torch.blackman_window(n, False, **DTYPE),
    "bartlett": lambda n: torch.bartlett_window(n, **DTYPE),
    "kaiser": lambda n: torch.kaiser_window(n, True, 5.0, **DTYPE),
    "frequencies": lambda n: torch.fft.fftfreq(n, d=0.5, **DTYPE),
    "half of them": lambda n: torch.fft.rfftfreq(2 * n - 1, **DTYPE),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_windows_and_frequencies_are_torchs(name):
    assert judged(lambda y, h: y * WINDOWS[name](h)[:, None]) == "right"


def grid(y, size, corners):
    space = len(size) - 2
    theta = y[:, : space * (space + 1) // 4 + 1].flatten(1)[:, : space * (space + 1)]
    return F.affine_grid(theta.unflatten(1, (space, space + 1)), size, align_corners=corners)


TENSORS = {
    "kron": lambda y, h: torch.kron(y[0], y[0, :2, :3]),
    "kron of more dims": lambda y, h: torch.kron(y[0, :1], y),
    "grid": lambda y, h: grid(y, [y.shape[0], 1, h, 3], corners=False),
    "grid of corners": lambda y, h: grid(y, [y.shape[0], 1, 2, h], corners=True),
    "grid of space": lambda y, h: grid(y, [y.shape[0], 1, 1, h, 3], corners=False),
}


@pytest.mark.parametrize("name", TENSORS)
def test_products_and_grids_are_torchs(name):
    assert judged(TENSORS[name]) == "right"


class Tables(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Embedding(8, 4, padding_idx=1, sparse=True)
        self.bag = nn.EmbeddingBag(8, 4, mode="sum", sparse=True)

    def forward(self, ids):
        return (self.one(ids) * self.bag(ids)[:, None]).square().mean()


def test_a_sparse_gradient_is_the_same_and_dense():
    torch.manual_seed(0)
    inputs = {"ids": "int64[batch, h]"}
    found = judge(Tables().double(), inputs, POINTS, TRIED)
    assert found.kind == "right", found.text
    model = Tables()
    compiled = dcpc.compile(model, dcpc.Buckets(inputs, [{"h": 8}]), backend="eager")
    compiled(ids=torch.ones(1, 8, dtype=torch.int64)).backward()
    assert {p.grad.layout for p in model.parameters()} == {torch.strided}


@pytest.mark.parametrize(
    ("formula", "advice"),
    [
        (lambda y, h: y * float(h), "float.*write n \\* 1.0, n\\*\\*0.5 or math.log"),
        (lambda y, h: y * math.gcd(h, 4), "another function of math"),
        (lambda y, h: y * __import__("numpy").sqrt(h), "numpy cannot compute with a length"),
        (
            lambda y, h: y * len(set((y > 0).sum(-1).flatten().tolist())),
            "a tensor's values .the sum of a mask. cannot go into a set",
        ),
    ],
    ids=["float", "gcd", "numpy", "set"],
)
def test_what_makes_a_number_of_a_length_is_refused_with_what_to_write(formula, advice):
    buckets = dcpc.Buckets(INPUTS, [{"h": 8}, {"h": 13}])
    with pytest.raises(TraceError, match=advice):
        trace(Formula(formula).double(), buckets)
