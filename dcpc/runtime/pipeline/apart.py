"""The split into micro-batches where samples of different shapes do not share one.

Every sample of a shape takes the same seconds, so a split says of each shape how many micro-batches
it has; they are as large as each other, to one sample. With a cap on the slowest micro-batch each
shape is split by itself, and every cap that is some micro-batch's seconds is tried. So the split is
exact for (weight - 1) * longest + sum / replicas among those whose micro-batches of a shape are
alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from types import MappingProxyType

import numpy as np

from dcpc.errors import PlanError
from dcpc.runtime.planner.splits.microbatch import PaddedCost

Parts = tuple[tuple[int, ...], ...]  # positions of samples, by micro-batch


@dataclass(frozen=True, slots=True)
class _Way:
    """A number of micro-batches for the samples of a shape.

    Attributes:
        longest_s: seconds of the largest micro-batch.
        total_s: seconds of all micro-batches.
        count: number of micro-batches.
    """

    longest_s: float
    total_s: float
    count: int


def split_apart(
    lengths: Sequence[int],
    cost: PaddedCost,
    weight: int,
    replicas: int,
    most: Mapping[int, int] = MappingProxyType({}),
) -> Parts:
    """Returns micro-batches of one length each, shortest first.

    Args:
        lengths: length of each sample, in any order.
        cost: cost of a micro-batch; one fits if its bytes are at most 1.
        weight: weight of the longest micro-batch, as `stages` of `dcpc.microbatch`.
        replicas: pipelines that share the micro-batches.
        most: length -> maximum samples of a micro-batch; lengths left out have no maximum.

    Raises:
        PlanError: a sample does not fit alone.
    """
    at: dict[int, list[int]] = {}
    for i, length in enumerate(lengths):
        at.setdefault(length, []).append(i)
    ways = {
        length: _ways(len(own), length, cost, most.get(length, len(own)))
        for length, own in sorted(at.items())
    }
    best_s, best = inf, dict[int, _Way]()
    for cap_s in sorted({way.longest_s for found in ways.values() for way in found}):
        under = {n: [w for w in found if w.longest_s <= cap_s] for n, found in ways.items()}
        if not all(under.values()):
            continue
        chosen = {n: min(found, key=lambda w: w.total_s) for n, found in under.items()}
        longest_s = max(w.longest_s for w in chosen.values())
        total_s = sum(w.total_s for w in chosen.values())
        value_s = (weight - 1) * longest_s + total_s / replicas
        if value_s < best_s:
            best_s, best = value_s, chosen
    return tuple(
        tuple(part)
        for n, own in sorted(at.items())
        for part in map(np.ndarray.tolist, np.array_split(own, best[n].count))
    )


def _ways(samples: int, length: int, cost: PaddedCost, most: int) -> list[_Way]:
    """Returns each number of micro-batches that has another size of the largest, and fits.

    Raises:
        PlanError: none fits.
    """
    sizes = np.arange(1, min(samples, most) + 1)
    seconds = np.asarray(cost.seconds(sizes, np.array(length)))
    fits = np.asarray(cost.peak_bytes(sizes, np.array(length))) <= 1.0
    found = []
    for count in sorted({-(-samples // int(size)) for size in sizes[fits]}):
        small, larger = divmod(samples, count)
        if not fits[small + (larger > 0) - 1]:
            continue
        own_s = float(seconds[small - 1])
        more_s = float(seconds[small]) if larger else own_s
        total_s = larger * more_s + (count - larger) * own_s
        found.append(_Way(max(own_s, more_s), total_s, count))
    if not found:
        raise PlanError(
            f"pipeline: got a sample of length {length} that does not fit on a stage alone; "
            "expected one that does; take more stages, or raise memory="
        )
    return found
