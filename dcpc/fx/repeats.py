"""Finds the repeated blocks of a graph by structure: runs of the same calls, one after another."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

SHORTEST = 4  # calls; shorter repeats are parts of a block (three projections side by side)


@dataclass(frozen=True, slots=True)
class RepeatedBlocks:
    """Equal blocks of calls that follow each other.

    Attributes:
        start: index of the first call.
        period: number of calls in a block.
        stop: index after the last call; the last block may be cut short.
    """

    start: int
    period: int
    stop: int


def repeated_runs(calls: Sequence[Hashable]) -> list[RepeatedBlocks]:
    """Returns the runs of repeated blocks, in order, found longest first; they do not overlap.

    A period's coverage is the number of calls equal to the one a period earlier. Among the periods
    that cover nearly the same, the shortest is the block.

    Args:
        calls: keys of the calls, e.g. (op, shape), in execution order.
    """
    numbers: dict[Hashable, int] = {}
    sequence = np.array([numbers.setdefault(c, len(numbers)) for c in calls], dtype=np.int64)
    return sorted(_runs(sequence, 0, len(sequence)), key=lambda run: run.start)


def _runs(sequence: npt.NDArray[np.int64], low: int, high: int) -> Iterator[RepeatedBlocks]:
    found = [
        r for p in range(SHORTEST, (high - low) // 2 + 1) if (r := _run(sequence, low, high, p))
    ]
    if not found:
        return
    most = max(run.stop - run.start for run in found)
    best = min(
        (run for run in found if run.stop - run.start >= 0.9 * most), key=lambda run: run.period
    )
    yield best
    yield from _runs(sequence, low, best.start)
    yield from _runs(sequence, best.stop, high)


def _run(
    sequence: npt.NDArray[np.int64], low: int, high: int, period: int
) -> RepeatedBlocks | None:
    """Returns the longest run with one period, or None if no block repeats."""
    same = sequence[low : high - period] == sequence[low + period : high]
    edges = np.flatnonzero(np.diff(np.concatenate(([0], same.view(np.int8), [0]))))
    lengths = edges[1::2] - edges[::2]
    if not len(lengths) or lengths.max() < period:
        return None
    longest = int(lengths.argmax())
    start = low + int(edges[2 * longest])
    return RepeatedBlocks(start, period, start + int(lengths[longest]) + period)


def aligned(run: RepeatedBlocks, last_read: Sequence[int]) -> int:
    """Returns the start of a run's first block: where the fewest values cross the borders.

    Only starts that leave the most whole blocks are considered.
    """
    spare = (run.stop - run.start) % run.period
    starts = range(run.start, run.start + spare + 1)
    return min(starts, key=lambda at: crossing(last_read, at + run.period, run.period))


def crossing(last_read: Sequence[int], border: int, period: int) -> int:
    """Returns the number of values of one block that later blocks read."""
    return sum(last_read[i] >= border for i in range(max(border - period, 0), border))
