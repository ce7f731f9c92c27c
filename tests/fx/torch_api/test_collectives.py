"""Collectives by the names that a release of torch has for them."""

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from dcpc.fx.torch_api.torch_collectives import all_gather_single, failed
from tests.cases.launch import run_ranks

pytestmark = pytest.mark.multirank


def gathered(rank: int) -> tuple[list[int], list[int]]:
    found = []
    for async_op in (False, True):
        into = torch.zeros(4, dtype=torch.int64)
        own = torch.tensor([rank, 10 + rank])
        work = all_gather_single(into, own, group=dist.group.WORLD, async_op=async_op)
        assert (work is not None) == async_op
        if work is not None:
            work.wait()
            assert not failed(work)
        found.append(into.tolist())
    return found[0], found[1]


def test_parts_of_equal_size_are_gathered():
    assert run_ranks(gathered, 2) == [([0, 10, 1, 11],) * 2] * 2


def alone(rank: int) -> tuple[bool, bool]:
    """Rank 0: whether a reduction that the other never joins failed, before and after its limit."""
    pg = dist.new_group(timeout=timedelta(seconds=1))
    if rank:
        time.sleep(2)
        return False, True
    work = dist.all_reduce(torch.ones(1), group=pg, async_op=True)
    early = failed(work)
    with pytest.raises(RuntimeError):
        work.wait(timedelta(seconds=5))
    return early, failed(work)


def test_what_nobody_joins_has_failed_once_its_time_is_up():
    assert run_ranks(alone, 2) == [(False, True)] * 2
