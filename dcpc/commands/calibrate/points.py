"""At which sizes to time a model: lengths over the whole range of its buckets, as time allows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from dcpc.buckets import BATCH, Bucket, Sizes

LENGTHS = 4
SHORTEST = 16  # length that calls are timed at alone
STEPS = 96  # of the way between two lengths, by the logarithm


def choose_points(
    buckets: Iterable[Bucket],
    seconds: Callable[[Sizes], float],
    fits: Callable[[Sizes], bool],
    limit_s: float,
    batched: bool,
) -> list[dict[str, int]]:
    """Returns the sizes to time, batch included, the shortest first.

    Four lengths, evenly spread by the logarithm of their elements, at a batch of one; the shorter
    ones also with as many samples as have half the longest one's elements. Sizes that take longer
    than a quarter of the limit, or do not fit, are left out, but for the shortest: each runs twice,
    as a whole and call by call, and all the others take about as long as the longest length.

    Args:
        buckets: buckets of one trace.
        seconds: function from sizes to the expected seconds of one run.
        fits: function that tells whether the device has memory for the sizes.
        limit_s: seconds for one run of all sizes.
        batched: whether the model has a batch.
    """
    first, *rest = _ascending(buckets, batched)
    share_s = limit_s / 4
    able = [first, *(s for s in rest if seconds(s) <= share_s and fits(s))]
    lengths = _spread(able)
    if not batched:
        return lengths
    most = _elements(lengths[-1])
    wider = [{**s, BATCH: max(1, most // (2 * _elements(s)))} for s in lengths[: LENGTHS // 2]]
    found = [*lengths, *(s for s in wider if seconds(s) <= share_s and fits(s))]
    unique = {tuple(sorted(s.items())): s for s in found}
    return sorted(unique.values(), key=lambda s: (_elements(s), sorted(s.items())))


def trial_point(
    buckets: Iterable[Bucket], seconds: Callable[[Sizes], float], limit_s: float, batched: bool
) -> dict[str, int]:
    """Returns the longest length, at a batch of one, that is expected to end in time."""
    first, *rest = _ascending(buckets, batched)
    return [first, *(s for s in rest if seconds(s) <= limit_s)][-1]


def shorter_points(sizes: Sizes) -> list[dict[str, int]]:
    """Returns a half and a quarter of a length, with as many elements; of several dims nothing."""
    names = [name for name in sizes if name != BATCH]
    if len(names) != 1 or BATCH not in sizes:
        return []
    length, batch = sizes[names[0]], sizes[BATCH]
    return [{names[0]: length // n, BATCH: batch * n} for n in (4, 2) if length // n >= SHORTEST]


def turning_points(low: Sizes, high: Sizes, kind: Callable[[Sizes], int]) -> list[dict[str, int]]:
    """Returns sizes between two: the middle ones, and both sides of where the kind changes.

    Args:
        low: sizes of the shorter point.
        high: sizes of the longer point, with the same names.
        kind: function from sizes to the number of the kernel's way to compute.
    """
    way = [
        {n: round(low[n] ** (1 - i / STEPS) * high[n] ** (i / STEPS)) for n in low}
        for i in range(STEPS + 1)
    ]
    kinds = [kind(sizes) for sizes in way]
    turns = {j for i in range(STEPS) if kinds[i] != kinds[i + 1] for j in (i, i + 1)}
    inner = (turns | {STEPS // 3, 2 * STEPS // 3}) - {0, STEPS}
    return [way[i] for i in sorted(inner)]


def _spread(points: list[dict[str, int]]) -> list[dict[str, int]]:
    """Returns up to four of the points, the first and the last among them."""
    if len(points) <= LENGTHS:
        return points
    logs = [math.log(_elements(p)) for p in points]
    steps = [logs[0] + (logs[-1] - logs[0]) * i / (LENGTHS - 1) for i in range(LENGTHS)]
    nearest = {min(range(len(points)), key=lambda i: abs(logs[i] - at)) for at in steps}
    return [points[i] for i in sorted(nearest)]


def _ascending(buckets: Iterable[Bucket], batched: bool) -> list[dict[str, int]]:
    by_elements = sorted(buckets, key=lambda b: (_elements(b.sizes), b.shape_key))
    return [_at(b, 1, batched) for b in by_elements]


def _at(bucket: Bucket, batch: int, batched: bool) -> dict[str, int]:
    sizes = {n: s for n, s in bucket.sizes.items() if n != BATCH}
    return {**sizes, BATCH: batch} if batched else sizes


def _elements(sizes: Sizes) -> int:
    return math.prod(sizes.values())
