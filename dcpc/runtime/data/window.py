"""Chooses the samples of the next global batch: the epoch's order through a bounded window.

The first sample not trained yet is always in the next batch. Where the next one in order does not
fit into it (too many tokens, or another bucket where a batch has one), it is left behind, and the
samples up to `window` places after the first one left behind are looked at. So a sample is trained
less than `window` places before or after its place in the order: none is taken from `window` places
after one that waits, and one that waits is in the next batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from dcpc.buckets import Bucket
from dcpc.runtime.data.samples import SampleBucket


class EpochOrder(Protocol):
    """The samples of an epoch in their order; a stream's end is found by reading on."""

    def __getitem__(self, place: int, /) -> int:
        """Index in the dataset of a place; IndexError after the last one."""


@dataclass(frozen=True, slots=True)
class Position:
    """Position in an epoch.

    Attributes:
        start: all places of the order before this one are done.
        ahead: places after it that are done too, fewer than the window.
    """

    start: int = 0
    ahead: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Batch:
    """A global batch.

    Attributes:
        samples: index in the dataset and bucket of each sample, in order.
        tokens: tokens of all samples.
        skipped: samples longer than every bucket, left out.
        before: position in the epoch before them.
        after: position in the epoch once they are trained.
    """

    samples: tuple[tuple[int, Bucket], ...]
    tokens: int
    skipped: tuple[int, ...]
    before: Position
    after: Position


def index_at(order: EpochOrder, place: int) -> int | None:
    """Returns the sample at a place of an order; None after the last."""
    try:
        return order[place]
    except IndexError:
        return None


def take(
    order: EpochOrder,
    fit: Callable[[int], SampleBucket],
    position: Position,
    tokens: int,
    window: int,
    one_bucket: bool = False,
    by_samples: bool = False,
) -> Batch:
    """Returns the next batch, empty only if nothing but samples too long is left.

    Args:
        order: index in the dataset of each place.
        fit: bucket and tokens of a sample.
        position: position in the epoch.
        tokens: maximum tokens of a batch; a longer single sample is a batch of its own.
        window: places by which the order may differ; 0: stop at the first sample that does not fit.
        one_bucket: whether to take samples of the first one's bucket alone.
        by_samples: whether `tokens` is a number of samples.
    """
    done = set(position.ahead)
    samples: list[tuple[int, Bucket]] = []
    skipped: list[int] = []
    total = used = 0
    waits: int | None = None
    place = position.start
    while waits is None or place < waits + window:
        index = index_at(order, place)
        if index is None:
            break
        if place not in done:
            found = fit(index)
            size = 1 if by_samples else found.tokens
            if found.bucket is None:
                skipped.append(index)
                done.add(place)
            elif not samples or (
                used + size <= tokens and (not one_bucket or found.bucket == samples[0][1])
            ):
                samples.append((index, found.bucket))
                total += found.tokens
                used += size
                done.add(place)
            elif waits is None:
                waits = place
        place += 1
        if samples and used >= tokens:
            break
    after = _after(position.start, done)
    return Batch(tuple(samples), total, tuple(skipped), position, after)


def _after(start: int, done: set[int]) -> Position:
    """Returns the position from a place on, of which some are done."""
    while start in done:
        done.remove(start)
        start += 1
    return Position(start, frozenset(done))
