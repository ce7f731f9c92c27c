"""Runs a function on several gloo ranks of this machine: for `dcpc check`, tests and benchmarks.

    def both_sum(rank: int, factor: float) -> float:    # at module level: pickled by name
        x = torch.tensor(float(rank) * factor)
        dist.all_reduce(x)
        return x.item()

    assert run_ranks(both_sum, 2, 10.0) == [10.0, 10.0]

Each rank is a process with one thread and torchrun's environment. The rendezvous store lives in the
calling process (as under torchrun), so the death of any rank, rank 0 included, leaves it up.

Ranks are forks of a server, made with the first of them, that has imported dcpc and done nothing
else: it is seconds that each would spend.
"""

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import time
import traceback
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import util
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess, ForkServerProcess
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist

from dcpc.errors import GroupError, bare
from dcpc.runtime.groups.watch import uncaught

# Modules that the server imports before it forks the first rank. A program whose ranks need others
# adds them: each is then imported once, not in each rank.
PRELOADED = ["dcpc"]
# Once a rank has failed its peers get this long to fail too, so that all tracebacks are shown.
GRACE_S = 8.0


class RanksError(GroupError):
    """Some ranks raised, died or did not end; the message has every failed rank's traceback."""


@dataclass
class _Child:
    process: BaseProcess
    pipe: Connection
    result: Any = None
    problem: str | None = None
    ended: bool = False


def run_ranks(
    fn: Callable[..., Any],
    world: int,
    *args: Any,
    timeout_s: float = 120.0,
    init: bool = True,
    may_die: Collection[int] = (),
    fork: bool = False,
) -> list[Any]:
    """Returns `fn(rank, *args)` of every rank, in rank order.

    Args:
        fn: function at module level; arguments and result are pickled.
        world: number of ranks.
        args: arguments of `fn` after the rank.
        timeout_s: seconds after which ranks are killed; that is a failure.
        init: whether to initialise the gloo default group; else only torchrun's environment is set.
        fork: whether ranks are copies of this process, with all that it has computed; `fn` and
            `args` need not be pickled. Only before this process has threads at work (a process
            group, several threads of torch).
        may_die: ranks that may end without a result (`os._exit` in `fn`); theirs is None.

    Raises:
        RanksError: a rank raised, died or was killed.
    """
    if not fork:
        multiprocessing.set_forkserver_preload(PRELOADED)
    children: list[_Child] = []
    try:
        for rank in range(world):
            inherited = [c.pipe for c in children] if fork else []
            children.append(_start(fn, args, rank, world, init, timeout_s, fork, inherited))
        store = _store(timeout_s)
        for child in children:
            with contextlib.suppress(BrokenPipeError):  # it died: its peers wait in vain
                child.pipe.send(store.port)
        _collect(children, timeout_s, may_die)
    finally:
        for child in children:
            child.pipe.close()
        for child in children:
            child.process.join(2.0)
            if child.process.is_alive():
                child.process.kill()
                child.process.join()
    problems = {r: c.problem for r, c in enumerate(children) if c.problem}
    if problems:
        raise _failed(problems, world)
    return [child.result for child in children]


def _failed(problems: Mapping[int, str], world: int) -> RanksError:
    """Returns the error of ranks that failed; those with one problem share a line."""
    alike = {p: ", ".join(str(r) for r in problems if problems[r] == p) for p in problems.values()}
    texts = [f"rank {ranks}: {problem}" for problem, ranks in alike.items()]
    return RanksError(f"{len(problems)} of {world} ranks failed\n" + "\n".join(texts))


def _store(timeout_s: float) -> Any:
    """Returns the rendezvous store, to be made once all ranks are processes.

    It has a thread. A fork while that is at work copies the locks it holds (of name look-ups, for
    one), and no thread that would let them go.
    """
    return dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
    )


def _start(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    rank: int,
    world: int,
    init: bool,
    timeout_s: float,
    fork: bool,
    inherited: list[Connection],
) -> _Child:
    ours, theirs = multiprocessing.Pipe()
    environment = {
        **os.environ,  # the server has what it was when the first ranks were made
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    make: Callable[..., BaseProcess] = ForkProcess if fork else ForkServerProcess
    inherited = [*inherited, ours] if fork else []
    process = make(
        target=_main, args=(theirs, inherited, environment, init, timeout_s, fn, args), daemon=True
    )
    process.start()
    theirs.close()
    return _Child(process, ours)


def _collect(children: list[_Child], timeout_s: float, may_die: Collection[int]) -> None:
    deadline = time.monotonic() + timeout_s
    while open_ := {c.pipe: (r, c) for r, c in enumerate(children) if not c.ended}:
        ready = wait(list(open_), max(0.0, deadline - time.monotonic()))
        if not ready:
            for _, child in open_.values():
                child.problem = f"still running, killed (limit {timeout_s:g} s, grace {GRACE_S} s)"
            return
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank, child = open_[pipe]
            child.ended = True
            try:
                child.result, child.problem = pickle.loads(child.pipe.recv_bytes())
            except EOFError:
                child.process.join(2.0)
                if rank not in may_die:
                    child.problem = f"died, exit code {child.process.exitcode}"
            if child.problem:
                deadline = min(deadline, time.monotonic() + GRACE_S)


def _main(
    pipe: Connection,
    inherited: list[Connection],
    environment: dict[str, str],
    init: bool,
    timeout_s: float,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    # A fork has the caller's ends too, and no end is closed before all its holders close it.
    for other in inherited:
        other.close()
    os.environ.clear()
    os.environ.update(environment, MASTER_PORT=str(pipe.recv()))
    torch.set_num_threads(1)
    faulthandler.enable()  # a rank that dies of a signal says where, on standard error
    # A fork shares its parent's memory page by page until either writes: looking through the
    # parent's objects for garbage would copy them all.
    gc.freeze()
    try:
        if init:
            dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
        with bare:
            message = pickle.dumps((fn(int(environment["RANK"]), *args), None))
    except BaseException as e:
        uncaught(e)
        message = pickle.dumps((None, traceback.format_exc()))
    pipe.send_bytes(message)
    # A rank that leaves early breaks its peers' connections: stay until the caller has all results.
    with contextlib.suppress(EOFError):
        pipe.recv_bytes()
    # Libraries' locks (tqdm's) are let go, or else Python warns of leaked semaphores at the end.
    util._run_finalizers()  # type: ignore[attr-defined]
    os._exit(0)
