"""Decides, exactly, how every value is split: sequence parallelism as a minimum of predicted time.

Each node takes one of its alternatives (replicated, a piece of one factor, a partial sum). It costs
the time of its fullest rank, forward and backward. Where a consumer wants another label than the
value has, the change costs a collective and, if the value has a gradient, its transpose as well.
Nothing here names a model or a scheme: Ulysses, DSP and gathered keys come out of the costs.

**Exact**: the minimum, over all alternatives of all nodes at once, of the sum of these costs, where
a value that several consumers want alike is changed once (`state_graph.py` says how; it equals a
MILP with a yes/no variable for each value and label). That is also what the lowering does. Pieces
may differ by one element: the fullest rank is counted.

**Restricted**: a value has one label as made, and is changed from that one alone (never from a form
that another consumer had it changed to). At most one factor of a value is split, over all ranks.
Values made of inputs and positions alone (masks, rotary tables) are cut but never sent. Costs add
up: no overlap of collectives with compute, no fusion of ops.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain, pairwise, repeat
from math import inf

import numpy as np

from dcpc.errors import PlanError
from dcpc.fx.garbage import without_collection
from dcpc.ir import OUTSIDE, Fold, NodePlacement, Placement, Program
from dcpc.passes.placement.alike_copies import AlikeCopies
from dcpc.passes.placement.elimination import CostNetwork, ForbiddenError, Solution, WideError
from dcpc.passes.placement.label_costs import Costs, Prices
from dcpc.passes.placement.near_ties import NearTies
from dcpc.passes.placement.node_options import PlacementModel
from dcpc.passes.placement.objective import Objective
from dcpc.passes.placement.state_graph import StateGraph
from dcpc.passes.sharding.sharding import Sharding

__all__ = ["Best", "Objective", "PlacementModel", "place", "placed", "solve"]

MOST_TOGETHER = 16  # buckets: more gain little, and tables have an entry for each
MOST_HELD = 3  # variables held at each of their labels where joint tables grow too large


def place(
    program: Program,
    sharding: Sharding,
    sizes: Mapping[str, int],
    sp: int,
    objective: Objective,
    model: PlacementModel | None = None,
    fold: Fold | None = None,
    near: NearTies | None = None,
) -> Placement:
    """Returns the placement of least predicted time for one bucket's sizes.

    Args:
        program: the traced model.
        sharding: factors and alternatives of the program.
        sizes: length of every named dim, batch included.
        sp: number of ranks in the group.
        objective: quantity to minimise.
        model: placement model prepared from the two before, for several buckets; None: prepared
            here.
        fold: copies of blocks that stand for more of them; their costs are multiplied. If the
            optimum breaks a tie differently in each copy, the cheapest of four solutions in which
            all copies agree is used.
        near: earlier choices of the model, of which one is reused where it costs hardly more; None:
            the optimum.
    """
    model = PlacementModel(program, sharding) if model is None else model
    assert model.sharding is sharding, "the prepared model is of another analysis"
    copies = None if near is None else near.copies
    (best,) = solve(program, [sizes], sp, objective, model, fold, copies)
    return placed(best, model, near)


@dataclass(frozen=True, slots=True)
class Best:
    """The optimum of one bucket.

    Attributes:
        sp: number of ranks in the group.
        objective: quantity that was minimised.
        numbers: every size in the catalogue.
        shares: every share in the catalogue.
        options: index of the chosen alternative of each node.
        cost_s: cost of these options.
        width: induced width of the elimination.
    """

    sp: int
    objective: Objective
    numbers: Costs
    shares: Costs
    options: tuple[int, ...]
    cost_s: float
    width: int


def solve(
    program: Program,
    buckets: Sequence[Mapping[str, int]],
    sp: int,
    objective: Objective,
    model: PlacementModel,
    fold: Fold | None = None,
    copies: AlikeCopies | None = None,
) -> list[Best]:
    """Returns the optima of some buckets, solved together.

    Args:
        program: the traced model.
        buckets: for each bucket the length of every named dim, batch included.
        sp: number of ranks in the group.
        objective: quantity to minimise.
        model: placement model of the program and its sharding.
        fold: see `place`.
        copies: copies of the model's blocks under the fold; None: prepared here.
    """
    catalogue = model.catalogue
    alike: dict[int, tuple[StateGraph, list[int]]] = {}
    sizes, found = [], {}
    with without_collection():  # the cyclic collector walks a deep model's graphs meanwhile
        for bucket, lengths in enumerate(buckets):
            numbers = catalogue.numbers(program.dims(lengths))
            sizes.append((numbers, catalogue.shares(numbers, sp)))
            graph = model.graph(sizes[-1][1], sp)
            alike.setdefault(id(graph), (graph, []))[1].append(bucket)
        for graph, members in alike.values():
            for first in range(0, len(members), MOST_TOGETHER):
                some = members[first : first + MOST_TOGETHER]
                prices = [catalogue.prices(*sizes[m], sp, objective) for m in some]
                for member, solution in zip(some, _solved(model, graph, prices, fold), strict=True):
                    pairs = zip(model.names, solution.labels, graph.classes, strict=False)
                    options = tuple(graph.options[states][label] for _, label, states in pairs)
                    best = Best(
                        sp, objective, *sizes[member], options, solution.cost, solution.width
                    )
                    found[member] = best
    bests = [found[bucket] for bucket in range(len(buckets))]
    if fold is None or sp == 1:
        return bests
    copies = copies or AlikeCopies(model, fold)
    return [_handing_on_alike(best, copies) for best in bests]


def _solved(
    model: PlacementModel,
    graph: StateGraph,
    prices: Sequence[Prices],
    fold: Fold | None,
    held: Mapping[int, int] | None = None,
) -> list[Solution]:
    """Returns the best labels at some prices; one by one if joint tables grow too large.

    Of one whose tables are too large still, a variable is held at each of its labels in turn, and
    the best of these solutions is the best of all.
    """
    held = held or {}
    try:
        return _network(model, graph, prices, fold, held).minimise_cases()
    except PlanError as error:
        reason = error
    if len(prices) > 1:
        return [s for each in prices for s in _solved(model, graph, [each], fold, held)]
    if not isinstance(reason, WideError) or len(held) == MOST_HELD:
        raise reason
    found = list[Solution]()
    for label in reason.labels:
        with suppress(ForbiddenError):
            found += _solved(model, graph, prices, fold, {**held, reason.variable: label})
    if not found:
        raise reason
    return [min(found, key=lambda solution: solution.cost)]


def _handing_on_alike(best: Best, copies: AlikeCopies) -> Best:
    """Returns the optimum, or the cheapest of four choices in which all copies agree."""
    choices = copies.choices(best.options)
    if not choices:
        return best
    catalogue = copies.model.catalogue
    prices = catalogue.prices(best.numbers, best.shares, best.sp, best.objective)
    costs = [(c.cost(prices, best.shares, best.sp), c.options) for c in choices]
    usable = [each for each in costs if each[0] < inf]
    cost_s, options = min(usable, default=(best.cost_s, best.options))
    return replace(best, cost_s=cost_s, options=options)


def placed(best: Best, model: PlacementModel, near: NearTies | None = None) -> Placement:
    """Returns the placement of a bucket."""
    options, cost_s = best.options, best.cost_s
    if near is not None and best.sp > 1:
        # Made now: those of the changes of all choices that are known.
        prices = model.catalogue.prices(best.numbers, best.shares, best.sp, best.objective)
        options, cost_s = near.instead(options, cost_s, prices, best.shares, best.sp)
    nodes = model.placed(options)
    return Placement(
        sp=best.sp,
        nodes=nodes,
        factors=model.sharding.factors,
        parents=model.sharding.parents,
        cost_s=cost_s,
        width=best.width,
        graph_hash=model.program.graph_hash,
        zigzag=zigzag(nodes, model.sharding),
    )


def zigzag(nodes: Mapping[str, NodePlacement], sharding: Sharding) -> frozenset[int]:
    """Returns the keys of the factors of which each rank gets two chunks, one from either end.

    These are the factors of causal queries: in plain order, the last rank would have nearly twice
    the mean work.
    """
    found = set()
    for name, rule in sharding.rules.items():
        chosen = nodes.get(name)
        if chosen is None or not rule.later or chosen.name not in (rule.later, "ring"):
            continue
        if chosen.output.index == 0:
            factor = sharding.factors[name][chosen.output.dim][0]
            found.add(factor.key if factor.parent < 0 else factor.parent)
    return frozenset(found)


def _network(
    model: PlacementModel,
    graph: StateGraph,
    prices: Sequence[Prices],
    fold: Fold | None,
    held: Mapping[int, int],
) -> CostNetwork:
    works_s = np.stack([p.works_s for p in prices], axis=-1)
    changes_s = np.stack([p.changes_s for p in prices], axis=-1)
    costs = works_s[graph.works] + changes_s[graph.changes].sum(axis=1)
    unaries = [costs[start:end] for start, end in pairwise(graph.bounds)]
    entries = changes_s[graph.tables]
    tables = [
        entries[start : start + rows * columns].reshape(rows, columns, len(prices))
        for start, rows, columns in graph.shapes
    ]
    weights = _Weights(model, graph, fold)
    # Equal tables are one array: the elimination reuses results computed from them.
    weighted = cache(lambda number, count: tables[number] * count)
    of_states = cache(lambda number, count: unaries[number] * count)
    network = CostNetwork(cases=len(prices))
    names = chain(model.names, repeat("a value with two consumers"))
    for variable, (states, name) in enumerate(zip(graph.classes, names, strict=False)):
        costs = of_states(states, weights.of(variable))
        if variable in held:
            other = np.arange(len(costs))[:, None] != held[variable]
            costs = np.where(other, inf, costs)
        network.add_variable(name, costs)
    for producer, consumer, table in graph.edges:
        network.add_edge(producer, consumer, weighted(table, weights.between(producer, consumer)))
    return network


class _Weights:
    """The multiplicity of each cost of a folded program.

    Omitted blocks are split like the middle copy, so its computation and communication count for
    them, too, including what it sends to the last copy, which each of them sends to the next.
    """

    def __init__(self, model: PlacementModel, graph: StateGraph, fold: Fold | None) -> None:
        self._fold = fold
        names = list(model.names)
        self._names = names
        if fold is None:
            return
        for producer, consumer, _ in graph.edges:
            if consumer >= len(names):  # the second variable of a value
                names += [""] * (consumer + 1 - len(names))
                names[consumer] = names[consumer] or names[producer]

    def of(self, variable: int) -> int:
        """Returns the multiplicity of a variable's own cost."""
        return 1 if self._fold is None else self._fold.count(self._names[variable])

    def between(self, producer: int, consumer: int) -> int:
        """Returns the multiplicity of an edge's cost."""
        if self._fold is None:
            return 1
        outside = self._fold.copy(self._names[producer]) == OUTSIDE
        return self.of(consumer if outside else producer)
