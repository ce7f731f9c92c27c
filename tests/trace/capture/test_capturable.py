"""Functions that are captured by other formulas compute what torch's own do."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.fuzz.judge import Setting, judge

POINTS = [{"batch": 2, "h": h} for h in (8, 9, 13)]
TRIED = [Setting(1), Setting(2, recompute="all"), Setting(4)]


class Pieces(nn.Module):
    def __init__(self, cut):
        super().__init__()
        self.weight, self.cut = nn.Parameter(torch.randn(4, 4)), cut

    def forward(self, x):
        pieces = self.cut(x @ self.weight)
        return sum((i + 1) * p.cumsum(1).square().sum() for i, p in enumerate(pieces))


@pytest.mark.parametrize(
    "cut",
    [
        lambda x: x.chunk(2, 1),
        lambda x: torch.chunk(x, 3, dim=-2),
        lambda x: x.tensor_split(2, 1),
        lambda x: torch.tensor_split(x, 3, 1),
        lambda x: [torch.cat(x.mT.chunk(2, -1)[::-1], 2)],
    ],
    ids=["chunk 2", "chunk 3", "tensor_split 2", "tensor_split 3", "exchanged"],
)
def test_pieces_of_a_length_are_torchs(cut):
    found = judge(Pieces(cut).double(), {"x": "float64[batch, h, 4]"}, POINTS, TRIED)
    assert found.kind == "right", found.text


def spaced(start, end):
    """Positions from one number to another, each of a size."""

    def of(x):
        h = x.shape[1]
        at = torch.linspace(start(h), end(h), h, dtype=torch.float64, device=x.device)
        return [x * at[:, None], x.mT @ torch.linspace(0, 1, steps=2 * h)[h:].double()[:, None]]

    return of


@pytest.mark.parametrize(
    "cut",
    [
        spaced(lambda h: 0, lambda h: 1),
        spaced(lambda h: -h, lambda h: h - 1),
        spaced(lambda h: 1 / h, lambda h: h / 3),
        lambda x: [F.pad(x, (0, 0, 2, 1), value=x.shape[1] / 8)],
        lambda x: [F.pad(x, (1, 0, 0, 3), value=x.shape[1])],
        lambda x: [F.pad(x.mT, (1, 2), mode="circular").mT],
        lambda x: [F.scaled_dot_product_attention(x, x, x, scale=3 / x.shape[1])],
    ],
    ids=["constants", "sizes", "quotients", "padded", "padded by a size", "circular", "scale"],
)
def test_numbers_of_a_length_are_torchs(cut):
    found = judge(Pieces(cut).double(), {"x": "float64[batch, h, 4]"}, POINTS, TRIED)
    assert found.kind == "right", found.text


def test_an_epsilon_of_a_length_is_refused_by_what_torch_assumed():
    """torch's norm takes it as a number; its assertion of a quotient is readable."""
    model = Pieces(lambda x: [F.layer_norm(x, (4,), eps=x.shape[1] / 5)])
    found = judge(model.double(), {"x": "float64[batch, h, 4]"}, POINTS, TRIED)
    assert (found.kind, "Eq(IntTrueDiv(h, 5)" in found.text) == ("refused", True)


def test_a_length_with_fewer_chunks_than_asked_for_is_refused():
    """8 in 5 are 4 pieces of 2."""
    found = judge(
        Pieces(lambda x: x.chunk(5, 1)).double(), {"x": "float64[batch, h, 4]"}, POINTS, TRIED
    )
    assert found.kind == "refused", found.text


def test_one_sample_may_write_a_number():
    """Of one sample `squeeze` makes a number, which torch writes by fill_ and not by copy_."""

    class Shifted(Pieces):
        def forward(self, x):
            y = x @ self.weight
            first = y[:, -1:, 0].detach().squeeze()
            z = y.clone()
            z[:, 0, 0] = first
            return z.square().sum()

    points = [{"batch": 2, "h": 5}, {"batch": 1, "h": 6}]
    found = judge(Shifted(None).double(), {"x": "float64[batch, h, 4]"}, points, TRIED)
    assert found.kind == "right", found.text
