"""The best plan of a small batch, found by trying all of them."""

from collections.abc import Mapping, Sequence
from typing import Any

from dcpc.buckets import Bucket
from dcpc.runtime.planner.speeds import slowness
from dcpc.runtime.planner.table import PlanTable


def brute_force(buckets: Sequence[Bucket], table: PlanTable) -> float:
    """Least seconds of any plan: all partitions of each bucket, rows, places and orders."""
    best = float("inf")

    def place(left: Mapping[Any, int], free_s: list[float]) -> None:
        nonlocal best
        if max(free_s) >= best:
            return
        if not left:
            best = max(free_s)
            return
        for kind, count in left.items():
            for row in table.rows[kind]:
                for n in range(1, min(count, row.micro_batch) + 1):
                    _, seconds_s = table.run(table.buckets[kind], row.sp, n)
                    rest = {k: c - n * (k == kind) for k, c in left.items() if c > n * (k == kind)}
                    for first in range(table.world - row.sp + 1):
                        ranks = range(first, first + row.sp)
                        slow = slowness(table.speeds, first, row.sp)
                        end_s = max(free_s[r] for r in ranks) + seconds_s * slow
                        place(rest, [end_s if r in ranks else t for r, t in enumerate(free_s)])

    kinds = [table.key(b) for b in buckets]
    place({k: kinds.count(k) for k in kinds}, [0.0] * table.world)
    return best
