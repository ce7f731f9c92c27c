"""Finds ended processes of ranks on this host: the kernel tells at once.

A process is known by a handle (pidfd) that becomes readable when it ends, however it ends, also
while nobody has collected its exit code. A number alone may be that of another process by then.
Ranks in another container or on another host, and systems without such handles, have heartbeats.
"""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def place_of_process() -> dict[str, Any]:
    """Returns where this process is: its number, and the kernel and namespace that gave it."""
    place = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        place = f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    return {"pid": os.getpid(), "place": place}


class Processes:
    """The processes of other ranks on this host."""

    def __init__(self, places: Mapping[int, Mapping[str, Any]]) -> None:
        """Opens a handle of each; the processes live."""
        own = place_of_process()
        self._handles: dict[int, int] = {}  # handle -> rank
        self._ended: set[int] = set()
        self._poll = select.poll()
        self._wake, self._woken = os.pipe()
        self._poll.register(self._wake, select.POLLIN)
        if not own["place"] or not hasattr(os, "pidfd_open"):
            return
        for rank, place in places.items():
            if place["place"] == own["place"] and place["pid"] != own["pid"]:
                try:
                    handle = os.pidfd_open(place["pid"])
                except ProcessLookupError:
                    self._ended.add(rank)
                except OSError:  # not permitted here: heartbeats tell, later
                    continue
                else:
                    self._handles[handle] = rank
                    self._poll.register(handle, select.POLLIN)

    def ended(self, wait_s: float) -> set[int]:
        """Returns the ranks whose process has ended."""
        for handle, _ in self._poll.poll(1000 * wait_s):
            if handle == self._wake:
                os.read(self._wake, 4096)
            elif handle in self._handles:
                self._poll.unregister(handle)
                os.close(handle)
                self._ended.add(self._handles.pop(handle))
        return set(self._ended)

    def wake(self) -> None:
        """Ends a wait of another thread."""
        os.write(self._woken, b"x")

    def close(self) -> None:
        """Gives the handles back."""
        for handle in (*self._handles, self._wake, self._woken):
            os.close(handle)
        self._handles.clear()
