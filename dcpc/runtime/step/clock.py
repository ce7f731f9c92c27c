"""Measures the seconds of a device's work, without waiting for it in between.

On the CPU a mark is the time of day. On a GPU it is an event in the stream that computes: the host
runs ahead of it, so its own clock would say when work was asked for, not when it was done. Other
streams (the sum of gradients) are not waited for.
"""

from __future__ import annotations

import time
from typing import Any

import torch


class Clock:
    """Marks moments of a device, and says afterwards how many seconds lay between them.

    Args:
        device: device that computes.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._marks: list[Any] = []

    def mark(self) -> None:
        """Marks the moment at which all work asked for so far is done."""
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self.device))
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def spans_s(self) -> tuple[float, ...]:
        """Returns the seconds between each mark and the next; waits for the last one once."""
        if self.device.type == "cuda" and self._marks:
            self._marks[-1].synchronize()
        pairs = zip(self._marks, self._marks[1:], strict=False)
        if self.device.type == "cuda":
            return tuple(a.elapsed_time(b) / 1e3 for a, b in pairs)
        return tuple(b - a for a, b in pairs)
