"""New process groups, once all of their ranks are here."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from dcpc.errors import GroupError
from dcpc.runtime.groups.watch import Watch

_POLL_S = 0.02

# Name of a process group -> the group and who watches its ranks.
_watches: dict[str, tuple[dist.ProcessGroup, Watch]] = {}


def watched(
    parent: dist.ProcessGroup, ranks: tuple[int, ...], rank: int, timeout_s: float, silence_s: float
) -> Watch:
    """Returns who watches the ranks of a group, once all of them are here."""
    known, watch = _watches.get(parent.group_name, (None, Watch(ranks, rank)))
    if known is parent:
        watch.silence_s = silence_s
        with watch.naming():
            _await_all(parent, ranks, rank, timeout_s, watch)
        return watch
    watch = Watch(ranks, rank)
    watch.silence_s = silence_s
    _await_all(parent, ranks, rank, timeout_s, watch)
    watch.start(parent.get_group_store())
    _watches[parent.group_name] = parent, watch
    return watch


def _await_all(
    parent: dist.ProcessGroup, ranks: tuple[int, ...], rank: int, timeout_s: float, watch: Watch
) -> None:
    """Waits until every rank is here, so that making groups cannot hang on an absent one."""
    store = PrefixStore("dcpc/groups", parent.get_group_store())
    turn = store.add(f"turn/{rank}", 1)
    store.set(f"{turn}/{rank}", "here")
    if store.add(f"{turn}/count", 1) == len(ranks):
        store.set(f"{turn}/all", "here")
    deadline = time.monotonic() + timeout_s
    while not store.check([f"{turn}/all"]):
        if time.monotonic() > deadline:
            absent = [r for i, r in enumerate(ranks) if not store.check([f"{turn}/{i}"])]
            raise GroupError(
                f"process groups of {len(ranks)} ranks: rank(s) {', '.join(map(str, absent))} did "
                f"not arrive within {timeout_s:g} s; expected every rank to call dcpc.compile (or "
                "Groups.default); look at the log of these ranks: dcpc waits no "
                "longer"
            )
        watch.look()
        time.sleep(_POLL_S)


def block_of(
    ranks: tuple[int, ...],
    rank: int,
    degree: int,
    whole: bool,
    backend: str | None,
    timeout_s: float,
    what: str = "",
) -> dist.ProcessGroup:
    """Returns this rank's group of a degree."""
    desc = f"dcpc {what or backend or 'data'} degree {degree}"
    blocks = [ranks[i : i + degree] for i in range(0, len(ranks), degree)]
    return one_of(blocks, rank // degree, whole, backend, timeout_s, desc)


def one_of(
    every: Sequence[Sequence[int]],
    own: int,
    whole: bool,
    backend: str | None,
    timeout_s: float,
    desc: str,
) -> dist.ProcessGroup:
    """Returns this rank's of several groups, which have no rank in common; collective over all.

    Args:
        every: their ranks in the default group.
        own: number of this rank's.
        whole: whether they are all ranks of the default group together.
        backend: None: that of the default group.
        timeout_s: how long a rank waits for another.
        desc: name of all of them.
    """
    timeout, lists = timedelta(seconds=timeout_s), [list(ranks) for ranks in every]
    if whole:
        # Every rank passes every group: cheap for those it is not in, and c10d's names stay
        # aligned.
        pg, _ = dist.new_subgroups_by_enumeration(
            lists, timeout=timeout, backend=backend, group_desc=desc
        )
    else:
        # Ranks outside the parent group do not come here.
        pg = dist.new_group(
            lists[own], timeout=timeout, backend=backend, use_local_synchronization=True,
            group_desc=desc,
        )  # fmt: skip
    assert isinstance(pg, dist.ProcessGroup), f"{desc}: this rank is in none"
    return pg
