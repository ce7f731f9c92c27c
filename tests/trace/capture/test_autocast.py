"""Composite ops within which autocast casts: what it takes them in is in the graph."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dcpc

CALLS = {
    "gru": (lambda x, y, m: m(x[:, 0], x.float().mean(1)), nn.GRUCell(8, 8)),
    "lstm": (lambda x, y, m: torch.stack(m(x[:, 0])), nn.LSTMCell(8, 4)),
    "rnn": (lambda x, y, m: m(x[:, 0]) + m(x[:, 1]), nn.RNNCell(8, 4)),
    "einsum": (lambda x, y, m: torch.einsum("bsd, btd -> bst", m(x.float()), x), nn.LayerNorm(8)),
    "nll_loss": (lambda x, y, m: F.nll_loss(x.log_softmax(-1).mT, y, m.weight), nn.LayerNorm(8)),
    "einsum of three": (
        lambda x, y, m: torch.einsum("bsd,de,bte->bst", m(x.float()), m.weight.diag(), x),
        nn.LayerNorm(8),
    ),
    "tensordot": (lambda x, y, m: torch.tensordot(x.float(), m.weight.diag(), 1), nn.LayerNorm(8)),
    "inner": (lambda x, y, m: torch.inner(m(x.float()), m.weight.diag()), nn.LayerNorm(8)),
    "mirrored": (lambda x, y, m: F.pad(x, (2, 1), mode="reflect"), None),
    "hinge": (lambda x, y, m: F.hinge_embedding_loss(x, x.sign(), reduction="none"), None),
    "margin": (lambda x, y, m: F.margin_ranking_loss(x, x.mT.mT.flip(1), x.sign(), 0.1,
                                                     reduction="none"), None),
    "multilabel margin": (
        lambda x, y, m: F.multilabel_margin_loss(x.flatten(0, 1), (x > 0).long().flatten(0, 1)),
        None,
    ),
    "grid": (
        lambda x, y, m: F.affine_grid(x.float()[:, :2, :3], [x.shape[0], 1, x.shape[1], 4],
                                      align_corners=False),
        None,
    ),
    "cross_entropy": (lambda x, y, m: F.cross_entropy(x.mT, y, m.weight), nn.LayerNorm(8)),
}  # fmt: skip

# A cell, a contraction and a loss; the others are slow.
QUICK = (torch.bfloat16, ("gru", "einsum", "cross_entropy"))
ALL = [(dtype, tuple(CALLS)) for dtype in (torch.bfloat16, torch.float16)]


class Calls(nn.Module):
    def __init__(self, function, module):
        super().__init__()
        self.first, self.function, self.module = nn.Linear(8, 8), function, copy.deepcopy(module)
        if isinstance(module, nn.LayerNorm):  # its weight is that of the classes
            self.module.requires_grad_(False)

    def forward(self, x, y):
        found = self.function(self.first(x), y, self.module)
        return {"loss": found.float().square().mean(), "found": found}


class Some(nn.Module):
    """Calls, each behind a linear layer of its own: they are compiled at once."""

    def __init__(self, names):
        super().__init__()
        self.parts = nn.ModuleDict({name: Calls(*CALLS[name]) for name in names})

    def forward(self, x, y):
        found = {name: part(x, y) for name, part in self.parts.items()}
        return {"loss": sum(f["loss"] for f in found.values()), "of": found}


@functools.cache
def both(dtype, names):
    """What dcpc and the plain model return under autocast, and the models with their gradients."""
    torch.manual_seed(0)
    own = Some(names)
    plain = copy.deepcopy(own)
    inputs = {"x": "float32[batch, seq, 8]", "y": "int64[batch, seq]"}
    buckets = dcpc.Buckets(inputs, sizes=[{"seq": 6}, {"seq": 10}])
    compiled = dcpc.compile(own, buckets, backend="eager", verify="off", autocast=dtype)
    x, y = torch.randn(3, 10, 8), torch.randint(8, (3, 10))
    got, outputs = compiled(x=x, y=y, outputs=True)
    with torch.autocast("cpu", dtype):
        want = plain(x, y)
    got.backward(), want["loss"].backward()
    return (outputs["of"], own), (want["of"], plain)


@pytest.mark.parametrize(
    ("some", "name"),
    [
        *(pytest.param(QUICK, name, id=f"quick-{name}") for name in QUICK[1]),
        *(
            pytest.param(some, name, id=f"{some[0]}-{name}", marks=pytest.mark.slow)
            for some in ALL
            for name in CALLS
        ),
    ],
)
def test_parts_are_cast_as_autocast_casts_them(some, name):
    (got, own), (want, plain) = ((found[name], model.parts[name]) for found, model in both(*some))
    assert got["found"].dtype == want["found"].dtype
    torch.testing.assert_close(got["loss"], want["loss"], rtol=1e-6, atol=0)
    for ours, theirs in zip(own.parameters(), plain.parameters(), strict=True):
        if theirs.grad is not None:
            limit = 2e-2 * float(theirs.grad.abs().max())
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=limit)
