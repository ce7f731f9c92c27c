"""An iterator that a thread keeps some items ahead of the loop over it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class _End(Generic[T]):
    """The last item: why the iterator ended."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


def ahead(items: Iterator[T], count: int) -> Iterator[T]:
    """Yields from an iterator that a thread keeps `count` items ahead; its errors are raised here.

    The thread does not outlive the process: one that waits for a dead peer must not keep it.

    Args:
        items: run in the thread.
        count: at least 1.
    """
    ready: queue.Queue[T | _End[T]] = queue.Queue()
    room = threading.Semaphore(count)
    left = threading.Event()

    def work() -> None:
        error = None
        try:
            while room.acquire() and not left.is_set():
                try:
                    item = next(items)
                except StopIteration:
                    break
                ready.put(item)
        except BaseException as e:
            error = e
        ready.put(_End(error))

    threading.Thread(target=work, name="dcpc-loader", daemon=True).start()
    try:
        while True:
            item = ready.get()
            if isinstance(item, _End):
                if item.error is not None:
                    raise item.error
                return
            room.release()
            yield item
    finally:
        left.set()
        room.release()
