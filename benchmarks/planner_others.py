"""Planners of mixed groups as FlexSP, FCP and Megatron publish theirs, on a formula.

    FlexSP    sequences sorted and cut into micro-batches of consecutive lengths, the largest of
              which has as few tokens as can be; lengths of each in buckets of least padding; how
              many groups of each power of two there are, and which sequences they take, by a MILP
    FCP       sequences of a micro-batch, longest first, into the fullest group with room; a group
              has as many ranks as its first sequence needs; then dynamic programming deals all
              ranks to the groups, any number to each
    Megatron  dynamic context parallelism: sequences, longest first, each in the group, or in a new
              one of any power of two, that raises the largest workload least

All ranks wait after each micro-batch, as others then share a group. Written from the papers and
from what their public code does, without it: arXiv 2412.01523 and the branch flexsp of
PKU-DAIR/Hetu-Galvatron; arXiv 2602.21788; `next_hdp_group_packing_aware` of NVIDIA/Megatron-LM.
What is simpler here is said at each function.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate, islice, takewhile

import numpy as np
import numpy.typing as npt
from scipy.optimize import Bounds, LinearConstraint, milp

from dcpc.commands.simulate.formula import LinearCost
from dcpc.commands.simulate.packers import best_fit, in_rounds
from dcpc.runtime.planner.plans import StepPlan

Integers = npt.NDArray[np.int64]
Groups = list[tuple[int, list[int]]]  # degree, positions in the batch

# FlexSP: numbers of micro-batches that are tried, from the least on, and buckets of lengths.
CHUNKINGS, BUCKETS = 4, 16
# Seconds of one MILP, and how often the seconds of a micro-batch are halved in.
MILP_LIMIT_S, HALVINGS = 0.5, 8
# Megatron: by how much workloads may exceed the largest that a group of the longest length has.
WORKLOAD_SLACK = 0.05
_ROUNDING = 1e-9


def flexsp(lengths: Sequence[int], cost: LinearCost, chunkings: int = CHUNKINGS) -> StepPlan:
    """Returns FlexSP's plan.

    FlexSP's MILP has a variable for each candidate group and is stopped after five seconds. Here
    groups of one degree are alike: for a given end of the micro-batch, which is halved in, the MILP
    has how many groups of a degree there are, and how many sequences of a bucket they take. Within
    a degree sequences go, longest first, to the group with least to do.

    Args:
        lengths: tokens of each sequence.
        cost: what it costs.
        chunkings: numbers of micro-batches to try.
    """
    plans: list[StepPlan] = []
    for tried, chunks in enumerate(_chunkings(lengths, cost), 1):
        found = list(takewhile(bool, (_solved(lengths, chunk, cost) for chunk in chunks)))
        if len(found) == len(chunks):
            plans.append(_plan(lengths, cost, found))
        if plans and tried >= chunkings:
            break
    return min(plans, key=lambda plan: plan.makespan_s)


def fcp(lengths: Sequence[int], cost: LinearCost) -> StepPlan:
    """Returns FCP's plan.

    How the paper fills micro-batches was not to be read; here they are FlexSP's, or one packing's
    groups, best fit first, whichever ends first.

    Args:
        lengths: tokens of each sequence.
        cost: what it costs.
    """
    whole = _packed(lengths, range(len(lengths)), cost)
    bins = best_fit([degree for degree, _ in whole], cost.ranks)
    tried = [[[whole[g] for g in own] for own in bins]]
    for chunks in islice(_chunkings(lengths, cost), CHUNKINGS):
        tried.append([_packed(lengths, chunk, cost) for chunk in chunks])
    plans = [
        _plan(lengths, cost, [widened(lengths, groups, cost) for groups in packed])
        for packed in tried
        if max(sum(degree for degree, _ in groups) for groups in packed) <= cost.ranks
    ]
    return min(plans, key=lambda plan: plan.makespan_s)


def dynamic_cp(lengths: Sequence[int], cost: LinearCost) -> StepPlan:
    """Returns the plan of Megatron's dynamic context parallelism; workloads are squares.

    Args:
        lengths: tokens of each sequence.
        cost: what it costs.
    """
    left = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    micro_batches = []
    while left:
        groups, left = _next_micro_batch(lengths, left, cost)
        micro_batches.append(groups)
    return _plan(lengths, cost, micro_batches)


PLANNERS: dict[str, Callable[[Sequence[int], LinearCost], StepPlan]] = {
    "dynamic context parallelism (Megatron)": dynamic_cp, "FCP": fcp, "FlexSP": flexsp,
}  # fmt: skip
QUICK_PLANNERS = {**PLANNERS, "FlexSP": partial(flexsp, chunkings=2)}


def _plan(lengths: Sequence[int], cost: LinearCost, micro_batches: Sequence[Groups]) -> StepPlan:
    steps = [[(degree, 0, own) for degree, own in groups] for groups in micro_batches]
    return in_rounds(lengths, cost, steps)


def _powers(cost: LinearCost, tokens: int) -> list[int]:
    """Powers of two at which a sequence fits."""
    powers = (1 << i for i in range(cost.ranks.bit_length()))
    return [d for d in powers if d * cost.tokens() >= tokens]


def _seconds_s(lengths: Sequence[int], own: Sequence[int], degree: int, cost: LinearCost) -> float:
    return sum(cost.load_s(lengths[i], degree) for i in own)


def _chunkings(lengths: Sequence[int], cost: LinearCost) -> Iterator[list[list[int]]]:
    """Yields cuts of the sorted sequences into ever more micro-batches that all ranks hold."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    most = cost.tokens() * cost.ranks
    for number in range(max(1, math.ceil(sum(lengths) / most)), len(lengths) + 1):
        low, high = max(lengths), sum(lengths)
        while low < high:  # the fewest tokens at which there are no more parts
            middle = (low + high) // 2
            if len(_cut(lengths, order, middle)) <= number:
                high = middle
            else:
                low = middle + 1
        if low <= most:
            yield _cut(lengths, order, low)


