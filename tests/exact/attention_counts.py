"""What is counted of splits of attention, without running any: pairs, bytes, lengths that cross."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dcpc.ops.pieces import runs
from dcpc.ops.ring_route import RowSplit, route, sent_bytes


def pairs(length: int, p: int, zigzag: bool) -> list[int]:
    """Returns how many (query, key) pairs each of p ranks has under a causal mask."""

    def seen(start: int, count: int) -> int:
        """Queries of a run see 1 + start, 2 + start, ... keys."""
        return count * start + count * (count + 1) // 2

    every = (runs(length, length, 0, p, rank, zigzag) for rank in range(p))
    return [sum(seen(*run) for run in mine) for mine in every]


def imbalance(length: int, p: int, zigzag: bool) -> float:
    """Returns the pairs of the fullest rank over the mean, minus 1."""
    each = pairs(length, p, zigzag)
    return max(each) * p / sum(each) - 1


def worst_imbalance(most_p: int, zigzag: bool) -> float:
    """Returns the largest over 2 to `most_p` ranks, at 64 positions a rank and at longer lengths.

    Lengths are all from 64 p to 65 p, where they are shortest, and some up to 2,000 a rank.
    """
    found = 0.0
    for p in range(2, most_p + 1):
        lengths = [*range(64 * p, 65 * p + 1), *(n * p + p // 2 for n in (100, 333, 1000, 2000))]
        found = max(found, *(imbalance(n, p, zigzag) for n in lengths))
    return found


def ring_bytes(
    length: int,
    p: int,
    rank: int,
    *,
    across: int,
    zigzag: bool,
    row_bytes: int,
    before: int | None = None,
    after: int | None = None,
) -> int:
    """Returns what a rank sends to the next ones of its ring, forward and backward.

    Args:
        length: of queries and keys.
        p: ranks of the group.
        rank: which of them.
        across: ranks that share heads.
        zigzag: whether a rank has a chunk from either end.
        row_bytes: of one key and one value, of a rank's heads and all samples.
        before: how many keys before its own position a query sees, None: all.
        after: how many after it, None: all.
    """
    split = RowSplit(length, length, 0, zigzag)
    way = route(split, split, p, across, before, after)
    return sum(sent_bytes(way, rank, row_bytes, row_bytes))


def swap_bytes(
    length: int, p: int, rank: int, *, across: int, zigzag: bool, head_bytes: Sequence[int]
) -> int:
    """Returns what a rank of a hybrid sends to those it shares heads with, forward and backward.

    Queries, keys and values go there, the output comes back, and gradients the other way: so of
    each tensor a rank once sends its own rows' other heads, and once its heads of the others' rows.

    Args:
        length: of queries and keys.
        p: ranks of the group.
        rank: which of them.
        across: ranks that share heads.
        zigzag: whether a rank has a chunk from either end.
        head_bytes: of each tensor, the bytes of one row in a rank's share of the heads.
    """
    split = RowSplit(length, length, 0, zigzag)
    first = rank - rank % across
    rows = {r: sum(n for _, n, _ in split.runs(p, 1, r)) for r in range(first, first + across)}
    others = sum(n for r, n in rows.items() if r != rank)
    return sum(size * (rows[rank] * (across - 1) + others) for size in head_bytes)


def crossing(lengths: Sequence[int], one: Sequence[float], other: Sequence[float]) -> float | None:
    """Returns the length from which on the first of two ways is faster or slower than the other.

    Between two lengths the logarithm of the ratio is taken as linear in the logarithm of the
    length. None where the same way is faster at both ends; of several crossings the last.

    Args:
        lengths: ascending.
        one: its seconds.
        other: the other's.
    """
    ratio = [math.log(a / b) for a, b in zip(one, other, strict=True)]
    if ratio[0] * ratio[-1] >= 0:
        return None
    i = max(i for i in range(len(ratio) - 1) if ratio[i] * ratio[i + 1] <= 0 != ratio[i + 1])
    low, high = math.log(lengths[i]), math.log(lengths[i + 1])
    return math.exp(low + (high - low) * ratio[i] / (ratio[i] - ratio[i + 1]))


def clear(one: Sequence[float], other: Sequence[float], share: float) -> bool:
    """Whether one way is faster by a share at the first length and slower by it at the last."""
    first, last = one[0] / other[0], one[-1] / other[-1]
    return min(first, last) < 1 - share and max(first, last) > 1 + share
