"""An iterator that a thread runs some items ahead of the loop over it, and the seconds it saves."""

from __future__ import annotations

import atexit
import logging
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from dcpc.errors import DataError
from dcpc.runtime.data.cuts import PlannedBatch
from dcpc.runtime.data.steps import Step

T = TypeVar("T")
LOG = logging.getLogger("dcpc")

# How long the thread gets to finish the item that it is making.
_LEAVE_S = 30.0
# How often the loop that waits looks whether a step will come.
_LOOK_S = 1.0


class _End(Generic[T]):
    """The last item: why the iterator ended."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error

    def tell(self) -> None:
        """Raises the error, if that was the reason."""
        if self.error is not None:
            raise self.error


def ahead(
    items: Iterator[T],
    count: int,
    stop: Callable[[], None] | None = None,
    look: Callable[[], None] | None = None,
) -> Generator[T, None, None]:
    """Yields from an iterator that a thread keeps `count` items ahead; its errors are raised here.

    When the loop is left, or the process ends within it, the thread finishes the item that it is
    making and is waited for. A thread that still ran while Python ends would abort the process:
    torch's C++ takes the interpreter's lock again after each op, Python then ends the thread, and
    the frames of C++ do not let that pass ("terminate called without an active exception").

    Args:
        items: iterator to run in the thread.
        count: number of items, at least 1.
        stop: function called from here that ends waits of `items`, such as for a peer.
        look: function called while waiting; it raises the reason why nothing will come.

    Raises:
        DataError: the thread has ended without a word.
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

    # A daemon: one that never ends, as in a dataset that hangs, must not keep the process.
    thread = threading.Thread(target=work, name="dcpc-loader", daemon=True)

    def leave() -> None:
        left.set()
        room.release()
        if stop is not None:
            stop()
        _await(thread)

    thread.start()
    atexit.register(leave)  # now, so that it comes before what was registered for the groups
    try:
        while True:
            item = _next(ready, thread, look)
            if isinstance(item, _End):
                item.tell()
                return
            room.release()
            yield item
    finally:
        leave()
        if not thread.is_alive():
            atexit.unregister(leave)


def _next(
    ready: queue.Queue[T | _End[T]], thread: threading.Thread, look: Callable[[], None] | None
) -> T | _End[T]:
    """Returns the next item; looks at times whether it will ever come."""
    while True:
        lives = thread.is_alive()  # before: its last item is there once it has ended
        try:
            return ready.get(timeout=_LOOK_S)
        except queue.Empty:
            if look is not None:
                look()
            if not lives:
                raise DataError(
                    "loader: got the end of its thread, without a step or an error; expected the "
                    "next step; look for what ended the thread in the log, and start the job "
                    "again: it goes on from its last checkpoint"
                ) from None


def _await(thread: threading.Thread) -> None:
    """Waits until a thread that was told to end has ended, for a limited time."""
    if thread is threading.current_thread():  # garbage is collected in any thread
        return
    thread.join(_LEAVE_S)
    if thread.is_alive():
        LOG.warning(
            "loader: got a dataset that has not returned a sample %g s after the loop was left; "
            "expected it to: the process may abort when it ends; look at what the dataset waits "
            "for, or pass lookahead=0 (no thread)",
            _LEAVE_S,
        )


@dataclass(slots=True)
class LoaderStats:
    """Seconds that planning and loading add to the steps, over all iterations so far.

    Attributes:
        steps: number of steps yielded.
        plan_s: seconds of forming and planning them, on the rank that plans.
        waited_s: seconds the loop here waited for a step that was not ready, the first of each
            iteration left out: nothing runs before it.
        first_s: seconds it waited for these first steps.
        tokens: tokens of all ranks' samples.
        padding: tokens that all ranks' micro-batches had beside them.
        padded_to: "longest" or "bucket": target of the padding.
    """

    steps: int = 0
    plan_s: float = 0.0
    waited_s: float = 0.0
    first_s: float = 0.0
    tokens: int = 0
    padding: int = 0
    padded_to: str = "longest"

    @property
    def padding_share(self) -> float:
        """Padding's share of all tokens that were run, 0 to 1."""
        return self.padding / max(self.tokens + self.padding, 1)

    def timed(
        self, made: Iterator[tuple[PlannedBatch, Step | None]]
    ) -> Iterator[tuple[PlannedBatch, Step | None]]:
        """Yields the items, and counts them and the seconds it waits for them."""
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
