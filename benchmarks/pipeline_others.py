"""What else a pipeline may run: packing, 1F1B on padded micro-batches, DynaPipe as published.

Each is rewritten from its description, and tries all its settings on the same costs: the best that
fits counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise, permutations
from math import inf

import numpy as np

from dcpc.errors import PlanError
from dcpc.runtime.pipeline.planning import PipelineCost, work_of
from dcpc.runtime.pipeline.schedule import (
    PipelineReplay,
    PipelineSchedule,
    PipelineWork,
    adaptive,
    one_f_one_b,
    replay,
)

SIZES = (1, 2, 4, 8, 16, 32)
THINNING_S = 5e-3  # DynaPipe's: caps nearer to each other than this are not tried
_NOTHING_FITS = "baseline: got no setting that fits; expected one; take shorter samples"
CLUSTERS = 3  # of micro-batches, for DynaPipe's permutations; 4 up to 20 micro-batches


def packing(lengths: Sequence[int], cost: PipelineCost, longest: int) -> PipelineReplay:
    """1F1B on sequences packed to the full length, in which all tokens attend to all (best fit)."""
    rows = best_fit(lengths, longest)
    packed = [longest] * rows
    return _fastest(_uniform(packed, even(rows, size), cost) for size in SIZES)[2]


def padded_1f1b(
    lengths: Sequence[int], cost: PipelineCost
) -> tuple[PipelineWork, PipelineSchedule, PipelineReplay]:
    """1F1B on equally many samples a micro-batch, as they come, padded to its own longest."""
    return _fastest(_uniform(lengths, even(len(lengths), size), cost) for size in SIZES)


def split_1f1b(
    lengths: Sequence[int], batches: Sequence[Sequence[int]], cost: PipelineCost
) -> PipelineReplay:
    """1F1B on given micro-batches, in their order."""
    return _fastest([_uniform(lengths, batches, cost)])[2]


def dynapipe(lengths: Sequence[int], cost: PipelineCost) -> PipelineReplay:
    """Its split, for each of its recompute settings, in its adaptive order.

    Source: DynaPipe (EuroSys 2024), sections 4 and 5, and its public planner: caps thinned by 5 ms,
    one setting for the whole step, permutations of clusters of micro-batches.
    """
    found: list[PipelineReplay | None] = []
    for setting in range(cost.settings):
        batches = thinned_split(lengths, cost, setting)
        if batches is None:
            continue
        work = work_of(lengths, batches, cost)
        rows = ((setting,) * len(batches),) * cost.stages
        for order in cluster_orders(work, setting):
            schedule = adaptive(work, order, rows)
            found.append(None if schedule is None else _fits(work, schedule))
    fits = [f for f in found if f is not None]
    if not fits:
        raise PlanError(_NOTHING_FITS)
    return min(fits, key=lambda f: f.makespan_s)


def thinned_split(
    lengths: Sequence[int], cost: PipelineCost, setting: int
) -> list[list[int]] | None:
    """DynaPipe's dynamic program over samples by length; None: some sample fits under no cap."""
    order = np.argsort(np.asarray(lengths), kind="stable")
    ascending = np.asarray(lengths)[order]
    n, padded = len(ascending), cost.padded(setting, cost.stages)
    counts = np.arange(n)[:, None] - np.arange(n)[None, :] + 1  # samples i..j at [j, i]
    valid = counts >= 1
    rows = np.broadcast_to(ascending[:, None], counts.shape)
    table_s = np.where(valid, padded.seconds(np.maximum(counts, 1), rows), inf)
    table_s[padded.peak_bytes(np.maximum(counts, 1), rows) > 1.0] = inf
    best_s, best = inf, None
    for cap_s in _caps(table_s[np.isfinite(table_s)]):
        cuts, total_s = _program(np.where(table_s <= cap_s, table_s, inf))
        if (cost.stages - 1) * cap_s + total_s < best_s:
            best_s, best = (cost.stages - 1) * cap_s + total_s, cuts
    return None if best is None else [order[a:b].tolist() for a, b in pairwise(best)]


