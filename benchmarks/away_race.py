"""A decoder whose values leave to a slow tier, raced against others in its memory, by the clock.

    unlimited    all values stay
    away         as many leave as must, nothing is recomputed
    recompute    the same memory without the tier
    offload      the plain model, whose every saved tensor goes to a file (saved-tensor hooks)

The tier copies to the host's memory, and a thread then sleeps as long as the bytes would take; the
file of the hooks has the same rate. Turns are interleaved; figures are ratios of medians.
"""

from __future__ import annotations

import gc
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness import Cell
from benchmarks.one_length import Subject
from dcpc.codegen.away.host_store import HostSlot, SlotPool, Store, open_as

RATE = 0.3e9  # bytes a second
SHARE = 0.6  # memory, of the peak in which all values stay


class Slept:
    """A copy that ends with the sleep of a thread, and what then follows."""

    def __init__(self, future: Future[None], then: Callable[[], object] = lambda: None) -> None:
        self._future, self._then = future, then

    def wait(self) -> None:
        """Waits for it."""
        self._future.result()
        self._then()


class SlowSlot(HostSlot):
    """A slot of the slow tier."""

    def __init__(self, size_bytes: int, thread: ThreadPoolExecutor) -> None:
        super().__init__(size_bytes, pinned=False)
        self._thread = thread

    def write(self, value: Tensor) -> Slept:
        """Copies, then sleeps."""
        super().write(value)
        return Slept(self._thread.submit(time.sleep, value.numel() / RATE))

    def read(self, value: Tensor) -> Slept:
        """Sleeps, then copies."""
        job = self._thread.submit(time.sleep, value.numel() / RATE)
        fill = super().read
        return Slept(job, lambda: fill(value))


def offloaded(model: nn.Module, given: dict[str, Tensor], folder: str) -> None:
    """Runs forward and backward with every saved tensor but parameters in a file meanwhile."""
    own = {p.data_ptr() for p in model.parameters()}
    with ThreadPoolExecutor(1) as thread, tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        end = 0

        def write(value: Tensor, start: int) -> None:
            os.pwrite(file.fileno(), memoryview(value.flatten().view(torch.uint8).numpy()), start)  # type: ignore[arg-type]
            time.sleep(value.nbytes / RATE)

        def pack(value: Tensor) -> Any:
            nonlocal end
            if value.data_ptr() in own or not value.numel():
                return value
            value, start = value.detach().contiguous(), end
            end += value.nbytes
            return thread.submit(write, value, start), start, value.shape, value.dtype

        def unpack(packed: Any) -> Tensor:
            if isinstance(packed, Tensor):
                return packed
            job, start, shape, dtype = packed
            job.result()
            found = torch.empty(shape, dtype=dtype)
            flat: Any = found.flatten().view(torch.uint8).numpy()
            os.preadv(file.fileno(), [flat], start)
            thread.submit(time.sleep, found.nbytes / RATE).result()
            return found

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            loss = model(**given)
        loss.backward()


def race(turns: int, subject: Callable[..., Subject]) -> dict[str, Cell]:
    """Returns seconds over those of others; `subject` compiles with options."""
    free = subject(recompute="none")
    request, row = free.compiled.planned.request, free.row
    memory = request.resident_bytes + SHARE * row.peak_bytes
    ours = subject(recompute="none", memory=memory, host="4GB")
    (away,) = {v.traced.away.store for v in ours.compiled.planned.traces}
    thread = ThreadPoolExecutor(1)
    open_as(away, Store([SlotPool(lambda size: SlowSlot(size, thread), int(4e9))]))
    again = subject(memory=memory)
    plain, given = free.model, free.given
    with tempfile.TemporaryDirectory() as folder:
        runs: dict[str, Callable[[], object]] = {
            "unlimited": free.run, "away": ours.run, "recompute": again.run,
            "offload": lambda: offloaded(plain, given, folder),
        }  # fmt: skip
        taken: dict[str, list[float]] = {name: [] for name in runs}
        for turn in range(turns + 1):
            for name, run in runs.items():
                gc.collect()
                start_s = time.perf_counter()
                run()
                if turn:
                    taken[name].append(time.perf_counter() - start_s)
    own_s = median(taken["away"])
    return {
        "step_over_unlimited": own_s / median(taken["unlimited"]),
        "tokens_over_recompute_alone": median(taken["recompute"]) / own_s,
        "tokens_over_offload_all": median(taken["offload"]) / own_s,
        "race_away_mb": ours.row.away_bytes / 1e6,
        "race_unlimited_s": median(taken["unlimited"]),
    }
