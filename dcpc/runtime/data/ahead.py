"""An iterator that a thread keeps some items ahead of the loop over it, and what that hides."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from dcpc.runtime.data.cuts import PlannedBatch
from dcpc.runtime.data.steps import Step

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


@dataclass(slots=True)
class LoaderStats:
    """How well planning and loading hide behind the steps, over all iterations so far.

    Attributes:
        steps: yielded.
        plan_s: seconds of forming and planning them, on the rank that did.
        waited_s: seconds the loop here waited for a step that was not ready, the first of each
            iteration left out: nothing runs before it.
        first_s: seconds it waited for these first steps.
        tokens: of all ranks' samples.
        padding: tokens that all ranks' micro-batches had beside them.
    """

    steps: int = 0
    plan_s: float = 0.0
    waited_s: float = 0.0
    first_s: float = 0.0
    tokens: int = 0
    padding: int = 0

    def timed(
        self, made: Iterator[tuple[PlannedBatch, Step | None]]
    ) -> Iterator[tuple[PlannedBatch, Step | None]]:
        """Yields what it is given, and counts it and the seconds it waits."""
        first = True
        while True:
            begin_s = time.perf_counter()
            found = next(made, None)
            waited_s = time.perf_counter() - begin_s
            if first:
                self.first_s += waited_s
            else:
                self.waited_s += waited_s
            if found is None:
                return
            first = False
            self.plan_s += found[0].plan_s
            self.steps += found[1] is not None
            if found[1] is not None:
                self.tokens += found[0].tokens
                self.padding += found[0].padding
            yield found
