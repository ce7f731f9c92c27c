"""Bytes that really get allocated, by torch.profiler's allocator events."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch.profiler import ProfilerActivity, profile

# Kineto writes two lines to stderr for every profile below its level 6.
os.environ.setdefault("KINETO_LOG_LEVEL", "6")


Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Allocated(Generic[Result]):
    """A run and its bytes.

    Attributes:
        result: what it returned.
        peak_bytes: how far live memory rose.
        live_bytes: how much more lived when it ended, the result among it.
    """

    result: Result
    peak_bytes: int
    live_bytes: int


def allocated(run: Callable[[], Result]) -> Allocated[Result]:
    """Returns how live memory on the CPU rose above what lived before `run()`.

    Each event of the allocator is +bytes or -bytes; the peak is the highest sum over time. The
    profiler lists events thread by thread, and gloo's threads free what they sent: sorted by time.
    What was live before counts nothing, unless `run` frees it.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        result = run()
    live = peak = 0
    events = [e for e in prof.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return Allocated(result, peak, live)


def measured_peak_bytes(run: Callable[[], object]) -> int:
    """Returns how far live memory on the CPU rose above what lived before `run()`."""
    return allocated(run).peak_bytes
