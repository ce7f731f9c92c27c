"""Collectives, and what became of one, under the names that this torch has for them."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

# One function under two names: releases with the first one warn where the second is called.
GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"


def all_gather_single(
    into: Tensor, own: Tensor, *, group: dist.ProcessGroup | None, async_op: bool = False
) -> dist.Work | None:
    """Returns what to wait for; None: every rank's `own` lies in `into`, one after the other.

    Args:
        into: (ranks * n,) elements, written to.
        own: (n,) elements of this rank.
        group: the ranks.
        async_op: whether to return before they have come.
    """
    found: dist.Work | None = getattr(dist, GATHER)(into, own, group=group, async_op=async_op)
    return found


def failed(work: dist.Work) -> bool:
    """Whether a collective is over and failed.

    `Work.exception` says so, too, but not in every release: there it cannot be read.
    """
    if not work.is_completed():
        return False
    try:
        work.wait()
    except RuntimeError:
        return True
    return False
