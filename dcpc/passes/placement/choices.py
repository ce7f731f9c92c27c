"""One way to split a whole model, and its cost at any sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from dcpc.ir import OUTSIDE, Fold
from dcpc.passes.placement.label_costs import FREE, WHOLE, Costs, Indices, Prices
from dcpc.passes.placement.node_options import PlacementModel
from dcpc.passes.placement.state_graph import REPLICATED, change_between
from dcpc.passes.sharding.rule_types import is_ring


@dataclass(frozen=True, slots=True)
class PlacementChoice:
    """One option for every node, with its costs as indices into the catalogue.

    Attributes:
        options: index of the chosen alternative of each variable of the model.
        works: catalogue indices of the work.
        work_counts: number of times that each work is done.
        changes: catalogue indices of label changes: collectives and slices.
        change_counts: number of times that each change is made.
        splits: catalogue indices of the shares that must be less than the whole.
        least: smallest number of elements in a split dim of which each rank needs one; the largest
            sp.
        rings: number of ranks that share rows, for each ring.
    """

    options: tuple[int, ...]
    works: Indices
    work_counts: Costs
    changes: Indices
    change_counts: Costs
    splits: Indices
    least: int
    rings: tuple[int, ...]

    def cost(self, prices: Prices, shares: Costs, sp: int) -> float:
        """Returns the seconds at the sizes of these prices, or inf if it cannot be used."""
        usable = bool((shares[self.splits] < 1.0).all()) and sp <= self.least
        if not usable or not all(is_ring(across, sp) for across in self.rings):
            return inf
        works = float(prices.works_s[self.works] @ self.work_counts)
        return works + float(prices.changes_s[self.changes] @ self.change_counts)


def choice_of(model: PlacementModel, fold: Fold | None, options: Sequence[int]) -> PlacementChoice:
    """Returns a choice with its indices. Prices that cover its changes must be made afterwards."""
    nodes = model.nodes
    chosen = [model.kinds[k].options[o] for k, o in zip(nodes.kinds, options, strict=True)]
    counts = [1 if fold is None else fold.count(name) for name in nodes.names]
    outside = [fold is not None and fold.copy(name) == OUTSIDE for name in nodes.names]
    wanted: list[dict[int, list[int]]] = [{} for _ in chosen]  # label -> counts of who wants it
    for node, sources in enumerate(nodes.sources):
        for position, source in enumerate(sources):
            want = chosen[node].operands[position]
            count = counts[node] if outside[source] else counts[source]
            wanted[source].setdefault(want, []).append(count)
    changes: dict[int, int] = {}
    works: dict[int, int] = {}
    for node, (kind, option) in enumerate(zip(nodes.kinds, chosen, strict=True)):
        works[option.work] = works.get(option.work, 0) + counts[node]
        if model.kinds[kind].is_output:
            wanted[node].setdefault(REPLICATED, [counts[node]])
        for want, each in wanted[node].items():
            change = change_between(model.kinds[kind], model.catalogue, option.output, want)
            # paid by each that wants it, or once by the value for all of them
            once = min(sum(each), counts[node]) if len(each) > 1 else each[0]
            if change != FREE:
                changes[change] = changes.get(change, 0) + once
    cut = {o.split for o, i in zip(chosen, options, strict=True) if i and o.split != WHOLE}
    least = [o.least for o in chosen if o.least >= 0]
    return PlacementChoice(
        options=tuple(options),
        works=np.array([*works], np.intp),
        work_counts=np.array([*works.values()], np.float64),
        changes=np.array([*changes], np.intp),
        change_counts=np.array([*changes.values()], np.float64),
        splits=np.array(sorted(cut), np.intp),
        least=min(least, default=1 << 62),
        rings=tuple(sorted({o.across for o in chosen if o.across})),
    )
