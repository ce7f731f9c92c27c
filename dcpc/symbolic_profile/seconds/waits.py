"""Seconds that a run waits for values on their way to the host or the disk, and back.

    calls    ── 3 ms ── leave(a) ── 2 ms ── leave(b) ─ 1 ms ─ gone(a) ...
    the link              ├───── a, 4 ms ─────┤├──── b ...     gone(a) waits 1 ms

One copy runs at a time each way; from and to a disk one in all. Where the processor itself copies,
nothing is hidden of what it takes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dcpc.symbolic_profile.seconds.hardware import Device

START, END = "start", "end"
Events = Sequence[tuple[float, str, float]]  # seconds of calls before it, START or END, bytes


@dataclass(frozen=True, slots=True)
class Away:
    """Where values of one rank may go, in the order in which it is filled.

    Attributes:
        store: name of the rank's store.
        host_bytes: most bytes in the host's memory.
        disk_bytes: most bytes on the disk.
        disk_bytes_per_s: bytes that the disk writes or reads in a second.
    """

    store: str
    host_bytes: int
    disk_bytes: int
    disk_bytes_per_s: float

    @property
    def most_bytes(self) -> int:
        """Most bytes that may be away."""
        return self.host_bytes + self.disk_bytes

    def waits(self, forward: Events, backward: Events, device: Device) -> tuple[float, float]:
        """Returns the seconds that forward and backward wait or copy beside their calls."""
        away_bytes = sum(size for _, kind, size in forward if kind == START)
        out_s, left_s = self._queue(forward, self.host_bytes, device, host_first=True)
        # What left last is on the disk, and comes back first; a disk ends its writes before.
        behind_s = left_s if away_bytes > self.host_bytes else 0.0
        on_disk = max(0.0, away_bytes - self.host_bytes)
        back_s, _ = self._queue(backward, on_disk, device, host_first=False, behind_s=behind_s)
        return out_s, back_s

    def _queue(
        self,
        events: Iterable[tuple[float, str, float]],
        first_bytes: float,
        device: Device,
        *,
        host_first: bool,
        behind_s: float = 0.0,
    ) -> tuple[float, float]:
        """Returns the seconds waited, and those that the link is still busy at the end."""
        now = waited = moved = 0.0
        free_at, ends = behind_s, deque[float]()
        for before_s, kind, size in events:
            now += before_s
            if kind == END:
                end = ends.popleft() if ends else now
                waited, now = waited + max(0.0, end - now), max(now, end)
                continue
            in_host = (moved < first_bytes) is host_first
            moved += size
            if not device.overlaps:
                copied_s = size / device.host_bytes_per_s
                now, waited = now + copied_s, waited + copied_s
            if in_host and not device.overlaps:
                ends.append(now)
                continue
            rate = device.host_bytes_per_s if in_host else self.disk_bytes_per_s
            free_at = max(free_at, now) + size / rate
            ends.append(free_at)
        return waited, max(0.0, free_at - now)
