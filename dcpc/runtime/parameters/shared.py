"""Mode "pull": parameters that exist once a host, in memory that all its ranks map.

Variants read them where they lie, so nothing is gathered and ranks run free of each other. Each
gradient is added to one sum for all ranks as soon as backward has made it, under a lock of its own,
and is freed: no rank ever has all gradients. At the end of a step each rank takes its rows.

The memory is a `memfd`: it has no name in any file system, and is gone with the last process.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dcpc.errors import DispatchError, GroupError
from dcpc.fx.garbage import outside_of_modes
from dcpc.runtime.groups.agreement import agree
from dcpc.runtime.groups.groups import Groups
from dcpc.runtime.parameters.hollow import is_hollow, memory_bytes
from dcpc.runtime.parameters.reduction import (
    COMM_BUCKET_BYTES,
    GivenUpError,
    Reduction,
    broken_sum,
    dense_gradient,
    trained,
    used_anywhere,
)
from dcpc.runtime.parameters.row_store import RowStore

_ALIGN = 64  # bytes: a cache line, and what kernels ask for


class SharedMemory:
    """Memory that all ranks map, filled with zeros; collective over all ranks.

    Args:
        size_bytes: size of the memory, at least 1, the same on every rank.
        groups: the process groups.

    Raises:
        GroupError: a rank cannot map it: it runs on another host, or in another container.
    """

    def __init__(self, size_bytes: int, groups: Groups) -> None:
        fd = -1
        if groups.rank == 0:
            fd = os.memfd_create("dcpc")
            os.ftruncate(fd, size_bytes)
        first = torch.tensor([os.getpid(), fd, *(_identity(fd) if fd >= 0 else (0, 0))])
        dist.broadcast(first, group=groups.control(groups.world), group_src=0)
        problem = ""
        if groups.rank > 0:
            pid, number, *identity = first.tolist()
            try:
                fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR)
                problem = "other memory" if [*_identity(fd)] != identity else ""
            except OSError as e:
                problem = str(e)
        wanted = "each rank on the host and in the container of rank 0; else take parameters='step'"
        agree(groups, groups.world, f"memory of all ranks, {size_bytes} bytes; {wanted}", problem)
        self._fd = fd
        self._map = mmap.mmap(fd, size_bytes)
        weakref.finalize(self, os.close, fd)

    def at(self, start: int, size_bytes: int) -> torch.UntypedStorage:
        """Returns some of the bytes, as memory of their own."""
        raw = torch.frombuffer(self._map, dtype=torch.uint8, count=size_bytes, offset=start)
        return raw.untyped_storage()

    @contextmanager
    def lock(self, number: int) -> Iterator[None]:
        """Keeps the other ranks out; the kernel lets go of the lock of a process that ends.

        Args:
            number: number of the lock, from 0.
        """
        fcntl.lockf(self._fd, fcntl.LOCK_EX, 1, number)
        try:
            yield
        finally:
            fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, number)


def _identity(fd: int) -> tuple[int, int]:
    facts = os.fstat(fd)
    return facts.st_dev, facts.st_ino


class SharedStore(RowStore):
    """Mode "pull": whole parameters that all ranks of a host map, each updating its rows.

    Args:
        parameters: parameters of the model, the same on every rank; tied ones count once.
        groups: the process groups, of more than one rank, all on the CPU of one host.

    Raises:
        GroupError: they are not on one host.
    """

    mode = "pull"

    def __init__(self, parameters: Iterable[nn.Parameter], groups: Groups, block: int = 0) -> None:
        if groups.device.type != "cpu":
            raise GroupError(
                f"parameters='pull': got ranks on {groups.device.type}; expected ranks on the CPU "
                "of one host, which can map the same memory; take parameters='step'"
            )
        super().__init__(parameters, groups, block)
        self.loaded()
        self._sums = {id(p): self._sum(p) for p in trained(self.whole)}
        self._numbers = {i: number for number, i in enumerate(self._sums)}
        self._unfinished = False

    def _allocate(self) -> None:
        """Moves parameters into the memory of all ranks; hollow ones only get their place there."""
        self._refuse_overlaps()
        groups = self.groups
        # A scalar, which every rank updates alike, stays each rank's own.
        moved = [p for p in self.whole if p.numel() and p.dim()]
        starts, end = {}, 0
        for p in moved:
            starts[id(p)], end = end, end + _padded(memory_bytes(p))
        self._sums_at: dict[int, int] = {}
        for p in trained(self.whole):
            self._sums_at[id(p)], end = end, end + _padded(p.numel() * p.dtype.itemsize)
        self._memory = SharedMemory(max(end, 1), groups)
        for number, p in enumerate(moved):
            storage = self._memory.at(starts[id(p)], memory_bytes(p))
            if number % groups.world == groups.rank and not is_hollow(p):
                storage.copy_(p.untyped_storage())
            at = p.storage_offset(), p.shape, p.stride()
            p.data = p.new_empty(0).detach().set_(storage, *at)
        super()._allocate()  # the scalars
        weakref.finalize(self, _own_again, moved).atexit = False

    def reduction(self, comm_bucket_bytes: int = COMM_BUCKET_BYTES) -> SharedSum:
        """Returns a step's sum of gradients, which sets `grad` of the optimizer's parameters."""
        self._unfinished = True
        return SharedSum(self)

    def add(self, p: nn.Parameter, gradient: Tensor) -> None:
        """Adds this rank's gradient of a whole parameter to the sum of all ranks."""
        with self._memory.lock(self._numbers[id(p)]), torch.no_grad():
            self._sums[id(p)].add_(gradient)

    def take(self, used: dict[int, int]) -> None:
        """Sets `grad` of the optimizer's parameters to their rows of the sum, and clears these.

        Args:
            used: id of a whole parameter -> whether any rank has a gradient of it.
        """
        params = trained(self.whole)
        for p in params:
            rows = self.rows(self._sums[id(p)])
            if used[id(p)]:
                self.give(p, rows.clone())
        if not all(p.dim() for p in params):  # all ranks read the sum of a scalar
            agree(self.groups, self.groups.world, "sums of gradients", "read")
        for p in params:
            self.rows(self._sums[id(p)]).zero_()
        self._unfinished = False

    def rows(self, whole: Tensor) -> Tensor:
        """Returns this rank's rows of a tensor; writing to them is no write to the whole one."""
        return super().rows(whole.data)

    def fill(self, p: nn.Parameter, value: Tensor) -> None:
        """Writes this rank's rows of a parameter; `loaded` ends a series of these."""
        with torch.no_grad():
            self.rows(p).copy_(self.rows(value))

    def loaded(self) -> None:
        """Waits until every rank has written its rows; collective over all ranks."""
        agree(self.groups, self.groups.world, "shared parameters", "written")
        self._versions = [p._version for p in self.whole]

    def follow(self, parameters: Iterable[nn.Parameter]) -> DispatchError | None:
        """Refuses writes to whole parameters; then as the store of mode "step"."""
        written = [p for p, v in zip(self.whole, self._versions, strict=True) if p._version != v]
        return _was_written(written) if written else super().follow(parameters)

    def _take_back(self, p: nn.Parameter, memory: Tensor) -> DispatchError | None:
        """Returns why other memory cannot be taken back: it has another value than the ranks'."""
        same = memory.data_ptr() == 0 or torch.equal(memory, p.data)
        return None if same else _was_written([p])

    def begin(self) -> None:
        """Clears the sum of a step that raised; collective over all ranks if there was one."""
        if self._unfinished:
            agree(self.groups, self.groups.world, "an unfinished sum of gradients", "cleared")
            for total in self._sums.values():
                self.rows(total).zero_()
            agree(self.groups, self.groups.world, "an unfinished sum of gradients", "is zero")
            self._unfinished = False

    def updating(self) -> None:
        """Waits until no rank reads parameters any more; collective over all ranks."""
        agree(self.groups, self.groups.world, "optimizer step", "begins")

    def updated(self, params: list[nn.Parameter]) -> None:
        """Waits until every rank has written its rows; collective over all ranks."""
        agree(self.groups, self.groups.world, "optimizer step", f"ends, {len(params)} parameters")

    def _sum(self, p: nn.Parameter) -> Tensor:
        if not p.numel():
            return torch.zeros_like(p)
        storage = self._memory.at(self._sums_at[id(p)], p.numel() * p.dtype.itemsize)
        return p.new_empty(0).detach().set_(storage).view(p.shape)


