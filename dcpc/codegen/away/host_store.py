"""Memory beyond the device's, the host's, then a file's: saved values, parameters, their states.

    store.take(bytes) -> HeldSlot: slot.write(flat) ─► wait()   ...   slot.read(flat) ─► wait()

On a GPU the host's memory is pinned, and copies run on streams of their own. On a CPU it is memory
that processes could share, which is not counted as the process's data. A file has no name in its
folder; one thread writes and reads. Slots are used again for values that need about as much.
"""

from __future__ import annotations

import math
import mmap
import os
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from dcpc.errors import StoreError

PAGE_BYTES = 4096
LOOK_S = 1.0  # between looks whether a thread that is waited for still runs
LOOSE = 1.25  # a free slot is taken for a value up to this much smaller: plans fill so much less


class SlotCopy(Protocol):
    """A copy that may still run."""

    def wait(self) -> None:
        """Returns once later calls may use the result; raises the error of a copy that failed."""


class Slot(Protocol):
    """Memory of a place for one value."""

    size_bytes: int

    def write(self, value: Tensor) -> SlotCopy:
        """Starts to copy a flat tensor of bytes to the slot."""

    def read(self, value: Tensor) -> SlotCopy:
        """Starts to fill a flat tensor of bytes from the slot."""

    def memory(self) -> Tensor:
        """Returns the slot's bytes, as memory that ops read and write."""

    def close(self) -> None:
        """Gives the memory back."""


class Done:
    """A copy that has ended."""

    def wait(self) -> None:
        """Returns at once."""


class _OnStream:
    """A copy on a stream of its own, for which the device's work waits, not the process."""

    def __init__(self, event: Any) -> None:
        self._event = event

    def wait(self) -> None:
        self._event.wait(torch.cuda.current_stream())


class HostSlot:
    """Host memory of one value: pinned beside a GPU, else a shared mapping."""

    def __init__(self, size_bytes: int, pinned: bool) -> None:
        self.size_bytes = size_bytes
        self._last: Any = None  # event of the last copy: the next one may be on the other stream
        if pinned:
            self._held = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
        else:
            self._held = torch.frombuffer(mmap.mmap(-1, size_bytes), dtype=torch.uint8)

    def write(self, value: Tensor) -> SlotCopy:
        """Starts to copy a flat tensor of bytes to the slot."""
        return self._copied(self._held[: value.numel()], value, value.device, 0)

    def read(self, value: Tensor) -> SlotCopy:
        """Starts to fill a flat tensor of bytes from the slot."""
        found = self._copied(value, self._held[: value.numel()], value.device, 1)
        if value.is_cuda:  # a step that fails may free it while it is filled
            value.record_stream(_streams(value.device)[1])
        return found

    def memory(self) -> Tensor:
        """Returns the slot's bytes, as memory that ops read and write."""
        return self._held

    def close(self) -> None:
        """Gives the memory back."""
        self._held = torch.empty(0, dtype=torch.uint8)

    def _copied(self, into: Tensor, value: Tensor, device: torch.device, way: int) -> SlotCopy:
        if device.type != "cuda":
            into.copy_(value)
            return Done()
        stream = _streams(device)[way]
        stream.wait_stream(torch.cuda.current_stream(device))
        if self._last is not None:
            stream.wait_event(self._last)
        with torch.cuda.stream(stream):
            into.copy_(value, non_blocking=True)
        self._last = stream.record_event()
        return _OnStream(self._last)


_STREAMS: dict[torch.device, tuple[torch.cuda.Stream, torch.cuda.Stream]] = {}


def _streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """Returns a device's streams of copies to the host, and of copies from it."""
    if device not in _STREAMS:
        _STREAMS[device] = torch.cuda.Stream(device), torch.cuda.Stream(device)
    return _STREAMS[device]


class StoreThread:
    """The thread that writes and reads the files of a store; another one takes a dead one's place.

    Args:
        folder: folder of the files, for errors.
    """

    def __init__(self, folder: str) -> None:
        self._folder, self._threads = folder, list[threading.Thread]()
        self._pool = self._new()

    def submit(
        self, then: Callable[[], object], job: Callable[..., None], *args: Any
    ) -> QueuedCopy:
        """Queues a job; the waiting thread calls `then` after it."""
        if not _live(self._threads):
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = self._new()
        return QueuedCopy(self._pool.submit(job, *args), self._folder, self._threads, then)

    def _new(self) -> ThreadPoolExecutor:
        self._threads = threads = list[threading.Thread]()
        return ThreadPoolExecutor(
            1, "dcpc store", initializer=lambda: threads.append(threading.current_thread())
        )


