"""A disk that fails on one rank while saved values are there: all ranks say so, nothing changes."""

import ctypes
import errno
import os
import threading
import time
import warnings
from typing import Any

import pytest
import torch

import dcpc
from dcpc.codegen.away import host_store
from dcpc.errors import DcpcError
from tests.cases.launch import run_ranks
from tests.cases.ragged import Ragged, gpt
from tests.cases.steps import compared

INPUTS = dict.fromkeys(("input_ids", "labels"), "int64[batch, seq]")
PAD = {"input_ids": 0, "labels": -100}
FAULTS = {
    "full": "No space left on device",
    "removed": "the file ends early",
    "dead": "the end of the thread that writes and reads",
}


class Disk:
    """The system's calls, of which those of one rank fail in a way."""

    def __init__(self, fault: str) -> None:
        self.fault = fault
        self.pwrite, self.preadv = os.pwrite, os.preadv

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def write(self, descriptor: int, data: Any, start: int) -> int:
        if self.fault == "full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        time.sleep(0.01)
        return os.pwrite(descriptor, data, start)

    def read(self, descriptor: int, into: Any, start: int) -> int:
        if self.fault == "removed":
            os.ftruncate(descriptor, 0)
        return os.preadv(descriptor, into, start)


def end_the_thread() -> None:
    """Ends the thread of the store as it takes its next job."""
    (thread,) = [t for t in threading.enumerate() if t.name.startswith("dcpc store")]
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit)
    )


def trains(rank: int, fault: str, folder: str) -> tuple[float, str, bool]:
    """The second step meets a fault on rank 1; returns errors, and whether state stayed whole."""
    warnings.simplefilter("ignore")
    compiled = dcpc.compile(
        gpt(), dcpc.Buckets(INPUTS, [{"seq": 24}]), backend="eager", verify="off", memory=1e9,
        sp=1, away="all", disk=f"{folder}:64MB",
    )  # fmt: skip
    loader = dcpc.DataLoader(Ragged(), compiled, tokens_per_step=120, pad=PAD, weight="labels")
    steps = iter(loader)
    worst = compared(compiled, next(steps), Ragged())
    before = [(p.detach().clone(), p.grad.clone()) for p in compiled.parameters()]
    disk: Any = Disk(fault)
    if rank == 1:
        disk.pwrite, disk.preadv = disk.write, disk.read
        host_store.os = disk
        if fault == "dead":
            end_the_thread()
    if fault == "slow":
        return max(worst, compared(compiled, next(steps), Ragged())), "", True
    with pytest.raises(DcpcError) as told:
        compiled.train_step(next(steps))
    now = [(p.detach(), p.grad) for p in compiled.parameters()]
    whole = all(map(torch.equal, sum(before, ()), sum(now, ())))
    host_store.os = os
    if rank == 1:  # the rank itself goes on with the next values
        compiled.zero_grad()
        given = {n: x[None] for n, x in Ragged()[0].items()}
        compiled(**given).backward()
        whole = whole and all(p.grad is not None for p in compiled.parameters())
    return worst, f"{type(told.value).__name__}: {told.value}", whole


@pytest.mark.multirank
@pytest.mark.parametrize("fault", ["full", "dead", "removed", "slow"])
def test_a_disk_that_fails_on_one_rank_is_named_on_all(tmp_path, fault):
    found = run_ranks(trains, 2, fault, str(tmp_path), timeout_s=120)
    for rank, (worst, text, whole) in enumerate(found):
        assert worst < 1e-10
        assert whole
        if fault != "slow":
            assert FAULTS[fault] in text
            assert f"disk='{tmp_path}'" in text
            assert rank == 1 or "rank 1 failed" in text
