"""Collectives, and the failure of one, under the names of the installed torch."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

# One function under two names: releases with the first one warn where the second is called.
GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"


def all_gather_single(
    into: Tensor, own: Tensor, *, group: dist.ProcessGroup | None, async_op: bool = False
) -> dist.Work | None:
    """Starts an all-gather; returns its work handle, or None if it is done.

    Args:
        into: memory of ranks * n elements for all ranks' parts in order; written to.
        own: part of this rank, n elements.
        group: process group.
        async_op: whether to return before the parts have arrived.
    """
    found: dist.Work | None = getattr(dist, GATHER)(into, own, group=group, async_op=async_op)
    return found


def failed(work: dist.Work) -> bool:
    """Whether a collective has ended with an error.

    `Work.exception` also tells, but not in every release: there it cannot be read.
    """
    if not work.is_completed():
        return False
    try:
        work.wait()
    except RuntimeError:
        return True
    return False
