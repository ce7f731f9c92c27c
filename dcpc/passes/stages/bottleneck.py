"""Finds the cut of least bottleneck for one bucket, for hundreds of blocks and dozens of devices.

Bisection over the seconds that a stage can have. Whether a bottleneck can be met is a dynamic
programme over the devices that were used, from the last stage backward: the earliest block that the
stages reach. To reach further is never worse where a part of a stage fits where the stage does.
"""

from __future__ import annotations

import numpy as np

from dcpc.passes.stages.cut_costs import CutCosts, Floats, StageCut, cut_of, spread
from dcpc.passes.stages.devices import Integers, Taken


def is_monotone(costs: CutCosts) -> bool:
    """Returns whether a part of a stage, or one with fewer stages behind it, never takes longer."""
    inside = np.triu(np.ones(costs.seconds.shape[-2:], dtype=bool), 1)
    seconds = np.where(inside, costs.seconds, 0.0)
    down = seconds[..., :-1, :] >= seconds[..., 1:, :]
    right = seconds[..., :, :-1] <= seconds[..., :, 1:]
    behind = costs.seconds[:, :, :-1] <= costs.seconds[:, :, 1:]
    return bool(down.all() and right.all() and (behind | ~inside).all())


def least_bottleneck(costs: CutCosts) -> StageCut | None:
    """Returns the cut of least bottleneck, or None if none fits."""
    taken = Taken.of(costs.counts)
    rows, columns = np.triu_indices(costs.blocks + 1, 1)
    values = np.unique(costs.seconds[..., rows, columns])
    values = values[np.isfinite(values)]
    low, high = 0, len(values)
    while low < high:
        middle = (low + high) // 2
        met = len(values) > 0 and bool((_reached(costs, taken, values[middle]) == 0).any())
        low, high = (low, middle) if met else (middle + 1, high)
    if low == len(values):
        return None
    cut = _traced(costs, taken, float(values[low]))
    bound = StageCut(cut.borders, cut.kinds, cut.bottleneck_s, cut.expected_s, cut.expected_s)
    return spread(costs, bound)


def _earliest(costs: CutCosts, kind: int, place: int, limit_s: float) -> Integers:
    """Returns the first block of the longest stage that ends at each border, `[blocks + 2]`.

    It is `blocks + 1` where no stage fits, as at border 0 and beyond the end.
    """
    blocks = costs.blocks
    inside = np.triu(np.ones((blocks + 1, blocks + 1), dtype=bool), 1)
    fits = (costs.at(kind, place)[0] <= limit_s) & inside
    first = np.where(fits.any(axis=0), fits.argmax(axis=0), blocks + 1)
    return np.append(first, blocks + 1)


def _reached(costs: CutCosts, taken: Taken, limit_s: float) -> Integers:
    """Returns the earliest block that each state's devices can reach, `[states]`."""
    reach = np.full(taken.states, costs.blocks + 1)
    reach[0] = costs.blocks
    one_place = costs.seconds.shape[2] == 1
    tables: dict[tuple[int, int], Integers] = {}
    for place, states in enumerate(taken.levels[1:]):
        best = np.full(len(states), costs.blocks + 1)
        for kind, count in enumerate(taken.counts):
            key = kind, 0 if one_place else place
            if count and key not in tables:
                tables[key] = _earliest(costs, *key, limit_s)
            if count:
                own = taken.used(kind, states) > 0
                before = reach[states[own] - taken.strides[kind]]
                best[own] = np.minimum(best[own], tables[key][before])
        reach[states] = best
        if (best == 0).any():
            break
    return reach


def _traced(costs: CutCosts, taken: Taken, limit_s: float) -> StageCut:
    """Returns a cut within this bottleneck, with the fewest devices."""
    reach = _reached(costs, taken, limit_s)
    state = int(np.flatnonzero(reach == 0)[0])
    borders, kinds = [0], list[int]()
    while state:
        place = sum(int(taken.used(k, np.array(state))) for k in range(len(taken.counts))) - 1
        for kind, stride in enumerate(taken.strides):
            if not taken.used(kind, np.array(state)):
                continue
            before = int(reach[state - stride])
            if _earliest(costs, kind, place, limit_s)[before] == reach[state]:
                borders.append(before)
                kinds.append(kind)
                state -= stride
                break
    return cut_of(costs, borders, kinds)


def fractional_bound(blocks: Floats, speeds: Floats) -> float:
    """Returns a lower bound on the bottleneck in seconds: all devices busy, or the largest block.

    Args:
        blocks: seconds of each block on a device of speed 1, `[blocks]`.
        speeds: speed of each device, `[devices]`.
    """
    return float(max(blocks.sum() / speeds.sum(), blocks.max() / speeds.max()))
