"""New process groups, once all of their ranks are here."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from dcpc.errors import GroupError
from dcpc.runtime.groups.watch import Watch

_POLL_S = 0.02

# Name of a process group -> the group and who watches its ranks.
_watches: dict[str, tuple[dist.ProcessGroup, Watch]] = {}


def watched(
    parent: dist.ProcessGroup,
    ranks: tuple[int, ...],
    rank: int,
    timeout_s: float,
    silence_s: float,
    has: bool = False,
) -> tuple[Watch, bool]:
    """Returns the watch of a group's ranks, once all are here, and whether all have groups of it.

    Args:
        parent: the group.
        ranks: for each rank: its number in the default group.
        rank: number of this rank among them.
        timeout_s: seconds that a rank waits for another.
        silence_s: seconds without a sign of life after which a rank is lost.
        has: whether this rank has groups that it may go on with.
    """
    known, watch = _watches.get(parent.group_name, (None, Watch(ranks, rank)))
    if known is not parent:
        watch = Watch(ranks, rank)
    watch.silence_s = silence_s
    with watch.naming():
        all_have = _await_all(parent, ranks, rank, timeout_s, watch, has)
    if known is not parent:
        watch.start(parent.get_group_store())
        _watches[parent.group_name] = parent, watch
    return watch, all_have


def _await_all(
    parent: dist.ProcessGroup,
    ranks: tuple[int, ...],
    rank: int,
    timeout_s: float,
    watch: Watch,
    has: bool,
) -> bool:
    """Waits for every rank; returns whether `has` is true on all of them.

    So making groups cannot hang on an absent one.
    """
    store = PrefixStore("dcpc/groups", parent.get_group_store())
    turn = store.add(f"turn/{rank}", 1)
    store.set(f"{turn}/{rank}", "here")
    store.add(f"{turn}/have", int(has))
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
    return bool(store.add(f"{turn}/have", 0) == len(ranks))


def connects_at_once(pg: dist.ProcessGroup) -> bool:
    """Whether a group's ranks are connected when it is made, which takes no memory of a GPU."""
    return dist.get_backend(pg) in ("gloo", "fake")


@dataclass(frozen=True, slots=True)
class GroupMaker:
    """Makes process groups; every rank asks for the same ones, in the same order.

    Attributes:
        ranks: for each rank: its number in the default group.
        rank: number of this rank among them.
        whole: whether they are all ranks of the default group.
        device: device of the ranks.
        timeout_s: seconds that a rank waits for another.
    """

    ranks: tuple[int, ...]
    rank: int
    whole: bool
    device: torch.device
    timeout_s: float

    def block(self, degree: int, backend: str | None = None, what: str = "") -> dist.ProcessGroup:
        """Returns this rank's group where so many ranks form each; collective over all."""
        blocks = [self.ranks[i : i + degree] for i in range(0, len(self.ranks), degree)]
        desc = f"dcpc {what or backend or 'data'} degree {degree}"
        return self.one_of(blocks, self.rank // degree, desc, backend)

    def one_of(
        self, every: Sequence[Sequence[int]], own: int, desc: str, backend: str | None = None
    ) -> dist.ProcessGroup:
        """Returns this rank's of several groups, which have no rank in common; collective over all.

        Args:
            every: ranks of each group, as numbers in the default group.
            own: number of this rank's.
            desc: name of all of them.
            backend: name of the backend; None: that of the default group.
        """
        timeout, lists = timedelta(seconds=self.timeout_s), [list(ranks) for ranks in every]
        if self.whole:
            # Every rank passes every group: cheap for those it is not in, and c10d's names stay
            # aligned.
            with _unbound(backend is not None):
                pg, _ = dist.new_subgroups_by_enumeration(
                    lists, timeout=timeout, backend=backend, group_desc=desc
                )
        else:
            # Ranks outside the parent group do not come here.
            with _unbound(True):
                pg = dist.new_group(
                    lists[own], timeout=timeout, backend=backend, use_local_synchronization=True,
                    group_desc=desc,
                )  # fmt: skip
        assert isinstance(pg, dist.ProcessGroup), f"{desc}: this rank is in none"
        if backend is None:
            self.connect(pg)
        return pg

    def some(
        self, members: Sequence[int], desc: str, connected: bool = True, backend: str | None = None
    ) -> dist.ProcessGroup | None:
        """Returns the data group of some ranks, None on others; collective over all."""
        pg = dist.new_group(
            [self.ranks[r] for r in members],
            timeout=timedelta(seconds=self.timeout_s), group_desc=desc, backend=backend,
        )  # fmt: skip
        if not isinstance(pg, dist.ProcessGroup):
            return None
        if connected:
            self.connect(pg)
        return pg

    def connect(self, pg: dist.ProcessGroup) -> None:
        """Has a data group's communicator made, while all of its ranks are here.

        NCCL makes it at the group's first call, which needs all of its ranks: in a ring in which
        one has nothing to send the others would wait for that one.

        Raises:
            GroupError: it cannot be made.
        """
        if connects_at_once(pg):
            return
        try:
            dist.all_reduce(torch.zeros(1, device=self.device), group=pg)
        except RuntimeError as e:
            raise GroupError(
                f"process group {pg.group_desc} of {pg.size()} ranks: got "
                f"{(str(e).splitlines() or ['no reason'])[0]}; expected a first collective on "
                f"{self.device}; give each rank a device of its own with free memory (LOCAL_RANK), "
                "and look at the logs with NCCL_DEBUG=INFO"
            ) from e


@contextmanager
def _unbound(apart: bool) -> Iterator[None]:
    """Has new groups made without the ranks that are not in them.

    Where the default group is bound to a device (`device_id=`), torch splits its communicator for
    each new group, over gloo as well on the ranks outside: that waits for all ranks, and those of a
    gloo group or of another job do not come (pytorch/pytorch#145376).
    """
    default = dist.group.WORLD
    bound = getattr(default, "bound_device_id", None)
    if not apart or default is None or bound is None:
        yield
        return
    default.bound_device_id = None
    try:
        yield
    finally:
        default.bound_device_id = bound
