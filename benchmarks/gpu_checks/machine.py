"""The device that `benchmarks.gpu_checks` measures on: bytes and seconds of a run."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from dcpc.runtime.step.clock import Clock
from examples.allocator import measured_peak_bytes

SPARE = 0.95  # of a GPU's memory


@dataclass(frozen=True, slots=True)
class Peak:
    """How far memory rose above what lived before.

    Attributes:
        allocated_bytes: `torch.cuda.max_memory_allocated`: blocks as the caching allocator cuts
            them.
        requested_bytes: what was asked of it, before it rounds.
    """

    allocated_bytes: int
    requested_bytes: int


class Machine:
    """One device.

    Args:
        device: a GPU, or the CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def name(self) -> str:
        """What the device is."""
        return torch.cuda.get_device_name(self.device) if self._gpu else "CPU"

    @property
    def target(self) -> str:
        """What `dcpc.compile` takes as its device."""
        return "auto" if self._gpu else "cpu"

    @property
    def allocator(self) -> str:
        """Whose bytes a peak is of."""
        return "CUDA's allocator" if self._gpu else "the CPU's allocations"

    @property
    def _gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def memory_bytes(self) -> int:
        """What a plan may use of it; of the CPU's there is enough for tiny models."""
        if not self._gpu:
            return 1 << 40
        return int(SPARE * torch.cuda.get_device_properties(self.device).total_memory)

    def has_room(self, bytes_: int) -> bool:
        """Returns whether so much may be allocated beside what lives."""
        held = torch.cuda.memory_allocated(self.device) if self._gpu else 0
        return bytes_ + held < self.memory_bytes

    def clear(self) -> None:
        """Frees what nothing refers to, and gives cached memory back."""
        gc.collect()
        if self._gpu:
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()

    def peak(self, run: Callable[[], object]) -> Peak:
        """Returns how far a function's memory rises; it was called before (libraries' workspaces).

        What it returns, and the gradients it leaves, are freed by the caller.
        """
        if not self._gpu:
            found = measured_peak_bytes(run)
            return Peak(found, found)
        self.clear()
        torch.cuda.reset_peak_memory_stats(self.device)
        keys = ("allocated_bytes.all", "requested_bytes.all")
        before = torch.cuda.memory_stats(self.device)
        result = run()
        torch.cuda.synchronize(self.device)
        after = torch.cuda.memory_stats(self.device)
        del result
        return Peak(*(after[f"{key}.peak"] - before[f"{key}.current"] for key in keys))

    def medians_s(
        self,
        runs: Sequence[Callable[[], object]],
        rounds: int,
        before: Callable[[], object] = lambda: None,
    ) -> list[float]:
        """Returns the median seconds of each; they take turns, after one round that warms up.

        Args:
            runs: what to time.
            rounds: how often.
            before: called before each, untimed.
        """
        spent: list[list[float]] = [[] for _ in runs]
        for _ in range(rounds + 1):
            for mine, run in zip(spent, runs, strict=True):
                before()
                clock = Clock(self.device)
                clock.mark()
                run()
                clock.mark()
                mine.append(clock.spans_s()[0])
        return [median(mine[1:]) for mine in spent]
