"""Conjugate and negative views: bits of tensors that no key of a shared piece holds."""

import torch
from torch import nn

import dcpc
from tests.cases.exactness import compiled_error


class Complex(nn.Module):
    """The same calls of a value, its conjugate and its negative; a parameter that is a view."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)
        w = torch.randn(4, dtype=torch.complex128)
        self.w, self.v = nn.Parameter(w.conj()), nn.Parameter(w.conj().imag)
        self.register_buffer("b", w.conj())

    def forward(self, x):
        z = torch.view_as_complex(self.lin(x).unflatten(-1, (4, 2)))
        both = [z, z.conj(), z * self.b.clone().imag, z.conj() * self.w.resolve_conj().imag]
        parts = [v.imag.exp() + v.mT.imag.mT.tanh() for v in both] + [z.imag * self.v.resolve_neg()]
        return sum(((i + 1) * (p * p.clone()).mean() for i, p in enumerate(parts)), z.abs().mean())


def test_conjugate_and_negative_views_have_their_own_values():
    torch.manual_seed(0)
    model = Complex().double()
    assert model.w.is_conj()
    assert model.v.is_neg()
    buckets = dcpc.Buckets({"x": "float64[batch, seq, 8]"}, [{"seq": 5}, {"seq": 9}])
    compiled = dcpc.compile(model, buckets, backend="eager", sp=1, verify="off")
    for seq in (5, 9):
        x = torch.randn(2, seq, 8, dtype=torch.float64)
        assert compiled_error(compiled, model, {"x": x}) < 1e-10
