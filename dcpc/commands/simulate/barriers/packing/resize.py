"""The best degrees of groups whose sequences are given; with it exact plans of tiny batches."""

from collections.abc import Iterator, Sequence

import numpy as np

from dcpc.commands.simulate.barriers.costs import FloatArray, IntArray
from dcpc.commands.simulate.barriers.packing.pack import Draft
from dcpc.commands.simulate.barriers.packing.ranks import FreeRanks
from dcpc.commands.simulate.barriers.workload import Workload

TINY = 7  # sequences: all 4,140 set partitions of all subsets are tried
RETRIES = 6  # further loads at which to look for an arrangement inside nodes


def fit_step(
    work: Workload, groups: Sequence[Sequence[int]]
) -> tuple[float, list[tuple[int, int, int]]] | None:
    """Returns least load of a micro-step, and (first rank, degree, setting) of each group.

    The least load is exact: every group takes the fewest ranks at which it ends by it. None if they
    fit at no load.

    Args:
        work: the batch.
        groups: the kinds that each group runs.
    """
    seconds = _group_seconds(work, groups)
    fastest = seconds.min(axis=1)
    least = np.minimum.accumulate(fastest, axis=1)
    loads_s = np.unique(least[np.isfinite(least)])
    loads_s = loads_s[loads_s >= least[:, -1].max()]
    low, high = -1, len(loads_s)
    while high - low > 1:
        middle = (low + high) // 2
        need = work.degrees[_first(least, loads_s[middle])].sum()
        low, high = (low, middle) if need <= work.ranks else (middle, high)
    for load_s in loads_s[high : high + RETRIES].tolist():
        degrees = _first(least, load_s).tolist()
        if (first := _arrange(work, degrees)) is not None:
            settings = [int(seconds[g, :, d].argmin()) for g, d in enumerate(degrees)]
            return load_s, list(zip(first, degrees, settings, strict=True))
    return None


def resize(work: Workload, draft: Draft) -> Draft:
    """Returns the draft with the best degrees for what its groups run, or as it is."""
    out = Draft()
    for step, longest_s in draft.longest_s().items():
        members = [g for g in range(len(draft.step)) if draft.step[g] == step and draft.kinds[g]]
        groups = [draft.kinds[g] for g in members]
        found = fit_step(work, groups)
        if found is not None and found[0] < longest_s:
            placed = found[1]
        else:
            placed = [(draft.first[g], draft.degree[g], draft.setting[g]) for g in members]
        add_step(work, out, step, groups, placed)
    return out if out.seconds_s(work) < draft.seconds_s(work) else draft


def exact(work: Workload) -> Draft | None:
    """Returns the best draft of a tiny batch by trying all; None if the batch is not tiny."""
    items = [k for k, n in enumerate(work.counts.tolist()) for _ in range(n)]
    if len(items) > TINY:
        return None
    steps = {mask: _least_step(work, items, mask) for mask in range(1, 2 ** len(items))}
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}
    for mask in range(1, 2 ** len(items)):
        lowest = mask & -mask
        options = []
        part = mask
        while part:
            if part & lowest and steps[part] is not None:
                before_s, before = best[mask ^ part]
                load_s = steps[part][0] + work.cost.fixed_s  # type: ignore[index]
                options.append((before_s + load_s, [*before, part]))
            part = (part - 1) & mask
        best[mask] = min(options)
    draft = Draft()
    for number, part in enumerate(best[2 ** len(items) - 1][1]):
        found = steps[part]
        assert found is not None, "only micro-steps that exist are chosen"
        add_step(work, draft, number, found[1], found[2])
    return draft


def add_step(
    work: Workload,
    draft: Draft,
    step: int,
    groups: Sequence[Sequence[int]],
    placed: Sequence[tuple[int, int, int]],
) -> None:
    """Adds groups of given kinds at (first rank, degree, setting) to a draft."""
    for kinds, (first, degree, setting) in zip(groups, placed, strict=True):
        cost = work.seconds[setting, degree].tolist()
        group = draft.open(work, step, first, degree, setting, cost)
        for kind in kinds:
            draft.add(group, kind, float(work.weights[kind]))


Step = tuple[float, list[list[int]], list[tuple[int, int, int]]]


def _least_step(work: Workload, items: list[int], mask: int) -> Step | None:
    chosen = [kind for i, kind in enumerate(items) if mask >> i & 1]
    best: Step | None = None
    for groups in partitions(chosen):
        found = fit_step(work, groups)
        if found is not None and (best is None or found[0] < best[0]):
            best = (found[0], groups, found[1])
    return best


def partitions(items: Sequence[int]) -> Iterator[list[list[int]]]:
    """Every way to split the items into parts."""
    if not items:
        yield []
        return
    for parts in partitions(items[1:]):
        yield [[items[0]], *parts]
        for i, part in enumerate(parts):
            yield [*parts[:i], [items[0], *part], *parts[i + 1 :]]


def _group_seconds(work: Workload, groups: Sequence[Sequence[int]]) -> FloatArray:
    """Seconds of each group, [group, setting, degree]; inf where memory is short."""
    flat = [kind for group in groups for kind in group]
    starts = np.cumsum([0, *(len(group) for group in groups[:-1])])
    seconds = np.add.reduceat(work.seconds[:, :, flat], starts, axis=2)
    weights = np.add.reduceat(work.weights[flat], starts)
    seconds[:, :, :][weights[None, None, :] > work.capacities[:, :, None]] = np.inf
    return np.ascontiguousarray(np.moveaxis(seconds, 2, 0))


def _first(least: FloatArray, load_s: float) -> IntArray:
    """The smallest degree (index) of each group that ends by `load_s`."""
    index: IntArray = (least <= load_s).argmax(axis=1)
    return index


def _arrange(work: Workload, degrees: list[int]) -> list[int] | None:
    """First rank of each group, the largest placed first; None if nodes do not allow it."""
    free = FreeRanks.all(work.ranks, work.cost.node_ranks)
    out = [0] * len(degrees)
    for g in sorted(range(len(degrees)), key=lambda g: -degrees[g]):
        first = free.take(int(work.degrees[degrees[g]]))
        if first is None:
            return None
        out[g] = first
    return out
