"""The rendezvous store of one attempt of a job that torchrun starts again after a rank died.

torchrun keeps one store for all attempts, and torch gives their keys no prefix: a rank may connect
to the address of one that is dead ("connectFullMesh failed"). The number of restarts is no help, as
each node counts its own. So ranks agree on a prefix that only those that live can know:

    every rank   here/RANK = a word of its own, new in each attempt
    rank 0       go = its word and those of all ranks that it sees; again if one has changed
    every rank   once go has its own word: ok/RANK/(rank 0's word); that word is the prefix
"""

from __future__ import annotations

import json
import logging
import os
import time
import uuid
from datetime import timedelta

from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

LOG = logging.getLogger("dcpc")
_POLL_S = 0.02
TOLD_S = 10.0  # after which the log says who is waited for


def kept_by_torchrun() -> bool:
    """Whether the launcher has the rendezvous store, and may start ranks again."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def fresh_store(store: Store, rank: int, world: int, timeout_s: float) -> PrefixStore:
    """Returns a store in which no earlier attempt has written anything.

    Raises:
        RuntimeError: some did not arrive.
    """
    meeting = PrefixStore(f"dcpc/attempt/{world}", store)
    own, begin_s, told_late = uuid.uuid4().hex, time.monotonic(), False
    meeting.set(f"here/{rank}", own)
    told: list[str] = []
    while True:
        here = [_read(meeting, f"here/{r}") for r in range(world)] if rank == 0 else []
        if here and all(here) and here != told:
            told = here
            meeting.set("go", json.dumps(told))
        words = told if rank == 0 else json.loads(_read(meeting, "go") or "[]")
        if len(words) == world and words[rank] == own:
            meeting.set(f"ok/{rank}/{words[0]}", own)
            if rank > 0 or all(
                _read(meeting, f"ok/{r}/{own}") == words[r] for r in range(1, world)
            ):
                return PrefixStore(f"dcpc/{words[0]}", store)
        lacking = ", ".join(str(r) for r, word in enumerate(here) if not word)
        waited_s = time.monotonic() - begin_s
        if waited_s > timeout_s:
            raise RuntimeError(
                f"not all of {world} ranks arrived" + (f", no rank {lacking}" if lacking else "")
            )
        if lacking and waited_s > TOLD_S and not told_late:
            told_late = True
            LOG.warning(
                "rank 0 waits up to %g s for rank %s to call dcpc: see its log", timeout_s, lacking
            )
        time.sleep(_POLL_S)


def store_of_launcher(timeout_s: float) -> tuple[Store, int, int]:
    """Returns this attempt's store, this rank and how many there are."""
    timeout = timedelta(seconds=timeout_s)
    store, rank, world = next(iter(rendezvous("env://", timeout=timeout)))
    store.set_timeout(timeout)
    return fresh_store(store, rank, world, timeout_s), rank, world


def _read(store: Store, key: str) -> str:
    return store.get(key).decode() if store.check([key]) else ""