def _was_written(parameters: list[nn.Parameter]) -> DispatchError:
    return DispatchError(
        f"{len(parameters)} whole parameters were written to, one of shape "
        f"{tuple(parameters[0].shape)}; expected writes to compiled.parameters() alone: ranks map "
        "the same memory, so what each does to a whole parameter is done to it as many times; "
        "write to those, or load the values with compiled.load_state_dict"
    )


class SharedSum(Reduction):
    """The sum of gradients in the memory of all ranks.

    Args:
        store: store whose gradients are summed.

    Attributes:
        early_bytes: bytes that were added as soon as backward had made them.
    """

    takes_all = True

    def __init__(self, store: SharedStore) -> None:
        super().__init__([], store.groups)
        self._store = store
        self._params = trained(store.whole)
        self._used = dict.fromkeys(map(id, self._params), False)
        self._added_bytes = 0

    @property
    def total_bytes(self) -> int:
        """Bytes that this rank has added."""
        return self._added_bytes

    def deliver(self, p: nn.Parameter, gradient: Tensor | None) -> None:
        """Adds the gradient that a backward makes for a parameter; None: it found none."""
        if gradient is None:
            return
        self._add(p, gradient)
        self.early_bytes += p.numel() * p.dtype.itemsize

    def collect(self) -> None:
        """Adds the gradients that a backward has left in `grad`, and empties it."""
        for p in self._params:
            if p.grad is not None:
                gradient, p.grad = p.grad, None
                self._add(p, dense_gradient(gradient))

    def give_up(self) -> None:
        """Adds nothing more; the sum so far is cleared before the next step."""
        self.given_up = True
        for p in self._params:
            p.grad = None

    def send(self) -> None:
        """Adds the gradients that are left: backward has ended."""
        self.collect()

    def finish(self) -> None:
        """Waits for all ranks, and sets `grad` of the optimizer's parameters to their rows.

        Raises:
            GroupError: a rank did not live.
            GivenUpError: on all ranks, if one gave up.
        """
        self.collect()
        try:
            used = used_anywhere(self._used, self.groups, self.given_up)
        except RuntimeError as e:
            raise broken_sum(self.groups, e) from e
        if used is None:
            raise GivenUpError
        with torch.no_grad():
            self._store.take(used)

    def _add(self, p: nn.Parameter, gradient: Tensor) -> None:
        self._store.add(p, gradient)
        self._used[id(p)] = True
        self._added_bytes += p.numel() * p.dtype.itemsize


def _own_again(params: list[nn.Parameter]) -> None:
    """Gives parameters that nobody shares out any more memory of this rank."""
    with outside_of_modes():
        for p in params:
            p.data = p.data.clone()


def _padded(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGN) * _ALIGN
