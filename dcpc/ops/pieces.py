"""The elements of a dim that each rank of a group has.

A dim is described by its whole `size`, the `parent` size that is split evenly (the first ranks get
one more), and the `shift` of the dim's first element in the parent; usually parent == size and
shift == 0. In order, a rank has one run of elements. **Zigzag**, it has two: of 2p chunks the
rank-th from either end, so that under a causal mask all ranks have as many pairs of query and key.
A rank has equally many elements of the parent either way.
"""

from __future__ import annotations

Run = tuple[int, int]  # (start, length)


def piece(size: int, parent: int, shift: int, p: int, rank: int) -> Run:
    """Returns (start, length) of one rank's piece of a dim that is split in order.

    Args:
        size: length of the whole dim.
        parent: length that is split evenly over the ranks.
        shift: position of the dim's first element in the parent.
        p: number of ranks.
        rank: index of the rank.
    """
    base, extra = divmod(parent, p)
    first = rank * base + min(rank, extra)
    return _cut(first, first + base + (rank < extra), size, shift)


def runs(size: int, parent: int, shift: int, p: int, rank: int, zigzag: bool) -> tuple[Run, ...]:
    """Returns the runs of elements that one rank has, in order: one, or two if zigzag.

    Args:
        size: length of the whole dim.
        parent: length that is split evenly over the ranks.
        shift: position of the dim's first element in the parent.
        p: number of ranks.
        rank: index of the rank.
        zigzag: whether the rank has two chunks, one from either end.
    """
    if not zigzag:
        return (piece(size, parent, shift, p, rank),)
    ends = [_chunk(parent, p, c) for c in (rank, 2 * p - 1 - rank)]
    first, second = (_cut(start, stop, size, shift) for start, stop in ends)
    return first, second


def _cut(first: int, last: int, size: int, shift: int) -> Run:
    start = min(max(first - shift, 0), size)
    stop = min(max(last - shift, 0), size)
    return start, stop - start


def _chunk(parent: int, p: int, c: int) -> Run:
    """Returns (start, stop) of one of 2p chunks.

    If they are not equal, the longer ones are the first ranks' first chunks, then the first ranks'
    second chunks, which are the last ones.
    """
    base, extra = divmod(parent, 2 * p)

    def start(c: int) -> int:
        longer = min(c, extra) if c <= p else min(p, extra) + max(0, c - max(p, 3 * p - extra))
        return c * base + longer

    return start(c), start(c + 1)
