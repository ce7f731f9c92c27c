"""Baselines on a formula: the same batch and cost, planned as other systems plan it.

Each gives micro-steps: groups on disjoint ranks, all ranks wait after each (ZeRO-3 gathers and sums
in each). Written from the systems' published descriptions, without their code.
"""

from __future__ import annotations

import heapq
import math
import random
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Sequence

from dcpc.buckets import Bucket
from dcpc.commands.simulate.formula import TOKENS, LinearCost, dcpc_plan
from dcpc.errors import PlanError
from dcpc.runtime.planner.plans import PlannedMicroBatch, StepPlan, step_plan

# Degree, setting and positions in the batch of what runs on a group.
FormulaGroup = tuple[int, int, list[int]]
Planner = Callable[[Sequence[int], LinearCost], StepPlan]


def fixed_sp(
    lengths: Sequence[int], cost: LinearCost, degree: int, pad_to: Sequence[int] = ()
) -> StepPlan:
    """Returns packing at one degree and the first setting: best fit, bins of like load together.

    Args:
        lengths: tokens of each sequence.
        cost: cost formula.
        degree: ranks of every group.
        pad_to: lengths up to which sequences are padded; none: they are not.

    Raises:
        PlanError: a sequence does not fit at this degree, or is longer than any of `pad_to`.
    """
    padded = [min((n for n in pad_to if n >= tokens), default=0) for tokens in lengths]
    if pad_to and not all(padded):
        raise PlanError(
            f"padding: got a sequence of {max(lengths)} tokens; expected at most {max(pad_to)}, "
            "the longest bucket; add a bucket"
        )
    own = padded if pad_to else lengths
    found = _best_fitting(own, cost, degree, 0)
    if found is None:
        raise PlanError(
            f"fixed SP: got a sequence of {max(own)} tokens; expected at most "
            f"{cost.tokens() * degree}, what a group of {degree} ranks holds; use a larger degree"
        )
    return _in_micro_steps(own, cost, found)


def best_homogeneous(lengths: Sequence[int], cost: LinearCost) -> StepPlan:
    """Returns the best plan of one power-of-two degree and setting, best fit or balanced.

    Raises:
        PlanError: some sequence fits at no such degree.
    """
    plans = [
        _in_micro_steps(lengths, cost, groups)
        for degree in cost.degrees
        if degree & (degree - 1) == 0
        for setting in range(len(cost.recompute))
        for pack in (_best_fitting, _balanced)
        if (groups := pack(lengths, cost, degree, setting)) is not None
    ]
    if not plans:
        raise PlanError(
            f"homogeneous SP: got a sequence of {max(lengths)} tokens, which no power-of-two "
            "degree holds; expected one that does; allow a larger degree or more recompute"
        )
    return min(plans, key=lambda plan: plan.makespan_s)


def first_fit(lengths: Sequence[int], cost: LinearCost) -> StepPlan:
    """Returns each sequence, longest first, in the first group with memory at its least degree.

    Raises:
        PlanError: a sequence fits at no degree.
    """
    steps: list[list[FormulaGroup]] = []
    rooms: list[tuple[FormulaGroup, list[int]]] = []
    for i in _longest_first(lengths):
        tokens = lengths[i]
        for group, room in rooms:
            if room[0] >= tokens:
                group[2].append(i)
                room[0] -= tokens
                break
        else:
            degree, setting = _least_degree(cost, tokens)
            group = (degree, setting, [i])
            at = next((s for s in steps if sum(g[0] for g in s) + degree <= cost.ranks), None)
            if at is None:
                steps.append(at := [])
            at.append(group)
            rooms.append((group, [cost.tokens(setting) * degree - tokens]))
    return in_rounds(lengths, cost, steps)


def random_fill(lengths: Sequence[int], cost: LinearCost) -> StepPlan:
    """Returns VideoSys-like steps: groups of random SP classes, accumulation to equal time.

    A class is all sequences of one least degree. Until the ranks of a micro-step are full, a class
    is drawn at random and the next of its sequences opens a group; then every group accumulates
    sequences of its class up to the time of the slowest.

    Raises:
        PlanError: a sequence fits at no degree.
    """
    draw = random.Random(0)
    classes: dict[tuple[int, int], list[int]] = {}
    for i in _longest_first(lengths):
        classes.setdefault(_least_degree(cost, lengths[i]), []).append(i)
    for own in classes.values():
        draw.shuffle(own)
    steps = []
    while any(classes.values()):
        free, step = cost.ranks, list[FormulaGroup]()
        while choice := [c for c, own in classes.items() if own and c[0] <= free]:
            degree, setting = draw.choice(choice)
            step.append((degree, setting, [classes[degree, setting].pop()]))
            free -= degree
        slowest_s = max(_load_s(lengths, cost, group) for group in step)
        for group in step:
            degree, setting, own = group
            waiting = classes[degree, setting]
            while waiting:
                more = (degree, setting, [*own, waiting[-1]])
                held = sum(lengths[i] for i in more[2])
                late = _load_s(lengths, cost, more) > slowest_s * (1 + 1e-9)
                if late or held > cost.tokens(setting) * degree:
                    break
                own.append(waiting.pop())
        steps.append(step)
    return in_rounds(lengths, cost, steps)