def _cut(lengths: Sequence[int], order: Sequence[int], most: int) -> list[list[int]]:
    """Consecutive parts of at most so many tokens."""
    parts: list[list[int]] = []
    tokens = most
    for i in order:
        tokens += lengths[i]
        if tokens > most:
            parts.append([])
            tokens = lengths[i]
        parts[-1].append(i)
    return parts


def bucketed(sizes: Sequence[int], count: int, most: float = math.inf) -> list[range]:
    """Returns positions of ascending sizes in buckets, padded least to the last size of each.

    Args:
        sizes: of the sequences.
        count: of buckets; more of them where padding would be more than `most`.
        most: tokens of padding.
    """
    number = len(sizes)
    total = np.array([0, *accumulate(sizes)], dtype=np.float64)
    at = np.arange(number + 1)
    padding = np.array(sizes) * (at[1:] - at[:-1, None]) - (total[1:] - total[:-1, None])
    padding[at[1:] <= at[:-1, None]] = np.inf
    least = np.full(number + 1, np.inf)
    least[0] = 0.0
    begins = []
    while len(begins) < number and (len(begins) < count or least[-1] > most):
        each = least[:-1, None] + padding
        begins.append(each.argmin(axis=0))
        least = np.array([np.inf, *each.min(axis=0)])
    buckets, end = [], number
    for begin in reversed(begins):
        first = int(begin[end - 1])
        buckets.append(range(first, end))
        end = first
    return buckets[::-1]


def _solved(lengths: Sequence[int], chunk: Sequence[int], cost: LinearCost) -> Groups:
    """FlexSP's groups of a micro-batch; none: no end was found by which groups have room."""
    order = sorted(chunk, key=lambda i: lengths[i])
    sizes = [lengths[i] for i in order]
    most = (cost.tokens() * cost.ranks - sum(sizes)) / 2  # as in FlexSP's code
    buckets = [[order[p] for p in own] for own in bucketed(sizes, BUCKETS, most)]
    longest = [lengths[own[-1]] for own in buckets]
    alone_s = [[cost.load_s(n, d) for d in _powers(cost, n)] for n in longest]
    low_s = max(map(min, alone_s))
    high_s = sum(max(s) * len(own) for s, own in zip(alone_s, buckets, strict=True))
    best: Groups = []
    for _ in range(HALVINGS):
        middle_s = math.sqrt(low_s * high_s)
        counts = _counted(longest, [len(own) for own in buckets], cost, middle_s)
        groups = [] if counts is None else _distributed(lengths, buckets, counts, cost)
        if not groups:
            low_s = middle_s
            continue
        best, high_s = groups, middle_s
    return best


