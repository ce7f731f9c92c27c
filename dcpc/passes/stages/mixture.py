"""One cut for a mixture of buckets: parameters cannot move from one micro-batch to the next.

Minimises the expectation over the buckets of the slowest stage's seconds. The search goes from the
last stage backward. A state (the first block so far, the devices used) keeps the vectors of the
slowest stage of each bucket that no other vector is at least as good as in all buckets. A vector is
dropped where even the best rest of each bucket by itself leaves it no better than the best cut
known; these rests are exact, from a dynamic programme for each bucket.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from dcpc.errors import PlanError
from dcpc.passes.stages.bottleneck import is_monotone, least_bottleneck
from dcpc.passes.stages.cut_costs import CutCosts, Floats, StageCut, cut_of, spread
from dcpc.passes.stages.devices import Taken

MOST_VECTORS = 4096  # vectors of a state; beyond it the search keeps the best and is not exact
TIE = 1e-12  # share by which a cut has to be better


def best_cut(costs: CutCosts) -> StageCut:
    """Returns the cut of least expected bottleneck.

    Raises:
        PlanError: no cut fits the devices' memory.
    """
    found = None
    if len(costs.weights) == 1 and is_monotone(costs):
        found = least_bottleneck(costs)
    else:
        found = _searched(costs)
    if found is None:
        raise PlanError(
            f"stages: got {costs.blocks} blocks and {sum(costs.counts)} devices; expected a cut "
            "whose every stage fits its device; add devices or memory, or lower the "
            "largest bucket"
        )
    return found


@dataclass(frozen=True, slots=True)
class _Vector:
    """A choice of the last stages.

    Attributes:
        slowest_s: seconds of the slowest of these stages, for each bucket.
        borders: first block of each of these stages, and the number of blocks.
        kinds: kind of the device of each of these stages.
    """

    slowest_s: Floats
    borders: tuple[int, ...]
    kinds: tuple[int, ...]


def _searched(costs: CutCosts) -> StageCut | None:
    taken = Taken.of(costs.counts)
    buckets = range(len(costs.weights))
    rests = [_rests(costs.only(bucket), taken) for bucket in buckets]
    bound = costs.expected(np.array([rest[0, costs.blocks] for rest in rests]))
    if not np.isfinite(bound):
        return None
    starts = [_greedy(costs.only(b), taken, rests[b]) for b in buckets]
    if len(buckets) > 1:
        blended = costs.blended()
        starts += [_greedy(blended, taken, _rests(blended, taken))]
    known = [cut_of(costs, s.borders, s.kinds) for s in starts if s is not None]
    best = min(known, key=lambda cut: cut.expected_s, default=None)
    best, exact = _improved(costs, taken, np.stack(rests), best)
    if best is None or not np.isfinite(best.expected_s):
        return None
    return spread(costs, replace(best, bound_s=best.expected_s if exact else bound, exact=exact))


def _rests(costs: CutCosts, taken: Taken) -> Floats:
    """Returns the least bottleneck of first blocks on the devices left, `[states, blocks + 1]`."""
    rest = np.full((taken.states, costs.blocks + 1), inf)
    rest[:, 0] = 0.0
    inside = np.triu(np.ones((costs.blocks + 1, costs.blocks + 1), dtype=bool), 1)
    for place in reversed(range(len(taken.levels) - 1)):
        own = [np.where(inside, costs.at(k, place)[0], inf) for k in range(len(taken.counts))]
        for state in taken.levels[place]:
            for kind in _left(taken, int(state)):
                after = rest[state + taken.strides[kind]]
                least = np.maximum(own[kind], after[:, None]).min(axis=0)
                rest[state, 1:] = np.minimum(rest[state, 1:], least[1:])
    return rest


def _left(taken: Taken, state: int) -> Iterator[int]:
    """Yields the kinds of which a state has unused devices."""
    for kind, count in enumerate(taken.counts):
        if state // taken.strides[kind] % (count + 1) < count:
            yield kind


def _greedy(costs: CutCosts, taken: Taken, rest: Floats) -> StageCut | None:
    """Returns the cut of one bucket's least bottleneck, or None if none fits."""
    state, border, place = 0, costs.blocks, 0
    borders, kinds = [border], list[int]()
    while border:
        found = [
            (max(costs.at(k, place)[0, a, border], rest[state + taken.strides[k], a]), a, k)
            for k in _left(taken, state)
            for a in range(border)
        ]
        seconds, border, kind = min(found, default=(inf, 0, 0))
        if not np.isfinite(seconds):
            return None
        borders.insert(0, border)
        kinds.insert(0, kind)
        state, place = state + taken.strides[kind], place + 1
    return cut_of(costs, borders, kinds)


def _improved(
    costs: CutCosts, taken: Taken, rests: Floats, best: StageCut | None
) -> tuple[StageCut | None, bool]:
    """Returns the best cut, and whether the search was complete."""
    weights, exact = np.array(costs.weights), True
    start = _Vector(np.zeros(len(weights)), (costs.blocks,), ())
    level: dict[tuple[int, int], list[_Vector]] = {(0, costs.blocks): [start]}
    place = 0
    while level:
        following: dict[tuple[int, int], list[_Vector]] = {}
        for (state, border), vectors in level.items():
            kept = _undominated(vectors)
            exact &= len(kept) <= MOST_VECTORS
            kept = kept[:MOST_VECTORS]
            slowest = np.array([v.slowest_s for v in kept]).reshape(len(kept), len(weights))
            for kind in _left(taken, state):
                target = state + taken.strides[kind]
                own = costs.at(kind, place)[:, :border, border].T
                each = np.maximum(slowest[:, None], own[None])
                least = np.maximum(each, rests[:, target, :border].T[None]) @ weights
                limit = inf if best is None else best.expected_s * (1 - TIE)
                for v, a in np.argwhere(least < limit):
                    made = kept[v]
                    borders, kinds = (int(a), *made.borders), (kind, *made.kinds)
                    if a:
                        vector = _Vector(each[v, a], borders, kinds)
                        following.setdefault((target, int(a)), []).append(vector)
                    elif best is None or least[v, a] < best.expected_s * (1 - TIE):
                        best = cut_of(costs, borders, kinds)
        level, place = following, place + 1
    return best, exact


def _undominated(vectors: list[_Vector]) -> list[_Vector]:
    """Returns the vectors that no other equals or beats in all buckets, least sum first."""
    vectors = sorted(vectors, key=lambda v: float(v.slowest_s.sum()))
    kept: list[_Vector] = []
    for vector in vectors:
        seen = np.array([v.slowest_s for v in kept]).reshape(len(kept), len(vector.slowest_s))
        if not (seen <= vector.slowest_s).all(axis=1).any():
            kept.append(vector)
    return kept
