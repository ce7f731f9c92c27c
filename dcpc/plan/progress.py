"""A progress bar on what takes long: on a terminal only, and only where someone asked for it.

Libraries stay silent: `tracked` passes its items on until a command opens `shown`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

T = TypeVar("T")

PATIENCE_S = 2.0  # what is done sooner has no bar

_console: ContextVar[Console | None] = ContextVar("console", default=None)


@contextmanager
def shown(console: Console | None = None) -> Iterator[None]:
    """Shows a bar for each `tracked` within that takes more than 2 s.

    Args:
        console: default: stderr; nothing is shown where it is no terminal.
    """
    console = Console(stderr=True) if console is None else console
    token = _console.set(console if console.is_terminal else None)
    try:
        yield
    finally:
        _console.reset(token)


def tracked(
    items: Sequence[T], what: str, name: Callable[[T], object] = str, wait_s: float = PATIENCE_S
) -> Iterator[T]:
    """Yields the items, with a bar of how many are done and which one is worked on.

    Args:
        items: what is worked through.
        what: what is done with them, such as "plan".
        name: says what an item is.
        wait_s: the bar comes after so long.
    """
    console = _console.get()
    if console is None:
        yield from items
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    bar = Progress(*columns, TimeElapsedColumn(), console=console, transient=True)
    task = bar.add_task(what, total=len(items))
    timer = threading.Timer(wait_s, bar.start)
    timer.daemon = True
    timer.start()
    try:
        for item in items:
            bar.update(task, description=f"{what} {name(item)}")
            yield item
            bar.advance(task)
    finally:
        timer.cancel()
        timer.join()
        bar.stop()
