"""VideoSys' data-centric parallelism, as its description says it, faults included.

    intra      each bucket at its own sp; a step fills the ranks with groups of random sp, each with
               one micro-batch of a random bucket
    inter      the same, and each group accumulates micro-batches of its bucket until the slowest
               group is done; a bucket that has fewer samples left than that is dropped
    inter+pac  the same, with no more recompute than memory asks for

Written from VideoSys' description, without its code. More generous than the original in three
points: memory and seconds are known exactly, any sp class is drawn with equal probability, and only
trained samples count.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from dcpc.buckets import Bucket
from dcpc.commands.simulate.model_rows import ModelCosts, SimRow
from dcpc.runtime.planner.plans import PlannedMicroBatch, StepPlan, step_plan

Mode = Literal["intra", "inter", "pac"]
LEAST_ACCUMULATION = 2
MOST_ACCUMULATION = 10


@dataclass(slots=True)
class Pool:
    """The samples of an epoch that are left, by bucket, in random order."""

    left: dict[Bucket, list[int]]

    @classmethod
    def of(cls, samples: Sequence[tuple[int, Bucket]], draw: random.Random) -> Pool:
        """Returns all samples, shuffled."""
        left: dict[Bucket, list[int]] = {}
        for number, bucket in samples:
            left.setdefault(bucket, []).append(number)
        for numbers in left.values():
            draw.shuffle(numbers)
        return cls(left)

    def take(self, bucket: Bucket, count: int) -> tuple[int, ...]:
        """Takes so many samples, or all that are left."""
        numbers = self.left[bucket]
        taken = tuple(numbers[len(numbers) - count :] if count < len(numbers) else numbers)
        del numbers[max(0, len(numbers) - count) :]
        if not numbers:
            del self.left[bucket]
        return taken

    def drop(self, bucket: Bucket) -> None:
        """Drops the remaining samples of a bucket."""
        self.left.pop(bucket, None)


def steps(
    costs: ModelCosts, samples: Sequence[tuple[int, Bucket]], mode: Mode, seed: int = 0
) -> Iterator[StepPlan]:
    """Yields the optimizer steps of an epoch; samples that are in none were dropped."""
    draw = random.Random(seed)
    pool = Pool.of(samples, draw)
    settings = {}
    for b in costs.buckets:
        row = b.row(b.least if mode == "pac" else b.full, b.least_degree())
        assert row is not None, f"{b.bucket} has a row at its least degree"
        settings[b.bucket] = row
    most = 1 if mode == "intra" else MOST_ACCUMULATION
    for bucket in [b for b in pool.left if len(pool.left[b]) < settings[b].micro_batch]:
        pool.drop(bucket)
    while pool.left:
        groups = _fill(costs, settings, pool, draw)
        counts = _accumulate([settings[bucket].seconds_s for _, bucket in groups], most)
        placed = []
        for (first, bucket), count in zip(groups, counts, strict=True):
            placed += _run(settings[bucket], bucket, first, count, pool)
        if placed:
            yield step_plan(placed, costs.world)


def _fill(
    costs: ModelCosts, settings: dict[Bucket, SimRow], pool: Pool, draw: random.Random
) -> list[tuple[int, Bucket]]:
    """Returns (first rank, bucket) of groups of random sp classes that fill the ranks.

    Larger groups come first on the ranks, so that none is spread over two nodes without need.
    """
    classes: dict[int, list[Bucket]] = {}
    left = {bucket: len(numbers) // settings[bucket].micro_batch
            for bucket, numbers in pool.left.items()}  # fmt: skip
    for bucket, count in left.items():
        if count:
            classes.setdefault(settings[bucket].sp, []).append(bucket)
    free = costs.world
    chosen: list[Bucket] = []
    while sizes := [sp for sp, buckets in classes.items() if sp <= free and buckets]:
        buckets = classes[draw.choice(sizes)]
        bucket = draw.choices(buckets, [left[b] for b in buckets])[0]
        chosen.append(bucket)
        free -= settings[bucket].sp
        left[bucket] -= 1
        if not left[bucket]:
            buckets.remove(bucket)
    chosen.sort(key=lambda bucket: -settings[bucket].sp)
    first, out = 0, []
    for bucket in chosen:
        out.append((first, bucket))
        first += settings[bucket].sp
    return out


def _accumulate(seconds: Sequence[float], most: int) -> list[int]:
    """Returns micro-batches of each group: the counts with the least imbalance.

    The slowest group runs n = 2, 3, ... micro-batches, each other as many as come nearest to its
    time.
    """
    if most == 1:
        return [1] * len(seconds)
    slowest_s = max(seconds)
    best: tuple[float, list[int]] | None = None
    for n in range(LEAST_ACCUMULATION, most + 1):
        counts = [max(1, min(most, round(n * slowest_s / s))) for s in seconds]
        busy = [c * s for c, s in zip(counts, seconds, strict=True)]
        imbalance = 1.0 - sum(busy) / len(busy) / max(busy)
        if best is None or imbalance < best[0] - 1e-9:
            best = imbalance, counts
    assert best is not None, "there is at least one number of micro-batches"
    return best[1]


def _run(
    row: SimRow, bucket: Bucket, first: int, count: int, pool: Pool
) -> list[PlannedMicroBatch]:
    """Takes a group's samples; if the bucket has too few, it is dropped, and the group idles."""
    have = len(pool.left.get(bucket, ()))
    if have < count * row.micro_batch:
        pool.drop(bucket)
        return []
    ranks = tuple(range(first, first + row.sp))
    out = [
        PlannedMicroBatch(bucket, row.sp, ranks, pool.take(bucket, row.micro_batch),
                          row.seconds_s, row.micro_batch, row.menu_step)
        for _ in range(count)
    ]  # fmt: skip
    if 0 < len(pool.left.get(bucket, ())) < row.micro_batch:
        pool.drop(bucket)
    return out
