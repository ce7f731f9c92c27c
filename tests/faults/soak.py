"""Mixed steps for long: what a rank holds may not grow."""

import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from tests.faults.ranks import Training

HELD = ("resident_bytes", "file_descriptors", "threads", "groups", "store_keys")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# Memory that allocators keep may rise a little for long; a leak of a step's smallest tensor (a
# plan, some kB) would be more than this in a full run.
RESIDENT_SHARE = 0.02
Sample = tuple[int, ...]


def held(groups: object) -> Sample:
    """Returns how much of each of `HELD` this rank holds."""
    resident_bytes = int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES
    every = groups.every()  # type: ignore[attr-defined]
    store = every[0].get_group_store()
    keys = store.num_keys()
    return (
        resident_bytes, len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")),
        len(every), keys,
    )  # fmt: skip


def soak(rank: int, steps: int, limit_s: float, folder: str) -> tuple[int, list[Sample]]:
    """Trains for so many steps, or so long; returns their number and what was held on the way.

    Each epoch is another iteration of the loader, and ends with a checkpoint.
    """
    made = Training("whole")
    groups, end_s = made.compiled.groups, time.monotonic() + limit_s
    done, found = 0, []
    while done < steps:
        for step in made.loader:
            made.compiled.train_step(step, clip=1.0)
            made.optimizer.step()
            made.optimizer.zero_grad()
            done += 1
        made.compiled.save(folder, done, keep=2, wait=True, **made.parts)
        dist.barrier()
        found.append(held(groups))
        dist.barrier()
        votes = [None] * groups.world
        dist.all_gather_object(votes, time.monotonic() > end_s)
        if any(votes):
            break
    return done, found


def growth(samples: Sequence[Sample]) -> dict[str, int]:
    """Returns by how much each of `HELD` grew from the second third of the run to the last."""
    third = len(samples) // 3
    before, after = samples[third : 2 * third], samples[2 * third :]
    return {
        name: max(s[i] for s in after) - max(s[i] for s in before) for i, name in enumerate(HELD)
    }


def grows(found: dict[str, int], resident_bytes: int) -> int:
    """Returns how many of `HELD` grew."""
    most = {"resident_bytes": RESIDENT_SHARE * resident_bytes}
    return sum(by > most.get(name, 0) for name, by in found.items())
