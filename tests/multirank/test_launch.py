import multiprocessing
import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.cases.launch import RanksError, run_ranks

pytestmark = pytest.mark.multirank


def add_up(rank: int, factor: float) -> torch.Tensor:
    x = torch.tensor([rank * factor])
    dist.all_reduce(x)
    return x


def fail_on_one(rank: int) -> None:
    if rank == 1:
        raise ValueError("rank one's own trouble")


def sleep_on_one(rank: int) -> None:
    time.sleep(60.0 * rank)


def die_on_one(rank: int) -> int:
    if rank == 1:
        os._exit(3)
    return rank


def test_results_come_in_rank_order():
    assert run_ranks(add_up, 2, 10.0) == [torch.tensor([10.0])] * 2


def test_traceback_of_the_failed_rank_is_shown():
    with pytest.raises(RanksError, match=r"(?s)rank 1: Traceback.*rank one's own trouble"):
        run_ranks(fail_on_one, 2)


def test_rank_that_does_not_end_is_killed():
    before = multiprocessing.active_children()
    with pytest.raises(RanksError, match="rank 1: still running, killed"):
        run_ranks(sleep_on_one, 2, timeout_s=0.5, init=False)
    assert not {*multiprocessing.active_children()} - {*before}


def test_dead_rank_is_an_error_unless_it_may_die():
    assert run_ranks(die_on_one, 2, may_die=[1]) == [0, None]
    with pytest.raises(RanksError, match="rank 1: died, exit code 3"):
        run_ranks(die_on_one, 2)
