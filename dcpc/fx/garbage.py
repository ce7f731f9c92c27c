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
    in all, and finds little. All that was made counts as old afterwards, which takes no look at it:
    what is garbage of it is collected with the next full collection.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if not gc.get_freeze_count():  # what others froze stays frozen
            gc.freeze()
            gc.unfreeze()
        gc.enable()
