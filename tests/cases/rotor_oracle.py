"""Rotor's dynamic programme: the least recompute of a chain under a memory limit, block by block.

Source: Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova, "Optimal checkpointing for heterogeneous
chains: how to train deep neural networks with limited memory", 2019; written from its recurrence.

Before the backward of blocks s to t, whose input is stored, either block s runs forward and keeps
all that its backward needs, or blocks s to r run forward, the output of r alone is stored, and s to
r are solved once the backward of what follows is done:

    best(s, t, m) = min( forward(s) + best(s + 1, t, m - kept(s))            if alive(s) <= m
                         min over r < t of forward(s..r) + best(r + 1, t, m - output(r))
                                           + best(s, r, m) )
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True, slots=True)
class Stage:
    """One block of a chain.

    Attributes:
        forward: its cost.
        kept_bytes: of all that its backward needs, its output included, its input not.
        output_bytes: of what the next block reads.
        alive_bytes: the most that is alive in its backward, less what blocks before it store.
    """

    forward: float
    kept_bytes: float
    output_bytes: float
    alive_bytes: float


def least_recompute(chain: Sequence[Stage], limit_bytes: float) -> float:
    """Returns the cost of what is run again, infinite where nothing fits.

    Memory of forward alone is not counted, so no schedule of blocks can do better.

    Args:
        chain: in execution order.
        limit_bytes: of all that is alive.
    """

    @cache
    def best(s: int, t: int, room: float) -> float:
        stage = chain[s]
        found = float("inf")
        if stage.alive_bytes <= room:
            rest = best(s + 1, t, room - stage.kept_bytes) if s < t else 0.0
            found = stage.forward + rest
        run = 0.0
        for r in range(s, t):
            run += chain[r].forward
            after = best(r + 1, t, room - chain[r].output_bytes)
            if run + after < found:
                found = min(found, run + after + best(s, r, room))
        return found

    once = sum(stage.forward for stage in chain)
    return best(0, len(chain) - 1, limit_bytes) - once
