"""What compiled models of one process leave behind: threads, descriptors, process groups."""

import gc
import os
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import dcpc
from dcpc.errors import GroupError
from dcpc.runtime.groups.groups import Groups
from tests.cases.launch import run_ranks

pytestmark = pytest.mark.multirank
BUCKETS = dcpc.Buckets(dict.fromkeys(("ids", "labels"), "int64[batch, seq]"),
                       sizes=[{"seq": 8, "batch": 2}])  # fmt: skip


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.a, self.b = nn.Embedding(9, 6), nn.Linear(6, 8), nn.Linear(8, 9)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.b(torch.tanh(self.a(self.embed(ids))))
        return F.cross_entropy(x.flatten(0, 1), labels.flatten())


class Eight:
    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        ids = torch.arange(8).roll(i)
        return {"ids": ids, "labels": ids}


def held() -> tuple[int, int]:
    """Returns the threads of this process and its open descriptors."""
    gc.collect()
    threads = len(os.listdir("/proc/self/task"))
    return threads, len(list(Path("/proc/self/fd").iterdir()))


def trained(options: dict[str, Any]) -> dcpc.CompiledModel:
    warnings.simplefilter("ignore")
    compiled = dcpc.compile(Small(), BUCKETS, backend="eager", verify="off", **options)
    pad = {"ids": 0, "labels": -100}
    loader = dcpc.DataLoader(Eight(), compiled, tokens_per_step=64, pad=pad, weight="labels")
    for step in loader:
        compiled.train_step(step)
    return compiled


def several(rank: int, options: dict[str, Any]) -> list[tuple[int, int]]:
    found = []
    for count in range(6):
        trained(options)
        if count in (1, 5):
            found.append(held())
    return found


@pytest.mark.parametrize(
    "options", [{"sp": 2}, pytest.param({"pipeline": 2}, marks=pytest.mark.slow)], ids=str
)
def test_six_compiles_hold_what_two_hold(options):
    for after_two, after_six in run_ranks(several, 2, options, timeout_s=200.0):
        assert after_six == after_two


def again(rank: int) -> list[bool]:
    """Returns whether groups are those of before: as they are, and once one rank's were spoiled."""
    first = Groups.default(device="cpu", timeout_s=60)
    same = Groups.default(device="cpu", timeout_s=60) is first
    if rank == 1:
        first.watch.spoil()
    other = Groups.default(device="cpu", timeout_s=60)
    x = torch.ones(1)
    dist.all_reduce(x, group=other.of(2))
    kept = Groups.default(device="cpu", timeout_s=60) is other
    return [same, other is first, bool(x == 2), kept]


def test_groups_that_one_rank_found_broken_are_made_anew_on_all():
    assert run_ranks(again, 2, timeout_s=60.0) == [[True, False, True, True]] * 2


def closed(rank: int) -> tuple[list[int], str, str]:
    counts = []
    first = trained({"sp": 2})
    with trained({"sp": 2}) as second:
        counts.append(len(second.groups.every()))
        assert first.groups is second.groups
    counts.append(len(first.groups.every()))  # `first` is open
    first.close()
    first.close()  # again is nothing
    ids = torch.zeros(2, 8).long()
    with pytest.raises(GroupError) as of_closed:
        first(ids=ids, labels=ids)
    counts.append(len(first.groups.every()))
    again = trained({"sp": 2})
    assert again.groups is not first.groups
    names = sorted({t.name for t in threading.enumerate()})
    return counts, str(of_closed.value), " ".join(names)


def test_the_last_open_model_closes_the_groups():
    for counts, said, names in run_ranks(closed, 2, timeout_s=200.0):
        assert counts[0] == counts[1] > 1
        assert counts[2] == 0
        assert "got a closed one; expected a compiled model that is open" in said
        assert names.count("dcpc watch") == 1