def _live(threads: Sequence[threading.Thread]) -> bool:
    """Whether the thread runs, or has had no job yet."""
    return all(thread.is_alive() for thread in threads)


@dataclass(slots=True)
class QueuedCopy:
    """A copy by a thread.

    Attributes:
        future: what the thread does.
        folder: folder of the files, for errors.
        threads: thread that does it, once it has begun.
        then: what is done after it, in the waiting thread.
    """

    future: Future[None]
    folder: str
    threads: Sequence[threading.Thread]
    then: Callable[[], object]

    def wait(self) -> None:
        """Waits for the thread.

        Raises:
            StoreError: a file could not be written or read, or the thread has died.
        """
        while not self.future.done():  # `wait` alone never sees a cancelled one as done
            wait([self.future], LOOK_S)
            if not _live(self.threads):
                self.future.cancel()
        if self.future.cancelled():
            raise StoreError(
                f"disk={self.folder!r}: got the end of the thread that writes and reads its "
                "files; expected it to go on; run the step again, which starts another, and "
                "look at stderr for what ended it"
            )
        self.future.result()
        self.then()


class FileSlot:
    """A file of one value, without a name in its folder."""

    def __init__(self, folder: str, size_bytes: int, thread: StoreThread) -> None:
        self.size_bytes, self._folder, self._thread = size_bytes, folder, thread
        with _file_errors(folder, "reserve", size_bytes):
            self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
            os.posix_fallocate(self._file.fileno(), 0, size_bytes)

    def write(self, value: Tensor) -> SlotCopy:
        """Starts to copy a flat tensor of bytes to the slot."""
        return self._thread.submit(lambda: None, self._each, "write", os.pwrite, value.cpu())

    def read(self, value: Tensor) -> SlotCopy:
        """Starts to fill a flat tensor of bytes from the slot."""
        into = value if value.device.type == "cpu" else torch.empty_like(value, device="cpu")
        then = (lambda: None) if into is value else (lambda: value.copy_(into))
        return self._thread.submit(then, self._each, "read", self._fill, into)

    def memory(self) -> Tensor:
        """Returns the slot's bytes, mapped: the system reads and writes the file when it must."""
        return torch.frombuffer(mmap.mmap(self._file.fileno(), self.size_bytes), dtype=torch.uint8)

    def close(self) -> None:
        """Gives the memory back."""
        self._file.close()

    def _fill(self, descriptor: int, into: Any, start: int) -> int:
        return os.preadv(descriptor, [into], start)

    def _each(self, what: str, move: Callable[[int, Any, int], int], value: Tensor) -> None:
        left, start = memoryview(value.numpy()), 0  # type: ignore[arg-type]
        with _file_errors(self._folder, what, len(left)):
            while left:
                moved = move(self._file.fileno(), left, start)
                if moved == 0:
                    raise OSError("the file ends early")
                left, start = left[moved:], start + moved


@contextmanager
def _file_errors(folder: str, what: str, size_bytes: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"disk={folder!r}: got {error.strerror or error} as a file of {size_bytes / 1e6:.3g} "
            f"MB was to {what}; expected a folder with room for what disk= says; free some, or "
            "lower disk="
        ) from error


