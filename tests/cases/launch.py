"""Runs a function on several gloo ranks of this machine: dcpc's own launcher, for the tests.

    assert run_ranks(on_rank, 2, argument) == [result of rank 0, result of rank 1]

Where ranks would all trace and plan the same, one process does it, and they are forks of it:

    def prepare(names: list[str]) -> dict[str, SplitModel]: ...
    def on_rank(rank: int, prepared: dict[str, SplitModel]) -> float: ...

    run_prepared(prepare, on_rank, 4, ["gpt"])
"""

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch

from dcpc.runtime.groups import local_ranks
from dcpc.runtime.groups.local_ranks import RanksError, run_ranks

__all__ = ["RanksError", "run_prepared", "run_ranks"]


def run_prepared(
    prepare: Callable[..., Any],
    fn: Callable[..., Any],
    world: int,
    *args: Any,
    timeout_s: float = 120.0,
) -> list[Any]:
    """Returns `fn(rank, prepare(*args))` of every rank, in rank order.

    Args:
        prepare: function at module level that one process calls, before there is any group.
        fn: function at module level that every rank calls, in a fork of that process.
        world: number of ranks.
        args: passed on to `prepare`; pickled.
        timeout_s: ranks that have not ended by then are killed, and that is a failure.

    Raises:
        RanksError: a rank raised, died or was killed.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(local_ranks.PRELOADED)
    with ProcessPoolExecutor(1, context) as pool:
        found: list[Any] = pool.submit(_forked, prepare, fn, world, args, timeout_s).result()
    return found


def _forked(
    prepare: Callable[..., Any],
    fn: Callable[..., Any],
    world: int,
    args: tuple[Any, ...],
    timeout_s: float,
) -> list[Any]:
    torch.set_num_threads(1)  # torch's own threads would not be there in a fork
    return run_ranks(fn, world, prepare(*args), timeout_s=timeout_s, fork=True)
