"""The process groups of some of the ranks, for code that is written for all of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from dcpc.runtime.groups.groups import Groups


def subset(groups: Groups, members: Sequence[int], what: str) -> Groups | None:
    """Returns the groups of some ranks alone, which are numbered anew; None on other ranks.

    Collective over all ranks.
    """
    if len(members) == 1:
        alone = groups.rank in members
        return Groups(device=groups.device, watch=groups.watch) if alone else None
    data = groups.shared(members, f"dcpc data of {what}")
    control = groups.shared(members, f"dcpc control of {what}", backend="gloo")
    if not isinstance(data, dist.ProcessGroup) or not isinstance(control, dist.ProcessGroup):
        return None
    count = len(members)
    return Groups(
        count, list(members).index(groups.rank), groups.device, groups.timeout_s,
        tuple(groups.global_ranks[r] for r in members), {count: data}, {count: control}, False,
        _gradients=[data], watch=groups.watch,
    )  # fmt: skip