def cluster_orders(work: PipelineWork, setting: int) -> list[list[int]]:
    """Orders of clusters of micro-batches by seconds (k-means), and the given one."""
    seconds = np.array([r[setting].forward_s + r[setting].backward_s for r in work.costs[0]])
    k = CLUSTERS if len(seconds) > 20 else CLUSTERS + 1
    labels = _clusters(seconds, min(k, len(seconds)))
    groups = [np.flatnonzero(labels == label).tolist() for label in sorted(set(labels.tolist()))]
    orders = [[i for group in found for i in group] for found in permutations(groups)]
    return [*orders, list(range(len(seconds)))]


def even(count: int, size: int) -> list[list[int]]:
    """Positions in groups of a size; the last may have fewer."""
    return [list(range(i, min(i + size, count))) for i in range(0, count, size)]


def best_fit(lengths: Sequence[int], longest: int) -> int:
    """Rows that best fit, longest first, needs."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fits = [(room, at) for at, room in enumerate(rooms) if room >= length]
        if fits:
            rooms[min(fits)[1]] -= length
        else:
            rooms.append(longest - length)
    return len(rooms)


def _uniform(
    lengths: Sequence[int], batches: Sequence[Sequence[int]], cost: PipelineCost
) -> tuple[PipelineWork, PipelineSchedule, PipelineReplay] | None:
    """1F1B with the first setting, the same everywhere, that fits."""
    work = work_of(lengths, batches, cost)
    for setting in range(cost.settings):
        rows = ((setting,) * len(batches),) * cost.stages
        schedule = one_f_one_b(range(len(batches)), rows)
        found = _fits(work, schedule)
        if found is not None:
            return work, schedule, found
    return None


def _fits(work: PipelineWork, schedule: PipelineSchedule) -> PipelineReplay | None:
    found = replay(work, schedule)
    pairs = zip(found.peak_bytes, work.memory_bytes, strict=True)
    return found if all(peak <= size for peak, size in pairs) else None


def _fastest(
    found: Iterable[tuple[PipelineWork, PipelineSchedule, PipelineReplay] | None],
) -> tuple[PipelineWork, PipelineSchedule, PipelineReplay]:
    fits = [f for f in found if f is not None]
    if not fits:
        raise PlanError(_NOTHING_FITS)
    return min(fits, key=lambda f: f[2].makespan_s)


def _caps(values_s: np.ndarray) -> list[float]:
    """All seconds of a micro-batch, those thinned out that are within 5 ms of the last one kept."""
    kept: list[float] = []
    for value in np.unique(values_s).tolist():
        if not kept or value - kept[-1] >= THINNING_S:
            kept.append(value)
    return kept


def _program(table_s: np.ndarray) -> tuple[list[int] | None, float]:
    n = len(table_s)
    total_s, before = np.full(n + 1, inf), np.zeros(n + 1, dtype=int)
    total_s[0] = 0.0
    for j in range(n):
        options = total_s[: j + 1] + table_s[j, : j + 1]
        before[j + 1] = int(options.argmin())
        total_s[j + 1] = options[before[j + 1]]
    if total_s[n] == inf:
        return None, inf
    cuts = [n]
    while cuts[-1]:
        cuts.append(int(before[cuts[-1]]))
    return cuts[::-1], float(total_s[n])


def _clusters(values: np.ndarray, k: int) -> np.ndarray:
    """Lloyd's k-means in one dimension, from quantiles."""
    centres = np.quantile(values, (np.arange(k) + 0.5) / k)
    labels = np.zeros(len(values), dtype=int)
    for _ in range(50):
        labels = np.abs(values[:, None] - centres[None, :]).argmin(axis=1)
        new = [values[labels == c].mean() if (labels == c).any() else centres[c] for c in range(k)]
        if np.allclose(new, centres):
            break
        centres = np.array(new)
    return labels
