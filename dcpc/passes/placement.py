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

from collections.abc import Mapping
from functools import cache
from itertools import chain, pairwise, repeat
from math import inf

from dcpc.garbage import without_collection
from dcpc.ir import Fold, NodePlacement, Placement, Program
from dcpc.passes.alike_copies import AlikeCopies
from dcpc.passes.elimination import CostNetwork
from dcpc.passes.label_costs import Prices, Rates
from dcpc.passes.near_ties import NearTies, choice_of
from dcpc.passes.placement_model import PlacementModel
from dcpc.passes.sharding import Sharding
from dcpc.passes.state_graph import StateGraph

__all__ = ["PlacementModel", "Rates", "place"]


def place(
    program: Program,
    sharding: Sharding,
    sizes: Mapping[str, int],
    sp: int,
    rates: Rates,
    model: PlacementModel | None = None,
    fold: Fold | None = None,
    near: NearTies | None = None,
) -> Placement:
    """Returns the placement of least predicted time for one bucket's sizes.

    Args:
        program: the traced model.
        sharding: its factors and alternatives.
        sizes: length of every named dim, batch included.
        sp: ranks of the group.
        rates: the machine.
        model: what was prepared of the two before, for several buckets; None: prepared here.
        fold: which copies of blocks stand for more, split as they are: their costs count as often.
            What they hand to each other is then the same: of four choices in which it is, the
            least, where the least of all has a tie fall otherwise.
        near: choices made of the model before, one of which is taken where it costs hardly more;
            None: the least.
    """
    model = PlacementModel(program, sharding) if model is None else model
    assert model.sharding is sharding, "the prepared model is of another analysis"
    with without_collection():  # the cyclic collector walks a deep model's graphs meanwhile
        symbols = program.symbols
        lengths = {symbols[n]: s for n, s in sizes.items() if n in symbols}
        numbers = model.catalogue.numbers(lengths)
        shares = model.catalogue.shares(numbers, sp)
        graph = model.graph(shares, sp)
        prices = model.catalogue.prices(numbers, shares, sp, rates)
        network = _network(model, graph, prices, fold)
        solution = network.minimise()
    pairs = zip(model.names, solution.labels, graph.classes, strict=False)
    options = tuple(graph.options[states][label] for _, label, states in pairs)
    cost_s = solution.cost
    if fold is not None and sp > 1:
        copies = AlikeCopies(model, fold) if near is None or near.copies is None else near.copies
        if not copies.hand_on_alike(options):
            choices = [choice_of(model, fold, each) for each in copies.made_alike(options)]
            prices = model.catalogue.prices(numbers, shares, sp, rates)  # of their changes, too
            costs = [(choice.cost(prices, shares, sp), choice.options) for choice in choices]
            usable = [each for each in costs if each[0] < inf]
            cost_s, options = min(usable, default=(cost_s, options))
    if near is not None and sp > 1:
        options, cost_s = near.instead(options, cost_s, prices, shares, sp)
    nodes = model.placed(options)
    return Placement(
        sp=sp,
        nodes=nodes,
        factors=sharding.factors,
        parents=sharding.parents,
        cost_s=cost_s,
        width=solution.width,
        graph_hash=program.graph_hash,
        zigzag=zigzag(nodes, sharding),
    )


def zigzag(nodes: Mapping[str, NodePlacement], sharding: Sharding) -> frozenset[int]:
    """Returns the factors of which each rank gets a chunk from either end.

    Those of queries that see the keys before them: in order, the last rank would have nearly twice
    the work of the mean.

    Args:
        nodes: the alternatives that were chosen.
        sharding: of the program.
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
    model: PlacementModel, graph: StateGraph, prices: Prices, fold: Fold | None
) -> CostNetwork:
    costs = prices.works_s[graph.works] + prices.changes_s[graph.changes].sum(axis=1)
    unaries = [costs[start:end] for start, end in pairwise(graph.bounds)]
    entries = prices.changes_s[graph.tables]
    tables = [
        entries[start : start + rows * columns].reshape(rows, columns)
        for start, rows, columns in graph.shapes
    ]
    weights = _Weights(model, graph, fold)
    # Equal tables are one array: the elimination works out once what follows from them.
    weighted = cache(lambda number, count: tables[number] * count)
    of_states = cache(lambda number, count: unaries[number] * count)
    network = CostNetwork()
    names = chain(model.names, repeat("a value with two consumers"))
    for variable, (states, name) in enumerate(zip(graph.classes, names, strict=False)):
        network.add_variable(name, of_states(states, weights.of(variable)))
    for producer, consumer, table in graph.edges:
        network.add_edge(producer, consumer, weighted(table, weights.between(producer, consumer)))
    return network


class _Weights:
    """How often each cost of a folded program counts.

    Blocks that are left out are split like the middle copy, so what it computes and sends counts
    for them, too: also what it sends to the last copy, which each of them sends to the next.
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
        """Returns how often a variable's own cost counts."""
        return 1 if self._fold is None else self._fold.count(self._names[variable])

    def between(self, producer: int, consumer: int) -> int:
        """Returns how often the cost of an edge counts."""
        if self._fold is None:
            return 1
        outside = self._fold.copy(self._names[producer])[1] < 0
        return self.of(consumer if outside else producer)
