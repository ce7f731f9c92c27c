"""Ops that return several tensors, each split as suits it: the plain model's numbers."""

import operator
import warnings
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from dcpc.buckets import Buckets
from dcpc.codegen.lower.lower import lower
from dcpc.ir import Program, call_of
from dcpc.passes.placement.placement import place
from dcpc.passes.sharding.sharding import analyse
from dcpc.trace import trace
from tests.cases.analysed import on_machine
from tests.cases.exactness import SplitJob, SplitModel, split_errors, wrong
from tests.cases.launch import run_prepared

INPUTS = {"x": "float64[batch, seq, 12]"}
POINTS = ({"batch": 2, "seq": 8}, {"batch": 3, "seq": 17}, {"batch": 1, "seq": 3})
FAST_LINK = on_machine(1e6, 1e6, 1e15, 1e-9, 0.0)


class Several(nn.Module):
    """Values and indices of one call, both used; a stack of matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.table = nn.Linear(12, 12), nn.Embedding(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        z = self.net(x)
        top, at = z.topk(3, -1)
        loss = (top * self.table(at).sum(-1)).square().mean()
        ordered, order = z.sort(-1)
        loss = loss + (ordered * order).mean() + z.max(-1).values.square().mean()
        variance, mean = torch.var_mean(z, -1)
        loss = loss + (variance * mean).mean() + z.median(-1).values.sin().mean()
        high, where = z.cummax(-1)
        low, _ = z.aminmax(dim=-1)
        loss = loss + (high * where).mean() + low.square().mean()
        sign, volume = torch.linalg.slogdet(z.mT @ z + torch.eye(12, dtype=z.dtype))
        return loss + (sign * volume).mean()


def model() -> nn.Module:
    torch.manual_seed(0)
    return Several().double()


@cache
def program() -> Program:
    return trace(model(), Buckets(inputs=INPUTS, sizes=list(POINTS)))


def items(name: str) -> list[str]:
    """The results of an op that the program reads."""
    nodes = [n for n in program().gm.graph.nodes if n.target is operator.getitem]
    return [n.name for n in nodes if name in str(call_of(n).target)]


SPLIT = ("topk", "sort", "max", "var_mean", "median", "cummax", "aminmax")


def test_each_result_is_split_and_the_call_made_once():
    sharding = analyse(program())
    before = program().gm.print_readable(print_output=False)
    placement = place(program(), sharding, {"batch": 1, "seq": 64}, 2, FAST_LINK)
    lowered = lower(program(), placement, "no group")
    assert program().gm.print_readable(print_output=False) == before
    for name in SPLIT:
        results = items(f"aten.{name}.")
        assert results, f"the trace has no {name}"
        assert all(placement.nodes[n].output.sharded for n in results), name
        made = [n for n in lowered.gm.graph.nodes if f"aten.{name}." in str(n.target)]
        assert len(made) == 1, f"{name} runs {len(made)} times for {len(results)} results"


def test_a_dim_that_is_ordered_stays_whole():
    found = analyse(trace(Along(), Buckets(inputs=INPUTS, sizes=list(POINTS))))
    node = next(n for n in found.rules if n.startswith("getitem"))
    batch, width = ({"n0"}, {"n2"})
    assert {a.name for a in found.alternatives[node] if a.factor >= 0} == batch | width


class Along(nn.Module):
    """Sorts along the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(12, 12).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).sort(1).values.square().mean()


def job() -> list[SplitJob]:
    warnings.simplefilter("ignore")
    split = SplitModel(
        model(), Buckets(inputs=INPUTS, sizes=list(POINTS)), {"batch": 1, "seq": 64}, "eager", 2
    )
    generator = torch.Generator().manual_seed(2)
    data = [
        {"x": torch.randn(p["batch"], p["seq"], 12, dtype=torch.float64, generator=generator)}
        for p in POINTS
    ]
    return [SplitJob.ready("several", split, list(zip(POINTS, data, strict=True)))]


@pytest.mark.multirank
def test_several_results_equal_the_plain_ones():
    assert not wrong(run_prepared(job, split_errors, 2, timeout_s=280), 1e-10)
