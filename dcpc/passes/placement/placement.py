"""Decides, exactly, how every value is split: sequence parallelism as a minimum of predicted time.

Each node takes one of its alternatives (replicated, a piece of one factor, a partial sum). It costs
the time of its fullest rank, forward and backward. Where a consumer wants another label than the
value has, the change costs a collective and, if the value has a gradient, its transpose as well.
Nothing here names a model or a scheme: Ulysses, DSP and gathered keys come out of the costs.

**Exact**: the least sum of these costs, over all alternatives of all nodes at once, where a value
that several consumers want alike is changed once (`state_graph.py` says how; it equals a MILP with
a yes/no variable for each value and label). That is also what the lowering does. Pieces
may differ by one element: the fullest rank is counted. Of the placements that cost hardly more than
the least, one that sends less is taken (`solve`).

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
from dcpc.passes.placement.choices import PlacementChoice, choice_of
from dcpc.passes.placement.elimination import CostNetwork, ForbiddenError, Solution, WideError
from dcpc.passes.placement.label_costs import Costs, Prices
from dcpc.passes.placement.near_ties import NearTies
from dcpc.passes.placement.node_options import PlacementModel
from dcpc.passes.placement.objective import MOST_FOR_SENDING, Objective
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
    """The chosen options of one bucket.

    Attributes:
        sp: number of ranks in the group.
        objective: quantity that is minimised.
        numbers: every size in the catalogue.
        shares: every share in the catalogue.
        options: index of the chosen alternative of each node.
        cost_s: cost of these options.
        width: induced width of the elimination.
        least_s: least cost of any options.
    """

    sp: int
    objective: Objective
    numbers: Costs
    shares: Costs
    options: tuple[int, ...]
    cost_s: float
    width: int
    least_s: float

    def prices(self, model: PlacementModel, objective: Objective) -> Prices:
        """Returns the costs of everything in the model's catalogue at the bucket's sizes."""
        return model.catalogue.prices(self.numbers, self.shares, self.sp, objective)


def solve(
    program: Program,
    buckets: Sequence[Mapping[str, int]],
    sp: int,
    objective: Objective,
    model: PlacementModel,
    fold: Fold | None = None,
    copies: AlikeCopies | None = None,
) -> list[Best]:
    """Returns the chosen options of some buckets, solved together.

    They are the optimum, or those that send less and cost at most `objective.loss` more, with the
    real starts of collectives, too. These are the optimum with a price on sending: as high as the
    loss allows if all that the first optimum sends were saved.

    Args:
        program: the traced model.
        buckets: for each bucket the length of every named dim, batch included.
        sp: number of ranks in the group.
        objective: quantity to minimise.
        model: placement model of the program and its sharding.
        fold: see `place`.
        copies: copies of the model's blocks under the fold; None: prepared here.
    """
    if fold is not None and sp > 1:
        copies = copies or AlikeCopies(model, fold)
    numbers = [model.catalogue.numbers(program.dims(lengths)) for lengths in buckets]
    sizes = [(each, model.catalogue.shares(each, sp)) for each in numbers]
    optima = _optima(model, [(objective, *each) for each in sizes], sp, fold, copies)
    if sp == 1 or not objective.loss:
        return optima
    choice = cache(lambda options: choice_of(model, fold, options))
    choices = [[choice(best.options)] for best in optima]
    pairs = zip(optima, choices, strict=True)
    asked = [(i, o) for i, (best, own) in enumerate(pairs) for o in _weighted(best, own[0], model)]
    weighted = _optima(model, [(o, *sizes[i]) for i, o in asked], sp, fold, copies)
    for (i, _), best in zip(asked, weighted, strict=True):
        choices[i].append(choice(best.options))
    return [_lightest(best, own, model) for best, own in zip(optima, choices, strict=True)]


def _optima(
    model: PlacementModel,
    asked: Sequence[tuple[Objective, Costs, Costs]],
    sp: int,
    fold: Fold | None,
    copies: AlikeCopies | None,
) -> list[Best]:
    """Returns the optimum for each objective, sizes and shares of the catalogue."""
    alike: dict[int, tuple[StateGraph, list[int]]] = {}
    found: dict[int, Best] = {}
    with without_collection():  # the cyclic collector walks a deep model's graphs meanwhile
        for bucket, (_, _, shares) in enumerate(asked):
            graph = model.graph(shares, sp)
            alike.setdefault(id(graph), (graph, []))[1].append(bucket)
        for graph, members in alike.values():
            for first in range(0, len(members), MOST_TOGETHER):
                some = members[first : first + MOST_TOGETHER]
                at = [asked[m] for m in some]
                prices = [model.catalogue.prices(n, shares, sp, o) for o, n, shares in at]
                for member, solution in zip(some, _solved(model, graph, prices, fold), strict=True):
                    pairs = zip(model.names, solution.labels, graph.classes, strict=False)
                    options = tuple(graph.options[states][label] for _, label, states in pairs)
                    cost_s, width = solution.cost, solution.width
                    found[member] = Best(sp, *asked[member], options, cost_s, width, cost_s)
    bests = [found[bucket] for bucket in range(len(asked))]
    return bests if copies is None else [_handing_on_alike(best, copies) for best in bests]


def _weighted(best: Best, choice: PlacementChoice, model: PlacementModel) -> list[Objective]:
    """Returns the objective with prices on sending, ascending; none where it takes hardly any time.

    With the first no optimum costs more than the loss allows: it saves at most what this one sends.
    """
    weighed = best.prices(model, replace(best.objective, sending=1.0))
    sending_s = choice.cost(weighed, best.shares, best.sp) - best.cost_s
    loss_s = best.objective.loss * best.least_s
    if MOST_FOR_SENDING * sending_s <= loss_s:
        return []
    prices = loss_s / sending_s, min(4 * loss_s / sending_s, MOST_FOR_SENDING)
    return [replace(best.objective, sending=price) for price in prices]


def _lightest(best: Best, choices: Sequence[PlacementChoice], model: PlacementModel) -> Best:
    """Returns the options that send least of those that cost hardly more than the optimum.

    Args:
        best: optimum.
        choices: options of the optimum, then of optima at ascending prices of sending.
        model: placement model of the program.
    """
    if all(each.options == best.options for each in choices):
        return best
    objective, at = best.objective, (best.shares, best.sp)
    prices = best.prices(model, objective), best.prices(model, Objective(objective.device))
    costs, with_starts = ([each.cost(p, *at) for each in choices] for p in prices)
    most_s, most_with_starts_s = ((1 + objective.loss) * s for s in (best.least_s, with_starts[0]))
    for i in reversed(range(1, len(choices))):
        if costs[i] <= most_s and with_starts[i] <= most_with_starts_s:
            return replace(best, options=choices[i].options, cost_s=costs[i])
    return best


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
    prices = best.prices(copies.model, best.objective)
    costs = [(c.cost(prices, best.shares, best.sp), c.options) for c in choices]
    usable = [each for each in costs if each[0] < inf]
    cost_s, options = min(usable, default=(best.cost_s, best.options))
    return replace(best, cost_s=cost_s, options=options)


def placed(best: Best, model: PlacementModel, near: NearTies | None = None) -> Placement:
    """Returns the placement of a bucket."""
    options, cost_s = best.options, best.cost_s
    if near is not None and best.sp > 1:
        # Made now: those of the changes of all choices that are known.
        given = best.prices(model, best.objective), best.shares, best.sp
        options, cost_s = near.instead(options, cost_s, best.least_s, *given)
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
        gap=max(0.0, cost_s / best.least_s - 1.0) if best.least_s else 0.0,
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
