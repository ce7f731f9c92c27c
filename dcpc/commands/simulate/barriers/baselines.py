"""What users compare with: the same batch and cost, planned as others plan it.

Each returns a `BatchPlan`.
Written from the systems' published descriptions, without their code.
"""

import heapq
import math
import random
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from math import inf

import numpy as np

from dcpc.commands.simulate.barriers.bound import lower_bound
from dcpc.commands.simulate.barriers.costs import GroupCost
from dcpc.commands.simulate.barriers.packing.finish import finish
from dcpc.commands.simulate.barriers.packing.pack import Draft
from dcpc.commands.simulate.barriers.packing.ranks import FreeRanks
from dcpc.commands.simulate.barriers.packing.rooms import Rooms
from dcpc.commands.simulate.barriers.plan import BatchPlan
from dcpc.commands.simulate.barriers.workload import Workload, tabulate
from dcpc.errors import PlanError


def fixed_sp(
    keys: Sequence[int],
    cost: GroupCost,
    degree: int,
    pad_to: Sequence[int] = (),
) -> BatchPlan:
    """Returns packing at one degree and the first setting: best fit, bins of like load together.

    Args:
        keys: one a sequence.
        cost: what it costs.
        degree: of every group.
        pad_to: lengths up to which sequences are padded; none: they are not.

    Raises:
        PlanError: a sequence does not fit at this degree, or is longer than any of `pad_to`.
    """
    work = tabulate([_padded(key, pad_to) for key in keys], cost)
    draft = _fixed(work, list(cost.degrees).index(degree), 0)
    if draft is None:
        raise PlanError(
            f"fixed SP: a sequence of this batch does not fit at sp={degree}, "
            f"setting {cost.settings[0]}; use a larger degree or more recompute"
        )
    return finish(work, draft, lower_bound(work))


def best_homogeneous(keys: Sequence[int], cost: GroupCost) -> BatchPlan:
    """Returns the best of `fixed_sp` over all power-of-two degrees and settings for this batch.

    Raises:
        PlanError: some sequence fits at no such degree.
    """
    work = tabulate(keys, cost)
    best = homogeneous_draft(work)
    if best is None:
        raise PlanError(
            "homogeneous SP: no power-of-two degree holds every sequence of this batch; "
            "allow a larger degree or more recompute"
        )
    return finish(work, best, lower_bound(work))


def homogeneous_draft(work: Workload) -> Draft | None:
    """Returns the best draft of one power-of-two degree and setting; None if there is none."""
    cost = work.cost
    drafts = [
        draft
        for i, degree in enumerate(cost.degrees)
        if degree & (degree - 1) == 0
        for setting in range(len(cost.settings))
        for pack in (_fixed, _balanced)
        if (draft := pack(work, i, setting)) is not None
    ]
    return min(drafts, key=lambda draft: draft.seconds_s(work), default=None)


def first_fit(keys: Sequence[int], cost: GroupCost) -> BatchPlan:
    """Returns each sequence, longest first, in the first group with memory at its least degree."""
    work = tabulate(keys, cost)
    return finish(work, first_fit_draft(work), lower_bound(work))


def first_fit_draft(work: Workload) -> Draft:
    """Returns the draft of `first_fit`."""
    draft, free, rooms = Draft(), [_all_free(work)], Rooms()
    begin: dict[int, int] = {}
    for kind in range(len(work.keys)):
        degree, setting = _least_degree(work, kind)

        def takes(group: int, kind: int = kind) -> bool:
            return draft.cost[group][kind] < inf

        for _ in range(int(work.counts[kind])):
            weight = float(work.weights[kind])
            group = rooms.first(weight, takes) if weight else None
            if group is None:
                group = _first_free(work, draft, free, begin, degree, setting)
            draft.add(group, kind, weight)
            rooms.set(group, draft.room[group])
    return draft


def random_fill(keys: Sequence[int], cost: GroupCost) -> BatchPlan:
    """Returns VideoSys-like steps: groups of random SP classes, accumulation to equal time.

    A class is all sequences of one least degree. Until the ranks of a micro-step are full, a class
    is drawn at random and the next of its sequences opens a group; then every group accumulates
    sequences of its class up to the time of the slowest.
    """
    work = tabulate(keys, cost)
    draw = random.Random(0)
    classes: dict[tuple[int, int], list[int]] = {}
    for kind in range(len(work.keys)):
        classes.setdefault(_least_degree(work, kind), []).extend([kind] * int(work.counts[kind]))
    for kinds in classes.values():
        draw.shuffle(kinds)
    draft = Draft()
    step = 0
    while any(classes.values()):
        free = _all_free(work)
        opened: list[tuple[int, list[int]]] = []
        choice = [c for c, kinds in classes.items() if kinds]
        while choice:
            degree, setting = draw.choice(choice)
            first = free.take(int(work.degrees[degree]))
            if first is None or not classes[degree, setting]:
                choice.remove((degree, setting))
                continue
            kinds = classes[degree, setting]
            group = _open(work, draft, step, first, degree, setting)
            draft.add(group, kinds[-1], float(work.weights[kinds.pop()]))
            opened.append((group, kinds))
        _accumulate(work, draft, opened)
        step += 1
    return finish(work, draft, lower_bound(work))


