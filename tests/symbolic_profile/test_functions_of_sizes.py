"""Functions that torch's sizes are made of have the same values in a profile as in torch."""

import inspect
import math

import numpy as np
import pytest
import sympy
import torch
from torch import nn
from torch.utils._sympy import functions

import dcpc
from dcpc.errors import ProfileError
from dcpc.symbolic_profile.polynomials import Basis
from dcpc.trace.capture.dims import plain
from tests.cases.exactness import compiled_error

N = sympy.Symbol("n", integer=True, positive=True)
REAL = 0.3 * functions.ToFloat(N)
WHOLE, REALS = (N, sympy.Integer(3)), (REAL, sympy.Float(1.5))
ARGUMENTS = {
    **dict.fromkeys(("FloorDiv", "CeilDiv", "Mod", "PythonMod", "IntTrueDiv", "LShift"), WHOLE),
    **dict.fromkeys(("RShift", "PowByNatural", "Min", "Max"), WHOLE),
    "CleanDiv": (4 * N, sympy.Integer(2)),
    "ModularIndexing": (N, sympy.Integer(2), sympy.Integer(3)),
    "Where": (sympy.Gt(N, 7), N, 2 * N),
    **dict.fromkeys(("FloatTrueDiv", "FloatPow"), REALS),
    **dict.fromkeys(("CeilToInt", "FloorToInt", "TruncToInt", "RoundToInt"), (REAL,)),
    **dict.fromkeys(("TruncToFloat",), (REAL,)),
    "ToFloat": (N,),
}
# Such a size is an error: nothing that dcpc traces makes one, or it is a base class.
REFUSED = {"IsNonOverlappingAndDenseIndicator", "RoundDecimal", "Identity", "MinMaxBase"}
CLASSES = {
    n: c
    for n, c in vars(functions).items()
    if inspect.isclass(c) and issubclass(c, sympy.Basic) and c.__module__ == functions.__name__
}


def arguments(name):
    if name.startswith("BitwiseFn_"):
        return WHOLE
    if name.startswith("OpaqueUnaryFn_"):
        small = name.endswith(("asin", "acos"))
        return (functions.ToFloat(N) / 16,) if small else (functions.ToFloat(N),)
    return ARGUMENTS[name]


def value(expr, n):
    """A size in numbers, as torch's own classes compute it."""
    found = expr.subs({N: n})
    return float(found)


@pytest.mark.parametrize("name", sorted(CLASSES.keys() - REFUSED))
def test_a_function_of_sizes_has_torchs_value(name):
    expr = CLASSES[name](*arguments(name))
    basis = Basis([expr])
    for n in (6, 7, 8, 15):
        (got,) = basis.matrix([expr]) @ basis.compile([N])(n)
        assert float(got) == pytest.approx(value(expr, n), rel=1e-12)

    found = np.broadcast_arrays(*basis.compile([N])(np.array([6, 15])))
    (got,) = basis.matrix([expr]) @ np.stack(found)
    assert [*got] == pytest.approx([value(expr, n) for n in (6, 15)], rel=1e-12)


def test_a_function_of_sizes_that_nobody_knows_is_refused_by_name():
    assert CLASSES.keys() >= REFUSED
    expr = functions.RoundDecimal(REAL, sympy.Integer(1))
    with pytest.raises(ProfileError, match="RoundDecimal; expected one of"):
        Basis([expr]).compile([N])


@pytest.mark.parametrize("factor", [0.3, 0.5, sympy.Rational(1, 3)])
def test_a_size_rounded_up_is_not_one_rounded_down(factor):
    expr = plain(functions.CeilToInt(factor * functions.ToFloat(N)), {})
    assert [int(expr.subs({N: k})) for k in (7, 8, 9)] == [
        int(sympy.ceiling(factor * k)) for k in (7, 8, 9)
    ]


class Ceiling(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x):
        kept = math.ceil(x.shape[1] * 0.3)
        ramp = torch.arange(kept, dtype=x.dtype)[:, None] / math.ceil(x.shape[1] * 0.7)
        return (self.lin(x)[:, :kept] + ramp).square().mean()


def test_a_length_rounded_up_from_a_real_number_runs():
    torch.manual_seed(0)
    model, seqs = Ceiling().double(), (9, 10, 20)
    buckets = dcpc.Buckets({"x": "float64[batch, seq, 8]"}, [{"seq": n} for n in seqs])
    compiled = dcpc.compile(model, buckets, backend="eager", sp=1, verify="off")
    for n in seqs:
        x = torch.randn(2, n, 8, dtype=torch.float64)
        assert compiled_error(compiled, model, {"x": x}) < 1e-10