@dataclass(slots=True)
class SlotPool:
    """Slots of one kind, used again.

    Attributes:
        make: function from bytes to a new slot.
        most_bytes: most bytes of all slots.
    """

    make: Callable[[int], Slot]
    most_bytes: int
    taken_bytes: int = 0
    _free: list[Slot] = field(default_factory=list)
    # All slots: one that Python's collector found with what uses it would have been closed by it.
    _every: list[Slot] = field(default_factory=list)

    def take(self, size_bytes: int) -> Slot | None:
        """Returns a slot for so many bytes; None: there is no room."""
        fitting = [s for s in self._free if size_bytes <= s.size_bytes <= LOOSE * size_bytes]
        if fitting:
            found = min(fitting, key=lambda s: s.size_bytes)
            self._free.remove(found)
            return found
        whole = -(-size_bytes // PAGE_BYTES) * PAGE_BYTES
        while self._free and self.taken_bytes + whole > self.most_bytes:
            unused = self._free.pop(0)
            self._every.remove(unused)
            self.taken_bytes -= unused.size_bytes
            unused.close()
        if self.taken_bytes + whole > self.most_bytes:
            return None
        found = self.make(whole)
        self._every.append(found)
        self.taken_bytes += whole
        return found

    def give(self, slot: Slot) -> None:
        """Takes a slot back."""
        self._free.append(slot)


class Store:
    """The places of one rank, in the order in which they are filled."""

    def __init__(self, places: Sequence[SlotPool]) -> None:
        self.places = tuple(places)
        self._lock = threading.RLock()  # the collector may give a slot back while one is taken
        self.moved_bytes = 0  # of all values that left
        self._addresses = set[int]()  # of the memory of tensors that lie here

    def take(self, size_bytes: int) -> HeldSlot:
        """Returns memory for a value in the first place that has room.

        Raises:
            StoreError: no place has.
        """
        with self._lock:
            for place in self.places:
                slot = place.take(size_bytes)
                if slot is not None:
                    self.moved_bytes += size_bytes
                    return HeldSlot(self, place, slot)
            held = sum(p.taken_bytes for p in self.places)
            most = sum(p.most_bytes for p in self.places)
        raise StoreError(
            f"host=, disk=: got {size_bytes / 1e6:.3g} MB to keep beside {held / 1e6:.3g} MB; "
            f"expected at most {most / 1e6:.3g} MB on a rank, as its plan has; do not keep losses "
            "of earlier calls whose backward has not run, or raise host="
        )

    def give(self, pool: SlotPool, slot: Slot) -> None:
        """Takes a slot back."""
        with self._lock:
            pool.give(slot)

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Returns a tensor of any content that lies here, as long as it or a view of it lives.

        Raises:
            StoreError: no place has room.
        """
        size_bytes = math.prod(shape) * dtype.itemsize
        if not size_bytes:
            return torch.empty(tuple(shape), dtype=dtype)
        held = self.take(size_bytes)
        memory = held.slot.memory()[:size_bytes].numpy().view(_SlotBytes)
        memory.held = held
        self._addresses.add(memory.ctypes.data)
        weakref.finalize(memory, self._addresses.discard, memory.ctypes.data)
        return torch.from_numpy(memory).view(dtype).view(tuple(shape))

    def has(self, tensor: Tensor) -> bool:
        """Whether a tensor's memory is one that `tensor` made."""
        return tensor.untyped_storage().data_ptr() in self._addresses


class _SlotBytes(np.ndarray[Any, Any]):
    """Bytes of a slot, which goes back with the last tensor of them."""

    held: HeldSlot


class HeldSlot:
    """A slot in use, which goes back to its store when nothing refers to it.

    Attributes:
        slot: memory of the value.
        last: the last copy to it or from it.
    """

    def __init__(self, store: Store, pool: SlotPool, slot: Slot) -> None:
        self._store, self._pool, self.slot = store, pool, slot
        self.last: SlotCopy = Done()

    def __del__(self) -> None:
        job = getattr(self.last, "future", None)
        store, pool, slot = self._store, self._pool, self.slot
        if job is None:
            store.give(pool, slot)
        else:  # after an error it may still run: nothing may use the slot before
            job.add_done_callback(lambda _: store.give(pool, slot))


_OPEN: dict[str, Store] = {}


def text_of(host_bytes: int, folder: str, disk_bytes: int) -> str:
    """Returns the name of a rank's store, from which `store_of` makes it."""
    return f"{host_bytes}:{disk_bytes}:{folder}"


def store_of(text: str) -> Store:
    """Returns the store of a name, made when it is first asked for."""
    if text not in _OPEN:
        host, disk, folder = text.split(":", 2)
        pinned = torch.cuda.is_available()
        pools = [SlotPool(lambda size: HostSlot(size, pinned), int(host))]
        if int(disk):
            thread = StoreThread(folder)
            pools.append(SlotPool(lambda size: FileSlot(folder, size, thread), int(disk)))
        _OPEN[text] = Store(pools)
    return _OPEN[text]


def open_as(text: str, store: Store) -> None:
    """Takes a store under a name, in pool of the one that the name would make."""
    _OPEN[text] = store
