"""A function in a process of its own: examples launch ranks and change the process they run in."""

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def fresh(main: Callable[[Sequence[str]], T], *arguments: str) -> T:
    """Returns `main(arguments)` of a process that has done nothing else."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(main, arguments).result()