BASELINES: dict[str, Callable[[Sequence[int], GroupCost], BatchPlan]] = {
    "best homogeneous SP per batch": best_homogeneous,
    "first fit": first_fit,
    "random fill (VideoSys)": random_fill,
}


def _padded(key: int, pad_to: Sequence[int]) -> int:
    if not pad_to:
        return key
    longer = [length for length in pad_to if length >= key]
    if not longer:
        raise PlanError(
            f"padding: a sequence of {key} tokens is longer than every bucket of {list(pad_to)}; "
            "add a bucket"
        )
    return min(longer)


def _fixed(work: Workload, degree: int, setting: int) -> Draft | None:
    """Best fit into groups of one degree; None if a sequence does not fit."""
    seconds_s = work.seconds[setting, degree].tolist()
    if max(seconds_s) == inf:
        return None
    capacity = float(work.capacities[setting, degree])
    weights = work.weights.tolist()
    bins: list[list[int]] = []
    rooms: list[tuple[float, int]] = []  # ascending (room, bin)
    for kind in range(len(work.keys)):
        for _ in range(int(work.counts[kind])):
            at = bisect_left(rooms, (weights[kind], -1))
            if at == len(rooms) or weights[kind] == 0:
                bins.append([])
                room, b = capacity, len(bins) - 1
            else:
                room, b = rooms.pop(at)
            bins[b].append(kind)
            insort(rooms, (room - weights[kind], b))
    bins.sort(key=lambda kinds: -sum(seconds_s[k] for k in kinds))
    draft, free = Draft(), [_all_free(work)]
    for kinds in bins:
        first = free[-1].take(int(work.degrees[degree]))
        if first is None:
            free.append(_all_free(work))
            first = free[-1].take(int(work.degrees[degree]))
        assert first is not None, "a whole cluster has room for one group"
        group = _open(work, draft, len(free) - 1, first, degree, setting)
        for kind in kinds:
            draft.add(group, kind, weights[kind])
    return draft


def _balanced(work: Workload, degree: int, setting: int) -> Draft | None:
    """Longest first into the least loaded of the fewest groups; None if memory does not allow."""
    if not np.isfinite(work.seconds[setting, degree]).all():
        return None
    ranks = int(work.degrees[degree])
    side_by_side = work.ranks // ranks
    capacity = float(work.capacities[setting, degree])
    steps = max(1, math.ceil(float(work.weights @ work.counts) / (capacity * side_by_side)))
    weights = work.weights.tolist()
    draft = Draft()
    heap = []
    for step in range(steps):
        free = _all_free(work)
        while (first := free.take(ranks)) is not None:
            heap.append((0.0, _open(work, draft, step, first, degree, setting)))
    for kind in (k for k, n in enumerate(work.counts.tolist()) for _ in range(n)):
        tried = []
        while heap and draft.room[heap[0][1]] < weights[kind]:
            tried.append(heapq.heappop(heap))
        if not heap:
            return None
        group = heap[0][1]
        draft.add(group, kind, weights[kind])
        heapq.heapreplace(heap, (draft.load_s[group], group))
        for entry in tried:
            heapq.heappush(heap, entry)
    return draft


def _first_free(
    work: Workload,
    draft: Draft,
    free: list[FreeRanks],
    begin: dict[int, int],
    degree: int,
    setting: int,
) -> int:
    """Opens a group in the first micro-step with ranks for it; earlier ones never have any again.

    `begin` is the first micro-step to look at, by degree.
    """
    ranks = int(work.degrees[degree])
    step = begin.get(ranks, 0)
    while True:
        if step == len(free):
            free.append(_all_free(work))
        if (first := free[step].take(ranks)) is not None:
            begin[ranks] = step
            return _open(work, draft, step, first, degree, setting)
        step += 1


def _accumulate(work: Workload, draft: Draft, opened: list[tuple[int, list[int]]]) -> None:
    """Fills each group from its class up to the slowest group's time or its memory."""
    slowest_s = max(draft.load_s[group] for group, _ in opened)
    for group, kinds in opened:
        while kinds:
            kind = kinds[-1]
            weight = float(work.weights[kind])
            if (
                draft.load_s[group] + draft.cost[group][kind] > slowest_s * (1 + 1e-9)
                or weight > draft.room[group]
            ):
                break
            draft.add(group, kinds.pop(), weight)


def _least_degree(work: Workload, kind: int) -> tuple[int, int]:
    """The smallest degree (index) at which a kind fits, and its fastest setting there."""
    for degree in range(len(work.degrees)):
        seconds = work.seconds[:, degree, kind]
        if seconds.min() < inf:
            return degree, int(seconds.argmin())
    raise AssertionError("tabulate refuses a batch with a sequence that fits nowhere")


def _all_free(work: Workload) -> FreeRanks:
    return FreeRanks.all(work.ranks, work.cost.node_ranks)


def _open(work: Workload, draft: Draft, step: int, first: int, degree: int, setting: int) -> int:
    return draft.open(work, step, first, degree, setting, work.seconds[setting, degree].tolist())
