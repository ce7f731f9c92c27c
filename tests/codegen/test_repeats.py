"""Repeated blocks by structure, and the cuts between blocks that read a shared value."""

import torch
from torch import Tensor, nn

import dcpc
from dcpc.codegen import segments
from dcpc.codegen.segments import shared_values
from dcpc.repeats import Run, repeated_runs
from dcpc.trace import trace

INPUTS = {"x": "float64[batch, seq, 8]", "time": "float64[batch, 4]"}
BUCKETS = dcpc.Buckets(INPUTS, [{"seq": 8}, {"seq": 32}])


class Conditioned(nn.Module):
    """Blocks that all read one embedding, and a head that reads it too, and a skip to the end."""

    def __init__(self, depth: int, shared: bool = True) -> None:
        super().__init__()
        self.embed, self.first = nn.Linear(4, 8), nn.Linear(8, 8)
        self.blocks = nn.ModuleList(
            nn.ModuleList([nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)])
            for _ in range(depth)
        )
        self.shared = shared

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        skip = x = self.first(x)
        t = torch.tanh(self.embed(time))[:, None]
        for norm, up, down in self.blocks:
            h = norm(x) * t if self.shared else norm(x)
            x = x + down(torch.tanh(up(h)))
        return ((x * t - skip) ** 2).mean()


def test_runs_are_found_with_their_period():
    calls = [*"xy", *"abcde" * 4, *"z", *"fghijk" * 3, *"w"]
    runs = repeated_runs(calls)
    assert runs == [Run(2, 5, 22), Run(23, 6, 41)]


def test_no_block_comes_twice():
    assert repeated_runs(list(range(20))) == []
    assert repeated_runs([]) == []


def test_a_period_is_not_two_blocks():
    (run,) = repeated_runs([*"abcdef"] * 8)
    assert run.period == 6


def test_shared_values_do_not_join_the_blocks():
    program = trace(Conditioned(4).double(), BUCKETS)
    found = segments(program)
    blocks = [
        n.name for n in program.gm.graph.nodes if n.target is torch.ops.aten.layer_norm.default
    ]
    assert len({found[name] for name in blocks}) == 4
    alone = segments(trace(Conditioned(4, shared=False).double(), BUCKETS))
    assert max(found.values()) == max(alone.values())


def test_what_blocks_share_and_what_skips_them():
    program = trace(Conditioned(3).double(), BUCKETS)
    shared = shared_values(program)
    linears = program.gm.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)
    assert linears[0].name in shared  # the skip
    assert not any(n.name in shared for n in linears[2:])
