"""Small tables of positions are made once a call; large ones and cheap ones again in backward."""

import torch
from torch import nn

from tests.codegen.made import Made

aten = torch.ops.aten


class Positions(nn.Module):
    """Reads a rotary table, a cheap ramp, and a bias of each pair of positions."""

    def __init__(self):
        super().__init__()
        self.into, self.out = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        places = torch.arange(x.shape[1], dtype=x.dtype)
        angles = places[:, None] * 100.0 ** -torch.arange(4, dtype=x.dtype)
        turned = torch.cat((angles.cos(), angles.sin()), -1).unsqueeze(0)
        x = self.into(x) * turned * (places / 3)[:, None]
        bias = (places[:, None] - places).sin()
        return (self.out(bias @ x) * turned).square().mean()


MADE = Made(Positions())


def schedule(sp):
    placement = MADE.priced.placement({"batch": 2, "seq": 16}, sp)
    return MADE.runnable.traced.lowering(placement).schedule(())


def test_a_small_table_is_saved_as_it_lies_before_views():
    for sp in (1, 2):
        made = schedule(sp)
        tables = [n for n in made.saved if n.target is aten.cat.default]
        assert len(tables) == 1
        assert not any(n.target is aten.cos.default for n in made.backward)


def test_large_tables_and_cheap_values_are_made_again():
    for sp in (1, 2):
        made = schedule(sp)
        again = {n.target for n in made.backward}
        assert aten.sin.default in again  # [seq, seq]
        assert aten.div.Tensor in again
        assert not any(n.target in (aten.sin.default, aten.div.Tensor) for n in made.saved)


def test_numbers_are_the_models_at_any_recompute():
    assert max(MADE.error(*at, k) for at in ((1, 3), (2, 16)) for k in MADE.recompute) < 1e-12
