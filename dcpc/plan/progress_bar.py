"""Shows a progress bar for slow work: only on a terminal, and only where a command asked for it.

Libraries stay silent: `tracked` and `during` do nothing until a command opens `shown`. One bar is
shown at a time: within another one both do nothing either.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

T = TypeVar("T")

PATIENCE_S = 2.0  # what is done sooner has no bar


@dataclass(slots=True)
class _Screen:
    """Console for bars, and whether a bar is on it."""

    console: Console
    taken: bool = False


_screen: ContextVar[_Screen | None] = ContextVar("screen", default=None)


@contextmanager
def shown(console: Console | None = None) -> Iterator[None]:
    """Shows a bar for each `tracked` and `during` inside the block that takes more than 2 s.

    Args:
        console: console of the bar; default: stderr. Nothing is shown where it is no terminal, nor
            on torchrun's ranks other than 0.
    """
    console = Console(stderr=True) if console is None else console
    visible = console.is_terminal and os.environ.get("RANK", "0") == "0"
    token = _screen.set(_Screen(console) if visible else None)
    try:
        yield
    finally:
        _screen.reset(token)


def tracked(
    items: Sequence[T], what: str, name: Callable[[T], object] = str, wait_s: float = PATIENCE_S
) -> Iterator[T]:
    """Yields the items and shows a bar: how many are done, and which one is in progress."""
    several = (BarColumn(), MofNCompleteColumn())
    columns = several if len(items) > 1 else (SpinnerColumn(),)  # of one it knows no share
    with _bar(columns, what, len(items), wait_s) as bar:
        for item in items:
            if bar is not None:
                bar.update(bar.task_ids[0], description=f"{what} {name(item)}")
            yield item
            if bar is not None:
                bar.advance(bar.task_ids[0])


@contextmanager
def during(what: str, wait_s: float = PATIENCE_S) -> Iterator[None]:
    """Shows a spinner with the elapsed time for work whose progress is unknown."""
    with _bar((SpinnerColumn(),), what, 1, wait_s):
        yield


@contextmanager
def _bar(
    columns: Sequence[ProgressColumn], what: str, total: int, wait_s: float
) -> Iterator[Progress | None]:
    """Shows a bar of one task, and yields it; yields None where nothing is shown."""
    screen = _screen.get()
    if screen is None or screen.taken:
        yield None
        return
    text = TextColumn("{task.description}", markup=False)  # a bucket's name may have brackets
    bar = Progress(text, *columns, TimeElapsedColumn(), console=screen.console, transient=True)
    bar.add_task(what, total=total)
    timer = threading.Timer(wait_s, bar.start)
    timer.daemon = True
    screen.taken = True
    timer.start()
    try:
        yield bar
    finally:
        timer.cancel()
        timer.join()
        bar.stop()
        screen.taken = False
