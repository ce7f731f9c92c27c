"""A block that is applied many times (ALBERT): its parameters join all of its layers."""

import torch
import torch.nn.functional as F
from torch import nn

from dcpc.buckets import Buckets
from dcpc.commands.check import SplitModel
from dcpc.passes.placement.elimination import CostNetwork
from dcpc.passes.placement.placement import place
from dcpc.passes.sharding.sharding import analyse
from dcpc.trace import trace
from tests.cases.analysed import TIGHT

BUCKETS = Buckets({"x": "float64[batch, seq, 16]"}, [{"seq": 12}])


class Looped(nn.Module):
    def __init__(self, times):
        super().__init__()
        self.times = times
        self.q, self.k, self.v, self.out = (nn.Linear(16, 16) for _ in range(4))
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.norms = nn.ModuleList([nn.LayerNorm(16), nn.LayerNorm(16)])

    def forward(self, x):
        for _ in range(self.times):
            qkv = (f(x).unflatten(2, (4, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
            a = F.scaled_dot_product_attention(*qkv)
            x = self.norms[0](x + self.out(a.transpose(1, 2).flatten(2)))
            x = self.norms[1](x + self.down(F.gelu(self.up(x))))
        return x.square().mean()


def test_tables_stay_small_however_often_a_block_is_applied(monkeypatch):
    solutions, minimise = [], CostNetwork.minimise_cases

    def spied(self):
        solutions.extend(minimise(self))
        return solutions[-1:]

    monkeypatch.setattr(CostNetwork, "minimise_cases", spied)
    program = trace(Looped(6).double(), BUCKETS)
    found = place(program, analyse(program), {"batch": 4, "seq": 512}, 2, TIGHT)
    assert solutions
    assert max(s.largest_table for s in solutions) < 1e4  # over 1e8 if each slice is paid once
    assert any(p.output.sharded for p in found.nodes.values())


def test_a_block_that_is_applied_six_times_is_exact_on_two_ranks():
    torch.manual_seed(0)
    model = Looped(6).double()
    split = SplitModel(model, BUCKETS, {"batch": 1, "seq": 12}, sp=2)
    x = torch.randn(2, 7, 16, dtype=torch.float64)
    found = split.difference({"batch": 2, "seq": 7}, {"x": x}, "all", in_step=True)
    assert max(found.loss, found.gradient) < 1e-10
