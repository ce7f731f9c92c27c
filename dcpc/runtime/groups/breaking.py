"""Ends a rank's waits in its process groups, once the others will not come.

gloo    closes this rank's connections: whoever waits in one raises
nccl    aborts the communicator: its kernels end, and what they wrote is of no use
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

_NO_TAG = 0x6463  # a message that nobody sends
_ABORT_S = 10.0  # an abort that takes longer goes on beside what follows


def break_connections(pg: dist.ProcessGroup) -> None:
    """Closes this rank's connections in a group over gloo: whoever waits for it there raises.

    A message that does not come within its time limit closes all of them. (`ProcessGroup.abort`
    leaves peers waiting until the last reference to the group is gone.) One of a peer whose
    connection is closed already fails at once and closes no other, so each peer is tried.
    """
    if pg.size() < 2 or dist.get_backend(pg) != "gloo":
        return
    for peer in range(pg.size()):
        if peer != pg.rank():
            with contextlib.suppress(RuntimeError):
                pg.recv([torch.empty(1)], peer, _NO_TAG).wait(timedelta(milliseconds=1))


def aborts_of(groups: Sequence[dist.ProcessGroup]) -> list[Callable[[], None]]:
    """Returns a function for each group that aborts its communicator on the GPU; none for gloo.

    Warns:
        UserWarning: a backend has none.
    """
    found: list[Callable[[], None]] = []
    for pg in groups:
        try:
            backend = pg._get_backend(torch.device("cuda"))
        except RuntimeError:  # it has none for a GPU
            continue
        if backend.name() == "gloo":
            continue
        # Source: `_abort` of torch before 2.6 is `abort` in 2.11 to 2.15.
        abort = getattr(backend, "abort", None) or getattr(backend, "_abort", None)
        if abort is None:
            warnings.warn(
                f"a process group over {backend.name()} cannot be aborted: got no abort() of its "
                "backend; its ranks wait for a lost one until the backend's own time limit; pass "
                "a shorter timeout to init_process_group",
                stacklevel=2,
            )
            continue
        found.append(abort)
    return found


def run_all(aborts: Sequence[Callable[[], None]]) -> None:
    """Aborts communicators, each on a thread of its own: one may wait for another's."""

    def quietly(abort: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # it is broken already
            abort()

    threads = [threading.Thread(target=quietly, args=(abort,), daemon=True) for abort in aborts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_ABORT_S)
