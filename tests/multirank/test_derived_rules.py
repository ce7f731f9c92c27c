"""User ops without a rule, split by what was derived: the plain model's numbers."""

import warnings

import pytest
import torch
from torch import Tensor, nn

import dcpc
from tests.cases.exactness import SplitModel, wrong
from tests.cases.launch import run_ranks
from tests.passes.sharding import user_ops

pytestmark = pytest.mark.multirank

POINTS = ({"batch": 2, "seq": 8}, {"batch": 3, "seq": 17}, {"batch": 1, "seq": 1})
SPLIT = ("rowwise", "scan", "contract")


class UserOps(nn.Module):
    """A row-wise op, a scan along the sequence, a contraction, and one that mixes everything."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 12)
        self.scale = nn.Parameter(torch.randn(12))
        self.weight = nn.Parameter(torch.randn(10, 12))
        self.head = nn.Linear(10, 20)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = user_ops.rowwise(self.table(ids), self.scale)
        x = x + user_ops.scan(x, 0.5)
        x = user_ops.contract(x, self.weight)
        logits = self.head(user_ops.mix(x) + x)
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def data(sizes: dict[str, int]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shape = (sizes["batch"], sizes["seq"])
    return {n: torch.randint(0, 20, shape, generator=generator) for n in ("ids", "labels")}


def run(rank: int) -> tuple[dict[str, float], list[str], dict[str, object]]:
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    inputs = {"ids": "int64[batch, seq]", "labels": "int64[batch, seq]"}
    buckets = dcpc.Buckets(inputs=inputs, sizes=list(POINTS))
    split = SplitModel(UserOps().double(), buckets, {"batch": 1, "seq": 64}, "eager")
    errors = split.errors("user ops", [(p, data(p)) for p in POINTS])
    chosen = split.placement.nodes
    sharded = [n for n in (*SPLIT, "mix") if chosen[n].output.sharded or chosen[n].output.partial]
    return errors, sharded, dict(split.traced.sharding.derived)


def test_user_ops_without_rules_are_split_exactly():
    results = run_ranks(run, 2, timeout_s=240)
    assert not wrong([errors for errors, _, _ in results], 1e-10)
    for _, sharded, derived in results:
        assert sharded == list(SPLIT), "the op that mixes everything stays whole"
        assert derived == results[0][2], "ranks derived differently"
