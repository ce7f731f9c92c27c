"""Python's cyclic garbage collector, held off while graphs are traced."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collection() -> Iterator[None]:
    """Runs its block without the cyclic garbage collector, if that is on; nests.

    Tracing makes many objects that live as long as the graph, and torch, sympy and the user's own
    libraries hold a million: the collector looks through them again and again, a tenth of the time
    in all, and finds little. What is garbage by then is collected after the block as usual.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
