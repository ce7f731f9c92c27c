"""Holds Python's cyclic garbage collector off while graphs are traced, and guards finalizers."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import _disable_current_modes

_FROZEN: list[bool] = []  # one entry once objects of others were seen frozen


@contextmanager
def without_collection() -> Iterator[None]:
    """Disables the cyclic garbage collector within its block, if it is on; it can be nested.

    Tracing makes many objects that live as long as the graph, and torch, sympy and the user's
    libraries hold a million: the collector scans them again and again, for a tenth of the time, and
    finds little. Afterwards all new objects count as old, which needs no scan: garbage among them
    is collected by the next full collection.
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
    """Runs its block without any active mode, for finalizers, which may run at any moment.

    A trace in progress would otherwise record the ops of a finalizer as the model's own.
    """
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


def _others_froze() -> bool:
    """Returns whether another library froze objects, which must stay frozen; a yes is cached.

    Python counts frozen objects by a walk over them: 40 ms if the server of forked ranks froze its
    imports.
    """
    if not _FROZEN:
        _FROZEN.extend([True] * bool(gc.get_freeze_count()))
    return bool(_FROZEN)