def best_fit(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Returns the positions of sizes in bins, largest first into the fullest bin that has room."""
    rooms: list[tuple[int, int]] = []  # ascending (room, bin)
    bins: list[list[int]] = []
    for i in _longest_first(sizes):
        at = bisect_left(rooms, (sizes[i], -1))
        if at == len(rooms):
            bins.append([])
            room, chosen = capacity, len(bins) - 1
        else:
            room, chosen = rooms.pop(at)
        bins[chosen].append(i)
        insort(rooms, (room - sizes[i], chosen))
    return bins


def planners(cost: LinearCost, batches: Sequence[Sequence[int]]) -> dict[str, Planner]:
    """Returns each system by name; fixed SP is the smallest power of two at which all fit."""
    longest = max(max(batch) for batch in batches)
    fits = [d for d in cost.degrees if d & (d - 1) == 0 and cost.tokens(0) * d >= longest]
    if not fits:
        raise PlanError(
            f"fixed SP: got a sequence of {longest} tokens; expected at most "
            f"{cost.tokens(0) * cost.degrees[-1]}, which {cost.ranks} ranks hold; leave it out"
        )
    sp = min(fits)
    powers = [1 << i for i in range(7, longest.bit_length()) if 1 << i < longest]
    return {
        "padded bucket, fixed SP": lambda lens, c: fixed_sp(lens, c, sp, pad_to=[*powers, longest]),
        "packing, fixed SP": lambda lens, c: fixed_sp(lens, c, sp),
        "best homogeneous SP per batch": best_homogeneous,
        "VideoSys random fill": random_fill,
        "first fit": first_fit,
        "dcpc": dcpc_plan,
    }


def plans_of(
    planner: Planner, batches: Sequence[Sequence[int]], cost: LinearCost
) -> Iterator[tuple[StepPlan, Sequence[int]]]:
    """Yields the plan of each batch, and the batch."""
    for batch in batches:
        yield planner(batch, cost), batch


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda i: -lengths[i])


def _least_degree(cost: LinearCost, tokens: int) -> tuple[int, int]:
    """Returns the smallest degree at which a sequence fits, and its fastest setting there."""
    for degree in cost.degrees:
        fits = [i for i in range(len(cost.recompute)) if cost.tokens(i) * degree >= tokens]
        if fits:
            return degree, min(fits, key=lambda i: cost.load_s(tokens, degree, i))
    raise PlanError(
        f"the global batch: got a sequence of {tokens} tokens; expected one that "
        f"{cost.degrees[-1]} ranks hold; leave it out, or allow more recompute"
    )


def _best_fitting(
    lengths: Sequence[int], cost: LinearCost, degree: int, setting: int
) -> list[FormulaGroup] | None:
    """Best fit into groups of one degree, slowest first; None if a sequence does not fit."""
    room = cost.tokens(setting) * degree
    if max(lengths) > room:
        return None
    groups: list[FormulaGroup] = [(degree, setting, own) for own in best_fit(lengths, room)]
    return sorted(groups, key=lambda group: -_load_s(lengths, cost, group))


def _balanced(
    lengths: Sequence[int], cost: LinearCost, degree: int, setting: int
) -> list[FormulaGroup] | None:
    """Longest first into the least loaded of the fewest groups; None if memory does not allow."""
    room, side_by_side = cost.tokens(setting) * degree, cost.ranks // degree
    steps = max(1, math.ceil(sum(lengths) / (room * side_by_side)))
    groups: list[FormulaGroup] = [(degree, setting, []) for _ in range(steps * side_by_side)]
    left = [room] * len(groups)
    heap = [(0.0, number) for number in range(len(groups))]
    for i in _longest_first(lengths):
        full = []
        while heap and left[heap[0][1]] < lengths[i]:
            full.append(heapq.heappop(heap))
        if not heap:
            return None
        load_s, number = heap[0]
        groups[number][2].append(i)
        left[number] -= lengths[i]
        heapq.heapreplace(heap, (load_s + cost.load_s(lengths[i], degree, setting), number))
        for entry in full:
            heapq.heappush(heap, entry)
    return [group for group in groups if group[2]]


def _load_s(lengths: Sequence[int], cost: LinearCost, group: FormulaGroup) -> float:
    degree, setting, own = group
    return sum(cost.load_s(lengths[i], degree, setting) for i in own)


def _in_micro_steps(
    lengths: Sequence[int], cost: LinearCost, groups: Iterable[FormulaGroup]
) -> StepPlan:
    """Groups run side by side in their order."""
    steps: list[list[FormulaGroup]] = [[]]
    for group in groups:
        if sum(g[0] for g in steps[-1]) + group[0] > cost.ranks:
            steps.append([])
        steps[-1].append(group)
    return in_rounds(lengths, cost, steps)


def in_rounds(
    lengths: Sequence[int], cost: LinearCost, steps: Sequence[Sequence[FormulaGroup]]
) -> StepPlan:
    """Returns micro-steps, each of groups on disjoint ranks, after which all ranks wait."""
    placed = (mb for step in steps for mb in _placed(lengths, cost, step))
    return step_plan(tuple(placed), cost.ranks, cost.ranks)


def _placed(
    lengths: Sequence[int], cost: LinearCost, step: Sequence[FormulaGroup]
) -> Iterator[PlannedMicroBatch]:
    first = 0
    for group in sorted(step, key=lambda group: -group[0]):
        degree, setting, own = group
        bucket = Bucket(((TOKENS, cost.tokens(setting) * degree),))
        seconds_s = cost.fixed_s + _load_s(lengths, cost, group)
        ranks = tuple(range(first, first + degree))
        yield PlannedMicroBatch(
            bucket, degree, ranks, tuple(own), seconds_s, 1, setting, rows=(tuple(own),)
        )
        first += degree