def _counted(
    longest: Sequence[int], sizes: Sequence[int], cost: LinearCost, end_s: float
) -> tuple[Integers, Integers] | None:
    """Sequences of each bucket at each degree, and groups of each degree, that end in time."""
    degrees = np.array(_powers(cost, 0))
    k, p = len(longest), len(degrees)
    tokens = np.array(longest, dtype=np.float64)
    load_s = np.array([[cost.load_s(n, int(d)) for d in degrees] for n in longest])
    fits = (tokens[:, None] <= degrees * cost.tokens()) & (load_s <= end_s * (1 + _ROUNDING))
    wanted = np.hstack([np.kron(np.eye(k), np.ones(p)), np.zeros((k, p))])
    room = np.hstack([*(n * np.eye(p) for n in tokens), -np.diag(degrees * cost.tokens())])
    time = np.hstack([*(np.diag(row / end_s) for row in load_s), -np.eye(p)])
    ranks = np.hstack([np.zeros(k * p), degrees])
    most = [*np.where(fits, np.array(sizes)[:, None], 0).ravel(), *cost.ranks // degrees]
    found = milp(
        np.zeros(k * p + p), integrality=np.ones(k * p + p), bounds=Bounds(0, most),
        constraints=[
            LinearConstraint(wanted, sizes, sizes), LinearConstraint(np.vstack([room, time]), ub=0),
            LinearConstraint(ranks, ub=cost.ranks),
        ],
        options={"time_limit": MILP_LIMIT_S},
    )  # fmt: skip
    if found.x is None:
        return None
    whole = np.round(found.x).astype(np.int64)
    return whole[: k * p].reshape(k, p), whole[k * p :]


def _distributed(
    lengths: Sequence[int], buckets: Sequence[Sequence[int]], counts: tuple[Integers, Integers],
    cost: LinearCost,
) -> Groups:  # fmt: skip
    """Sequences in groups, longest first in the one with least to do; none: one has no room."""
    left = [list(bucket) for bucket in buckets]
    found: Groups = []
    for at, degree in reversed(list(enumerate(_powers(cost, 0)))):
        own: Groups = [(degree, []) for _ in range(int(counts[1][at]))]
        loads, rooms = [0.0] * len(own), [cost.tokens() * degree] * len(own)
        for bucket, number in reversed(list(zip(left, counts[0][:, at].tolist(), strict=True))):
            for _ in range(number):
                i = bucket.pop()
                having = [g for g, room in enumerate(rooms) if room >= lengths[i]]
                if not having:
                    return []
                group = min(having, key=loads.__getitem__)
                own[group][1].append(i)
                loads[group] += cost.load_s(lengths[i], degree)
                rooms[group] -= lengths[i]
        found += (group for group in own if group[1])
    return found


def _packed(lengths: Sequence[int], chunk: Sequence[int], cost: LinearCost) -> Groups:
    """FCP's groups at their least degrees: longest first, in the fullest group with room."""
    groups: Groups = []
    rooms: list[int] = []
    for i in sorted(chunk, key=lambda i: -lengths[i]):
        having = [(room, g) for g, room in enumerate(rooms) if room >= lengths[i]]
        if having:
            _, group = min(having)
        else:
            group, degree = len(groups), -(-lengths[i] // cost.tokens())
            groups.append((degree, []))
            rooms.append(degree * cost.tokens())
        groups[group][1].append(i)
        rooms[group] -= lengths[i]
    return groups


def widened(lengths: Sequence[int], groups: Groups, cost: LinearCost) -> Groups:
    """Returns the same groups, with ranks dealt to them so that the last one ends earliest.

    Args:
        lengths: tokens of each sequence.
        groups: at their least degrees.
        cost: what a sequence costs.
    """
    count = cost.ranks + 1
    end_s = np.array([0.0, *[np.inf] * cost.ranks])  # of the groups so far, by ranks they have
    chosen = []
    for degree, own in groups:
        best_s, taken = np.full(count, np.inf), np.zeros(count, dtype=np.int64)
        for d in range(degree, count):
            then_s = np.maximum(end_s[: count - d], _seconds_s(lengths, own, d, cost))
            taken[d:] = np.where(then_s < best_s[d:], d, taken[d:])
            best_s[d:] = np.minimum(then_s, best_s[d:])
        end_s = best_s
        chosen.append(taken)
    left, found = int(end_s.argmin()), list[tuple[int, list[int]]]()
    for (_, own), taken in zip(reversed(groups), reversed(chosen), strict=True):
        found.append((int(taken[left]), own))
        left -= int(taken[left])
    return found[::-1]


def _next_micro_batch(
    lengths: Sequence[int], order: Sequence[int], cost: LinearCost
) -> tuple[Groups, list[int]]:
    """Megatron's next micro-batch, and the sequences that are left."""
    most = lengths[order[0]] * cost.tokens() * (1 + WORKLOAD_SLACK)
    groups: Groups = []
    works: list[float] = []
    rooms: list[int] = []
    free, left = cost.ranks, []
    for i in order:
        n = lengths[i]
        largest = max(works, default=0.0)
        places = []
        for degree in _powers(cost, n)[: None if groups else 1]:
            work = n * n / degree
            for g, (other, _) in enumerate(groups):
                if other == degree and rooms[g] >= n:
                    places.append((max(largest, works[g] + work), g, degree))
            if free >= degree:
                places.append((max(largest, work), len(groups), degree))
        raised, g, degree = min(places, key=lambda p: p[0], default=(math.inf, 0, 0))
        if raised > most:
            left.append(i)
            continue
        if g == len(groups):
            groups.append((degree, []))
            works.append(0.0)
            rooms.append(degree * cost.tokens())
            free -= degree
        groups[g][1].append(i)
        works[g] += n * n / degree
        rooms[g] -= n
    while free and free >= min(degree for degree, _ in groups):
        g = min(range(len(groups)), key=lambda g: groups[g][0])
        free -= groups[g][0]
        groups[g] = 2 * groups[g][0], groups[g][1]
    return groups, left
