"""Recognises a rank that runs out of memory within a step, and has all ranks give the step up.

A rank that gives a step up still takes part in its sum of gradients, with nothing, so that all
ranks arrive at its end; there they learn who had too little. Ranks that would wait for it in groups
of several are woken before: it tells over the store that the step is given up, then breaks these
groups, and who meets a broken group looks whether that was told.

    rank 1   micro-batch of ranks 0,1: no memory ─► tells, breaks the group ─► sum: nothing, failed
    rank 0   micro-batch of ranks 0,1: connection broke; it was told ───────► sum: nothing, failed
    rank 2   its own micro-batches ─────────────────────────────────────────► sum, of no use
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.distributed_c10d import PrefixStore

from dcpc.errors import PlanError, chain
from dcpc.runtime.data.steps import MicroBatch
from dcpc.runtime.groups.groups import Groups

# Source: c10/core/impl/alloc_cpu.cpp of torch 2.13; older ones say "not enough memory".
_CPU_ALLOCATOR = re.compile(r"DefaultCPUAllocator: (can't allocate|not enough) memory")
_WANTED = re.compile(r"tried to allocate (\d+(?:\.\d+)?) (bytes|[KMG]iB)", re.IGNORECASE)
_UNITS = {"bytes": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}


@dataclass(frozen=True, slots=True)
class Shortage:
    """A rank that had too little memory for a micro-batch.

    Attributes:
        rank: number of the rank.
        number: number of the micro-batch in the step's plan.
        wanted_bytes: bytes of the allocation that failed; 0: unknown.
    """

    rank: int
    number: int
    wanted_bytes: int


class OutOfMemoryInStepError(Exception):
    """A step was given up on all ranks, with its gradients put back; the same on each.

    Attributes:
        shortages: shortages of all ranks, at least one.
    """

    def __init__(self, shortages: Sequence[Shortage]) -> None:
        """Takes down who had too little."""
        super().__init__(", ".join(map(str, shortages)))
        self.shortages = tuple(shortages)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error is that of an allocator which has no more, or comes of one."""
    return any(
        isinstance(e, torch.OutOfMemoryError | MemoryError)
        or (isinstance(e, RuntimeError) and _CPU_ALLOCATOR.search(str(e)) is not None)
        for e in chain(error)
    )


def wanted_bytes(error: BaseException) -> int:
    """Returns the bytes of the allocation that failed; 0 where no text says."""
    for e in chain(error):
        found = _WANTED.search(str(e))
        if found is not None:
            return int(float(found[1]) * _UNITS[found[2].lower()])
    return 0


class Attempt:
    """One rank's attempt at a step: the micro-batch that runs, and the end by lack of memory.

    Attributes:
        running: micro-batch that runs; None: none.
    """

    def __init__(self, groups: Groups, micro_batches: Sequence[MicroBatch]) -> None:
        """Begins an attempt; it has the same number on every rank, as all begin it.

        Args:
            groups: the process groups.
            micro_batches: micro-batches of this rank, in order.
        """
        self.running: MicroBatch | None = None
        self._groups = groups
        self._own = micro_batches
        self._key = f"{groups.number('attempt at a step')}"
        pg = groups.control(groups.world)
        self._store = None if pg is None else PrefixStore("dcpc/short", pg.get_group_store())

    def given_up(self, error: Exception, in_rounds: bool) -> Shortage | None:
        """Returns why this rank gives the step up; its number is -1 where another rank was first.

        None where the error is another one. Groups in which others would wait for this rank are
        broken on return.

        Args:
            error: error that the micro-batch raised.
            in_rounds: whether all ranks gather parameters together meanwhile.

        Raises:
            PlanError: it is out of memory, and the others cannot be told.
        """
        mb, found = self.running, None
        if mb is None:
            return None
        if is_out_of_memory(error):
            found = Shortage(self._groups.rank, mb.number, wanted_bytes(error))
        elif mb.sp > 1 and self._told():
            found = Shortage(self._groups.rank, -1, 0)
        if found is None:
            return None
        # Also those that are still to come: others of these groups would wait for this rank there.
        first = next(i for i, own in enumerate(self._own) if own is mb)
        later = [own.ranks for own in self._own[first:] if own.sp > 1]
        if in_rounds or (later and not self._groups.can_break):
            raise PlanError(_cannot_repeat(found, mb, in_rounds)) from error
        if later:
            self._tell()
            for ranks in dict.fromkeys(later):
                self._groups.break_apart(ranks)
        return found

    def forget(self) -> None:
        """Deletes the message of a given-up step; rank 0 does, once all are at the step's end."""
        if self._store is not None and self._groups.rank == 0 and self._told():
            self._store.delete_key(self._key)

    def _tell(self) -> None:
        assert self._store is not None, "a rank alone has no groups"
        self._store.set(self._key, "given up")

    def _told(self) -> bool:
        return self._store is not None and bool(self._store.check([self._key]))


def _cannot_repeat(found: Shortage, mb: MicroBatch, in_rounds: bool) -> str:
    among = "with parameters='rounds'" if in_rounds else "over this backend or in a part of a job"
    return (
        f"rank {found.rank} ran out of memory in a micro-batch of {mb.bucket} at sp {mb.sp}, "
        f"micro-batch {mb.micro_batch}; expected it to fit: {among} a step in which ranks wait for "
        "each other is not run again; lower memory= so that plans leave more room"
    )
