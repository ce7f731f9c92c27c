"""Python's cyclic garbage collector, held off while graphs are traced; and what it calls."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import _disable_current_modes

_FROZEN: list[bool] = []  # one entry once objects of others were seen frozen


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
        if not _others_froze():
            gc.freeze()
            gc.unfreeze()
        gc.enable()


@contextmanager
def outside_of_modes() -> Iterator[None]:
    """Runs its block as if no mode were on: for finalizers, which run in the midst of anything.

    A trace that is on its way would take the ops of a finalizer for the model's own.
    """
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


def _others_froze() -> bool:
    """True if another library froze objects, which must stay frozen: asked until it is once so.

    Python counts by a walk over all that is frozen: 40 ms where the server of forked ranks froze
    what it had imported.
    """
    if not _FROZEN:
        _FROZEN.extend([True] * bool(gc.get_freeze_count()))
    return bool(_FROZEN)
