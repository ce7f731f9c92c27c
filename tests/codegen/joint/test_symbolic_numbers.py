"""Floats and bools of sizes as arguments: each dim's piece has its own numbers."""

import pytest
import torch
from torch import nn

import dcpc
from dcpc.commands.check import SplitModel

D = torch.float64
FORMS = {
    "a divisor": lambda a, n, m: a / (n / 8),
    "a clamp": lambda a, n, m: a.clamp(max=n / 2),
    "a comparison": lambda a, n, m: torch.where(a < n / 3, a * 2, a),
    "a middle": lambda a, n, m: a - (n - 1) / 2,
    "a fill": lambda a, n, m: a + torch.full((n,), 1.0 / n, dtype=D),
    "two dims": lambda a, n, m: a * (m / n + n / 3),
    "a weight": lambda a, n, m: torch.lerp(a, a * 2 + 1, 1 / n),
    "a keyword": lambda a, n, m: torch.add(a, a * a, alpha=1 / n),
    "a bool": lambda a, n, m: torch.full((n,), n > m, dtype=D) + a,
    "a bool times": lambda a, n, m: a * (n > m) + a,
    "a root": lambda a, n, m: a / n**0.5 + a * n**-1.5,
    "a rounded one": lambda a, n, m: a * round(n / 3),
    "an integer": lambda a, n, m: a * torch.full((n,), n + 1, dtype=D),
}


class Rows(nn.Module):
    """The same of rows and of columns."""

    def __init__(self, form):
        super().__init__()
        self.form, self.mix = form, nn.Linear(3, 3)

    def forward(self, x):
        h, w = x.shape[1], x.shape[2]
        rows = self.form(torch.arange(h, dtype=D), h, w)[:, None, None]
        columns = self.form(torch.arange(w, dtype=D), w, h)[:, None]
        y = self.mix(x)
        return (y * rows + y.square() * columns).mean()


@pytest.mark.parametrize("form", FORMS)
def test_a_number_made_of_one_size_is_not_used_for_another(form):
    torch.manual_seed(0)
    sizes = ({"batch": 1, "h": 8, "w": 12}, {"batch": 1, "h": 17, "w": 9})
    buckets = dcpc.Buckets({"x": "float64[batch, h, w, 3]"}, [*sizes])
    split = SplitModel(Rows(FORMS[form]).double(), buckets, sizes[1])
    for at in (*sizes, {"batch": 1, "h": 11, "w": 13}):
        x = torch.randn(1, at["h"], at["w"], 3, dtype=D)
        assert split.difference(at, {"x": x}).worst < 1e-10
