"""The placement problem as variables and tables of catalogue indices; a bucket looks up prices.

A node is a variable whose states are its options. An edge costs the change from the label the
producer makes to the one the consumer wants, and a change that several consumers want alike must be
paid once. With the edges of a value counted by operand:

* one edge: the change is the edge's.
* two: it matters only whether both want the same. The value gets a second variable, its *mode*:

      node --made label--> mode --wanted label--> both consumers

  "plain h" (the node makes h, each consumer pays its own change) or "all e" (both want e, the
  change to e is paid once, between node and mode).
* n >= 3: a state is an option and a set of at most n // 2 *extra* labels whose changes it pays. A
  larger set would have a label that one consumer alone wants, which costs the same on its edge.
* a parameter of `MANY_READERS`: each reader pays for itself.

So the sum of all tables at its best is the cost with every changed value paid exactly once: as many
yes/no variables as there are (value, label) pairs would give the same, in wider tables.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import NamedTuple, TypeVar

import numpy as np

from dcpc.passes.placement.label_costs import (
    FORBIDDEN,
    FREE,
    NO_WORK,
    WHOLE,
    Catalogue,
    Change,
    Indices,
    Kind,
)
from dcpc.passes.sharding.rule_types import is_usable

T = TypeVar("T", bound=Hashable)

# Labels as integers: hashing them is most of the work. A sharded one is FIRST_SHARDED and more.
REPLICATED, PARTIAL, FIRST_SHARDED = 0, 1, 2

# From so many readers on, each reader of a parameter pays for its own slice of it. The change is
# local, so a reader's share of it is small, and the sum is too large, never too small. Paid once it
# would make all readers of the parameter neighbours: of a block that is applied many times (ALBERT)
# that is every layer, and no order of elimination has small tables.
MANY_READERS = 4

# A value that many consumers want in many forms: above this many states only one extra label each
# is tried. No model seen comes near it; where it binds, a change may be counted twice (never left
# out).
MOST_STATES = 96


class Option(NamedTuple):
    """An alternative of a node.

    Attributes:
        operands: wanted label of each operand.
        output: label of the node's value.
        work: catalogue index of its work.
        split: catalogue index of the share of the work, WHOLE if it is not split.
        least: number of elements of the split factor if each rank needs one (0: unknown before the
            variant runs); -1 if none is needed.
        across: number of ranks that share one piece of the rows of a ring; 0: no ring.
    """

    operands: tuple[int, ...]
    output: int
    work: int
    split: int
    least: int
    across: int = 0


class NodeKind(NamedTuple):
    """The facts that the cost of a node, and of changing its value's label, depends on.

    Attributes:
        value: catalogue index of the node's value.
        shares: (sharded label, catalogue index of its share) of every sharded label.
        backward: whether the value has a gradient.
        cheap: whether ranks compute the value rather than receive it; slices of it are free.
        is_output: whether the program returns it, and so replicated.
        options: alternatives of the node.
    """

    value: int
    shares: tuple[tuple[int, int], ...]
    backward: bool
    cheap: bool
    is_output: bool
    options: tuple[Option, ...]


@dataclass(slots=True)
class Nodes:
    """The graph: name, kind and operands of each node with a tensor value, in graph order."""

    names: list[str] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    sources: list[list[int]] = field(default_factory=list)


class Interned(dict[T, int]):
    """Keys numbered in order of appearance."""

    def __missing__(self, key: T) -> int:
        """Gives a new key the next number."""
        self[key] = len(self)
        return self[key]


class _Made(NamedTuple):
    """The labels that a state offers to consumers.

    `extra` labels are free; any other label is a change from `have`, and impossible if `have` is
    None.
    """

    have: int | None
    extra: tuple[int, ...] = ()


class _States(NamedTuple):
    """The states of a variable.

    Attributes:
        kind: index of the node's kind.
        options: index of each state's option among the node's; () for a mode.
        made: labels that each state offers.
        wants: for each operand, the wanted label of each state.
    """

    kind: int
    options: tuple[int, ...]
    made: tuple[_Made, ...]
    wants: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class StateGraph:
    """The variables and edges of a cost network whose entries are catalogue indices.

    Attributes:
        classes: class of states of each variable; the nodes first, in graph order, then modes.
        options: index of the node's alternative, for each class and state.
        works: index of each state's work, class after class.
        changes: indices of the changes that each state pays, padded with FREE; shape (states, any).
        bounds: first row of each class in these; one more at the end.
        edges: (producer, consumer, table).
        tables: change indices of all tables, one after the other.
        shapes: (start, rows, columns) of each table.
    """

    classes: list[int]
    options: list[tuple[int, ...]]
    works: Indices
    changes: Indices
    bounds: list[int]
    edges: list[tuple[int, int, int]]
    tables: Indices
    shapes: list[tuple[int, int, int]]


def change_between(kind: NodeKind, catalogue: Catalogue, have: int, want: int) -> int:
    """Returns the catalogue index of one label change of a value."""
    sharded, wants_sharded = have >= FIRST_SHARDED, want >= FIRST_SHARDED
    if have == want or (kind.cheap and have == REPLICATED and wants_sharded):
        return FREE
    if want == PARTIAL or (kind.cheap and sharded):
        return FORBIDDEN
    if have == PARTIAL:
        way = Kind.REDUCE_SCATTER if wants_sharded else Kind.ALL_REDUCE
    elif sharded:
        way = Kind.ALL_TO_ALL if wants_sharded else Kind.ALL_GATHER
    else:
        way = Kind.SLICE
    at = dict(kind.shares)
    return catalogue.change(
        Change(way, kind.value, at.get(have, WHOLE), at.get(want, WHOLE), kind.backward)
    )


# (usable kind, (usable kind, operand position) of each consumer): nodes that agree in it are alike
_Place = tuple[int, tuple[tuple[int, int], ...]]


def build_graph(
    nodes: Nodes, kinds: Sequence[NodeKind], catalogue: Catalogue, splits: Sequence[bool], sp: int
) -> StateGraph:
    """Returns the network of the usable options.

    Args:
        nodes: nodes of the graph.
        kinds: distinct kinds of nodes.
        catalogue: catalogue to which changes are added.
        splits: for each share in the catalogue, whether it is less than the whole.
        sp: number of ranks in the group.
    """
    usable, of = _usable(nodes, kinds, splits, sp)
    return _Builder(nodes.sources, kinds, _ChangeIndices(kinds, catalogue), of).build(usable)


# (kind of a node, positions of the options that are of use)
_Usable = tuple[int, tuple[int, ...]]


def _usable(
    nodes: Nodes, kinds: Sequence[NodeKind], splits: Sequence[bool], sp: int
) -> tuple[list[int], list[_Usable]]:
    """Returns the index of each node's usable kind, and these kinds.

    A usable kind lacks useless options: those that split a factor of one element, leave a rank
    without a needed element, or want a partial sum of an operand that is never one.
    """
    found: dict[tuple[int, tuple[bool, ...]], int] = {}
    partial: list[bool] = []  # of each usable kind: whether it can make a partial sum
    usable: list[int] = []
    made: list[_Usable] = []
    for kind, sources in zip(nodes.kinds, nodes.sources, strict=True):
        key = (kind, tuple([partial[usable[s]] for s in sources]))
        if key not in found:
            found[key] = len(made)
            options = kinds[kind].options
            kept = tuple(_kept(options, key[1], splits, sp))
            made.append((kind, kept))
            partial.append(any(options[o].output == PARTIAL for o in kept))
        usable.append(found[key])
    return usable, made


def _kept(
    options: Sequence[Option], partial: tuple[bool, ...], splits: Sequence[bool], sp: int
) -> Iterator[int]:
    for i, option in enumerate(options[: 1 if sp == 1 else None]):
        wanted = zip(option.operands, partial, strict=True)
        if (
            (i == 0 or option.split == WHOLE or splits[option.split])
            and (option.least < 0 or option.least >= sp)
            and is_usable(option.across, sp)
            and all(made or want != PARTIAL for want, made in wanted)
        ):
            yield i


def _extras(ways: list[int], edges: int, options: int) -> Iterator[tuple[int, ...]]:
    most = min(edges // 2, len(ways))
    if most > 1 and options << len(ways) > MOST_STATES:
        most = 1
    for count in range(most + 1):
        yield from combinations(ways, count)


class _ChangeIndices:
    """Label changes that states pay for, as indices into the catalogue."""

    def __init__(self, kinds: Sequence[NodeKind], catalogue: Catalogue) -> None:
        self._kinds, self._catalogue = kinds, catalogue
        self._steps: dict[tuple[int, int, int], int] = {}

    def step(self, kind: int, have: int, want: int) -> int:
        """Returns the catalogue index of one label change of a value of this kind."""
        key = (kind, have, want)
        if key not in self._steps:
            self._steps[key] = change_between(self._kinds[kind], self._catalogue, have, want)
        return self._steps[key]

    def paid(self, states: _States) -> Iterator[tuple[int, list[int]]]:
        """Yields the work and the changes of each state; outputs are gathered."""
        if not states.options:  # modes pay on the edge from their node
            yield from ((NO_WORK, []) for _ in states.made)
        kind = self._kinds[states.kind]
        for option, made in zip(states.options, states.made, strict=False):
            assert made.have is not None, "only a mode has no label of its own"
            wants = (*made.extra, REPLICATED) if kind.is_output else made.extra
            steps = [self.step(states.kind, made.have, want) for want in wants]
            yield kind.options[option].work, steps

    def table(self, states: _States, other: _States, position: int) -> Indices:
        """Returns the changes from offered to wanted labels of an operand; -1 stands for modes."""
        if position < 0:
            rows = [[self._enter(states.kind, s, mode) for mode in other.made] for s in states.made]
            return np.array(rows, np.intp)
        wants = other.wants[position]
        columns = {w: i for i, w in enumerate(dict.fromkeys(wants))}
        rows = [[self._taken(states.kind, made, w) for w in columns] for made in states.made]
        return np.array(rows, np.intp)[:, [columns[w] for w in wants]]

    def _taken(self, kind: int, made: _Made, want: int) -> int:
        if want in made.extra:
            return FREE
        return FORBIDDEN if made.have is None else self.step(kind, made.have, want)

    def _enter(self, kind: int, made: _Made, mode: _Made) -> int:
        """Returns the change that a node pays to be in a mode."""
        assert made.have is not None, "a node makes a label"
        if mode.have is not None:
            return FREE if mode.have == made.have else FORBIDDEN
        (want,) = mode.extra
        return self.step(kind, made.have, want) if want != made.have else FORBIDDEN


class _Builder:
    def __init__(
        self,
        sources: Sequence[Sequence[int]],
        kinds: Sequence[NodeKind],
        changes: _ChangeIndices,
        usable: Sequence[_Usable],
    ) -> None:
        self.sources, self.kinds, self.changes, self.usable = sources, kinds, changes, usable
        self.states: list[_States] = []
        self.tables: Interned[tuple[int, int, int]] = Interned()  # (class, class, operand)

    def build(self, usable: Sequence[int]) -> StateGraph:
        consumers: list[list[tuple[int, int]]] = [[] for _ in usable]
        for node, operands in enumerate(self.sources):
            for position, source in enumerate(operands):
                consumers[source].append((usable[node], position))
        places: Interned[_Place] = Interned()
        at = [places[u, tuple(wants)] for u, wants in zip(usable, consumers, strict=True)]
        made = [self._classes(*place) for place in places]
        classes = [made[place][0] for place in at]
        producers = list(range(len(at)))  # the variable that a node's consumers look at
        edges = []
        for node, place in enumerate(at):
            mode = made[place][1]
            if mode is not None:
                producers[node] = len(classes)
                classes.append(mode)
                edges.append((node, producers[node], self.tables[classes[node], mode, -1]))
        for node, operands in enumerate(self.sources):
            for position, source in enumerate(operands):
                producer = producers[source]
                table = self.tables[classes[producer], classes[node], position]
                edges.append((producer, node, table))
        return self._graph(classes, edges)

    def _graph(self, classes: list[int], edges: list[tuple[int, int, int]]) -> StateGraph:
        entries = [
            self.changes.table(self.states[a], self.states[b], position)
            for a, b, position in self.tables
        ]
        kept = [bool(t.any()) for t in entries]
        starts = np.cumsum([0, *(t.size for t in entries)]).tolist()
        works, changes = zip(
            *(row for s in self.states for row in self.changes.paid(s)), strict=True
        )
        width = max(map(len, changes))
        padded = [[*row, *[FREE] * (width - len(row))] for row in changes]
        return StateGraph(
            classes=classes,
            options=[s.options for s in self.states],
            works=np.array(works, np.intp),
            changes=np.array(padded, np.intp).reshape(-1, width),
            bounds=np.cumsum([0, *(len(s.made) for s in self.states)]).tolist(),
            edges=[edge for edge in edges if kept[edge[2]]],
            tables=np.concatenate([np.zeros(0, np.intp), *(t.ravel() for t in entries)]),
            shapes=[(n, *t.shape) for n, t in zip(starts, entries, strict=False)],
        )

    def _classes(
        self, usable: int, consumers: tuple[tuple[int, int], ...]
    ) -> tuple[int, int | None]:
        """Returns the class of a node's states, and of its modes if it has any."""
        kind, kept = self.usable[usable]
        options = self.kinds[kind].options
        made = [options[o].output for o in kept]
        is_parameter = all(not options[o].operands for o in kept)
        alone = is_parameter and len(consumers) >= MANY_READERS
        shared = [] if alone else self._wanted_twice(consumers)
        ways = {
            h: [w for w in shared if self.changes.step(kind, h, w) not in (FREE, FORBIDDEN)]
            for h in made
        }
        mode = None
        if len(consumers) == 2 and any(ways.values()):
            modes = [_Made(h) for h in dict.fromkeys(made)]
            modes += [_Made(None, (w,)) for w in shared if any(w in of for of in ways.values())]
            mode = self._add(_States(kind, (), tuple(modes), ()))
            ways = {}
        states = [
            (o, extra)
            for o, h in zip(kept, made, strict=True)
            for extra in _extras(ways.get(h, []), len(consumers), len(kept))
        ]
        wants = zip(*(options[o].operands for o, _ in states), strict=True)
        offered = tuple(_Made(options[o].output, extra) for o, extra in states)
        own = self._add(_States(kind, tuple(o for o, _ in states), offered, tuple(wants)))
        return own, mode

    def _add(self, states: _States) -> int:
        self.states.append(states)
        return len(self.states) - 1

    def _wanted_twice(self, consumers: tuple[tuple[int, int], ...]) -> list[int]:
        counts: dict[int, int] = {}
        for consumer, position in consumers:
            kind, kept = self.usable[consumer]
            options = self.kinds[kind].options
            for want in dict.fromkeys(options[o].operands[position] for o in kept):
                counts[want] = counts.get(want, 0) + 1
        return [want for want, count in counts.items() if count > 1]
