"""Finds the repeated blocks of a graph by structure: runs of the same calls, one after another."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

SHORTEST = 4  # calls; shorter repeats are parts of a block (three projections side by side)


@dataclass(frozen=True, slots=True)
class RepeatedBlocks:
    """Blocks of equal calls that follow each other.

    Attributes:
        start: position of the first call.
        period: calls a block.
        stop: position after the last call; the last block may be cut short.
    """

    start: int
    period: int
    stop: int


def repeated_runs(calls: Sequence[Hashable]) -> list[RepeatedBlocks]:
    """Returns the runs of repeated blocks, in order, the longest found first; they do not overlap.

    A period is taken for its coverage: the calls that equal the one a period earlier. Of periods
    that cover nearly the same the shortest is the block.

    Args:
        calls: what tells calls apart, e.g. (op, shape), in execution order.
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
    """Returns the longest run of one period, None where no block comes twice."""
    same = sequence[low : high - period] == sequence[low + period : high]
    edges = np.flatnonzero(np.diff(np.concatenate(([0], same.view(np.int8), [0]))))
    lengths = edges[1::2] - edges[::2]
    if not len(lengths) or lengths.max() < period:
        return None
    longest = int(lengths.argmax())
    start = low + int(edges[2 * longest])
    return RepeatedBlocks(start, period, start + int(lengths[longest]) + period)


def aligned(run: RepeatedBlocks, last_read: Sequence[int]) -> int:
    """Returns where the first block of a run begins: where the fewest values cross the borders.

    Of the places that leave the most whole blocks.

    Args:
        run: of calls.
        last_read: of each call the position of the last that reads its value.
    """
    spare = (run.stop - run.start) % run.period
    starts = range(run.start, run.start + spare + 1)
    return min(starts, key=lambda at: crossing(last_read, at + run.period, run.period))


def crossing(last_read: Sequence[int], border: int, period: int) -> int:
    """Returns how many values of the block before a border the blocks after it read.

    Args:
        last_read: of each call the position of the last that reads its value.
        border: position of the first call after it.
        period: calls of a block.
    """
    return sum(last_read[i] >= border for i in range(max(border - period, 0), border))
