"""Plans a deep model as three copies of each repeated block: first, middle and last.

A plan of equal blocks is the same for each of them, and what a run of them costs is affine in their
number. So a program of 28 blocks is placed, differentiated and priced as one of three, and what was
found is said of all 28: exactly, as long as the blocks between are told apart by their parameters
alone, which is looked at argument by argument.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from dcpc.codegen import Key
from dcpc.errors import PlanError
from dcpc.fx.leaves import leaf_key, tree_key
from dcpc.fx.repeats import aligned, repeated_runs
from dcpc.ir import Fold, Placement, Program
from dcpc.ops.random import DRAWS, INDEX
from dcpc.passes.placement.placement import zigzag
from dcpc.passes.sharding.attention_ways import restricted
from dcpc.passes.sharding.sharding import analyse
from dcpc.passes.units import units_of
from dcpc.plan.traced import PlacementId, Traced

FEWEST = 6  # copies of a block from which folding pays


@dataclass(frozen=True, slots=True)
class Folded:
    """A program with three copies of each repeated block.

    Attributes:
        program: small program; its nodes have the same names as in the whole one.
        copy_of: node of the small program -> number of its run of blocks and 0, 1 or 2 (first,
            middle, last copy); absent outside of blocks.
        others: for each run, the number of copies that are left out.
        like: node of the whole program that is left out -> its counterpart in the middle copy.
        twins: node of the middle copy -> its counterparts that are left out.
    """

    program: Program
    copy_of: Mapping[str, tuple[int, int]]
    others: tuple[int, ...]
    like: Mapping[str, str]
    twins: Mapping[str, tuple[str, ...]]

    def copies(self, owner: Mapping[str, str]) -> Fold:
        """Returns the copies that nodes of a derived graph stand for; see `Lift.copies`."""
        own = {name: copy for name, copy in self.copy_of.items() if name not in owner}
        made = ((name, self.copy_of.get(source)) for name, source in owner.items())
        return Fold(own | {name: copy for name, copy in made if copy is not None}, self.others)


class Lift:
    """Map between a whole program and the one placed and priced for it: itself, or a folded one.

    Attributes:
        whole: whole program.
        small: program that is placed and priced; by default the whole one.
    """

    def __init__(
        self, whole: Traced, small: Traced | None = None, folded: Folded | None = None
    ) -> None:
        self.whole, self.small, self._folded = whole, small or whole, folded
        self._up: dict[PlacementId, Placement] = {}
        self._down: dict[PlacementId, Placement] = {}

    @property
    def folds(self) -> bool:
        """Whether the small program differs from the whole one."""
        return self._folded is not None

    def up(self, placement: Placement) -> Placement:
        """Returns the whole program's placement: each copy is sharded like the middle one."""
        if self._folded is None:
            return placement
        key = self.small.id_of(placement)
        if key not in self._up:
            like = {n: self._folded.like.get(n, n) for n in self.whole.sharding.alternatives}
            self._up[key] = _moved(placement, like, self.whole)
        of = self._up[key]
        return replace(of, cost_s=placement.cost_s, gap=placement.gap, width=placement.width)

    def down(self, placement: Placement) -> Placement:
        """Returns the small program's part of a placement of the whole one."""
        if not self.folds:
            return placement
        key = self.whole.id_of(placement)
        if key not in self._down:
            same = {name: name for name in self.small.sharding.alternatives}
            self._down[key] = _moved(placement, same, self.small)
        return self._down[key]

    def every_block(self, made_again: set[Key]) -> set[Key]:
        """Returns the keys recomputed in the whole program, given those of the small one."""
        twins = {} if self._folded is None else self._folded.twins
        return made_again | {(t, *k[1:]) for k in made_again for t in twins.get(k[0], ())}

    def gathered_again(self, units: Mapping[int, int]) -> frozenset[int]:
        """Returns numbers of the whole program's units that are gathered again in backward.

        Args:
            units: number of a small program's unit -> copies it stands for that keep their
                parameters.
        """
        small, whole = self.small.units, self.whole.units
        if small is None or whole is None:
            return frozenset()
        twins = {} if self._folded is None else self._folded.twins
        names: set[str] = set()
        for number, kept in units.items():
            for name in small.units[number]:
                others = twins.get(name, ())
                names |= {name, *others[: len(others) - kept]}
        return frozenset(k for k, unit in enumerate(whole.units) if not names.isdisjoint(unit))

    def copies(self, owner: Mapping[str, str]) -> Fold | None:
        """Returns the copies that a graph's nodes stand for; None: each stands for itself.

        Args:
            owner: node of the graph -> node of the small program; {} for the program's own graph.
        """
        return None if self._folded is None else self._folded.copies(owner)


def copies_of(program: Program) -> dict[str, object]:
    """Returns node -> the copy of a repeated block that has it; other nodes are absent."""
    folded = fold(program)
    if folded is None:
        return {}
    found: dict[str, object] = dict(folded.copy_of)
    for name, (run, copy) in folded.copy_of.items():
        if copy == 1:
            found |= {t: (run, "more", i) for i, t in enumerate(folded.twins.get(name, ()))}
    return found


def gathering(traces: Sequence[Traced], ranks: int, away: bool = False) -> list[Traced]:
    """Returns traces of one model whose graphs gather parameters, the same units in the same order.

    They sum gradients of the same ones: of what another trace alone trains a graph sums zeros.

    Raises:
        PlanError: a trace lacks one of the parameters.
    """

    def read(traced: Traced) -> int:
        nodes = {n.name: n for n in traced.program.gm.graph.nodes}
        return sum(bool(nodes[name].users) for name in traced.program.parameters)

    fullest = max(traces, key=read)
    program = fullest.program
    units = units_of(program, fullest.tensors(), ranks, copies_of(program))
    every = set[str]().union(*map(_trained, traces))
    found = []
    for traced in traces:
        own = {name: placeholder for placeholder, name in traced.program.parameters.items()}
        members = [[program.parameters[n] for n in unit] for unit in units.units]
        missing = [name for names in members for name in names if name not in own]
        if missing:
            raise PlanError(
                f"parameters='rounds': got traces of {len(traces)} kinds of shapes, one of which "
                f"has no parameter '{missing[0]}'; expected the same parameters in all: ranks of "
                "one round gather together; declare buckets in which no dim is 1 in some of them "
                "only, or take parameters='step'"
            )
        mine = tuple(tuple(own[name] for name in names) for names in members)
        lent = frozenset(own[name] for name in every - _trained(traced))
        zero = traced.program.zero_gradients | lent
        made = replace(traced.program, zero_gradients=zero)
        gathered = replace(units, units=mine, lent=lent, away=away)
        found.append(replace(traced, program=made, units=gathered, tracers={}))
    return found


def _trained(traced: Traced) -> set[str]:
    """Returns the names of the parameters that have a gradient in a trace."""
    program = traced.program
    nodes = {n.name: n for n in program.gm.graph.nodes}
    read = {n for n in program.learning if nodes[n].users} | program.zero_gradients
    return {name for n, name in program.parameters.items() if n in read}


def lift_of(whole: Traced) -> Lift:
    """Returns the map between a program and its folded one; to itself where nothing folds."""
    folded = fold(whole.program)
    if folded is None:
        return Lift(whole)
    sharding = analyse(folded.program, bool(whole.sharding.derived))
    agree = all(
        [len(dim) for dim in factors] == [len(d) for d in sharding.factors[folded.like.get(n, n)]]
        for n, factors in whole.sharding.factors.items()
    )
    if not agree:  # the dims of both programs have not the same factors
        return Lift(whole)
    sharding = restricted(folded.program, sharding, whole.sharding.attention)
    units = None if whole.units is None else whole.units.within(folded.program.parameters)
    small = replace(whole, program=folded.program, sharding=sharding, units=units, tracers={})
    return Lift(whole, small, folded)


def _moved(placement: Placement, source: Mapping[str, str], to: Traced) -> Placement:
    """Returns another program's placement, each node sharded like its source node."""
    found = placement.nodes
    nodes = {name: found[other] for name, other in source.items() if other in found}
    return replace(
        placement,
        nodes=nodes,
        factors=to.sharding.factors,
        parents=to.sharding.parents,
        graph_hash=to.program.graph_hash,
        zigzag=zigzag(nodes, to.sharding),
    )


def fold(program: Program, fewest: int = FEWEST) -> Folded | None:
    """Returns the folded program; None: no block is repeated often enough.

    Args:
        program: traced model.
        fewest: copies of a block from which folding pays, at least 3.
    """
    calls = [n for n in program.gm.graph.nodes if n.op == "call_function"]
    position = {n: i for i, n in enumerate(calls)}
    last_read = [
        max((position.get(u, len(calls)) for u in _readers(n, program)), default=0) for n in calls
    ]
    blocks = []
    for run in repeated_runs([_kind(n, program) for n in calls]):
        first = aligned(run, last_read)
        count = (run.stop - first) // run.period
        copies = [
            calls[first + c * run.period : first + (c + 1) * run.period] for c in range(count)
        ]
        if count >= fewest and _alike(copies, program):
            blocks.append(copies)
    return _without(program, blocks) if blocks else None


def _kind(node: fx.Node, program: Program) -> Hashable:
    """Returns a key of a call: op, arguments, result; not the values read nor a draw's index."""

    def plain(leaf: Any) -> Hashable:
        return ("a value",) if isinstance(leaf, fx.Node) else leaf_key(leaf)

    info, scalar = program.info.get(node.name), program.scalars.get(node.name)
    made = None if info is None else (info.shape, info.dtype, info.requires_grad)
    args = node.args
    if node.target in DRAWS:  # the index changes the numbers, not what they cost
        args = (*args[:INDEX], *args[INDEX + 1 :])
    arguments = tree_key((args, node.kwargs), plain)
    return str(node.target), arguments, str(made), str(scalar)


def _alike(copies: Sequence[Sequence[fx.Node]], program: Program) -> bool:
    """Whether all copies but the first read alike, and the middle ones' values stay near."""
    where = {n: (c, o) for c, nodes in enumerate(copies) for o, n in enumerate(nodes)}
    own = _own_placeholders(copies, program)

    def read(node: fx.Node, copy: int) -> tuple[Any, ...]:
        if node in where:
            c, offset = where[node]
            return "copy", copy - c, offset
        return ("own", own[node]) if node in own else ("shared", node.name)

    wiring = [
        tuple(read(a, c) for n in nodes for a in _operands(n)) for c, nodes in enumerate(copies)
    ]
    if any(w != wiring[1] for w in wiring[2:]):
        return False
    if any(what[0] == "copy" and what[1] > 1 for what in wiring[1]):
        return False
    last = len(copies) - 1
    return all(
        user in where and where[user][0] - c in (0, 1)
        for c, nodes in enumerate(copies[1:last], 1)
        for n in nodes
        for user in _readers(n, program)
    )


def _readers(node: fx.Node, program: Program) -> list[fx.Node]:
    """Returns the users of a value; of a new statistic that a block makes none."""
    own = program.outputs[len(program.results) :]
    return [u for u in node.users if u.op != "output" or node.name not in own]


def _operands(node: fx.Node) -> list[fx.Node]:
    """Returns the nodes that a call reads, in order and with repeats."""
    found: list[fx.Node] = []
    fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: found.append(n) or n)  # type: ignore[func-returns-value]
    return found


def _own_placeholders(
    copies: Sequence[Sequence[fx.Node]], program: Program
) -> dict[fx.Node, Hashable]:
    """Returns placeholder that only one copy reads -> its position and info in that copy."""
    found: dict[fx.Node, Hashable] = {}
    for nodes in copies:
        inside = set(nodes)
        order = dict.fromkeys(
            a
            for n in nodes
            for a in _operands(n)
            if a.op == "placeholder" and a.users.keys() <= inside
        )
        found |= {a: (i, str(program.info.get(a.name))) for i, a in enumerate(order)}
    return found


def _without(program: Program, blocks: Sequence[Sequence[Sequence[fx.Node]]]) -> Folded:
    """Returns the program without the copies between the second and the last of each run."""
    instead: dict[fx.Node, fx.Node] = {}
    copy_of: dict[str, tuple[int, int]] = {}
    twins: dict[str, list[str]] = {}
    for number, copies in enumerate(blocks):
        own = _own_placeholders(copies, program)
        for c, nodes in enumerate(copies):
            placeholders = dict.fromkeys(a for n in nodes for a in _operands(n) if a in own)
            members = [*nodes, *placeholders]
            if c == 1:
                middle = members
                twins |= {n.name: [] for n in members}
            if c in (0, 1, len(copies) - 1):
                copy_of |= {n.name: (number, min(c, 2)) for n in members}
                continue
            for n, m in zip(members, middle, strict=True):
                instead[n] = m
                twins[m.name].append(n.name)
    graph = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    for node in program.gm.graph.nodes:
        if node in instead:
            continue
        if node.op == "output":
            graph.output(tuple(made[n] for n in node.args[0] if n in made))
        else:
            args, kwargs = fx.node.map_arg(
                (node.args, dict(node.kwargs)), lambda n: made[instead.get(n, n)]
            )
            made[node] = graph.create_node(node.op, node.target, args, kwargs, name=node.name)
            made[node].meta = dict(node.meta)
    graph.lint()
    kept = {n.name for n in made}
    small = program.only(
        kept,
        gm=fx.GraphModule(torch.nn.Module(), graph),
        outputs=tuple(n for n in program.outputs if n in kept),
        statistics=tuple(n for n in program.statistics if n in kept),
        graph_hash=f"{program.graph_hash} folded",
    )
    return Folded(
        program=small,
        copy_of=copy_of,
        others=tuple(len(copies) - 3 for copies in blocks),
        like={n.name: m.name for n, m in instead.items()},
        twins={name: tuple(others) for name, others in twins.items()},
    )
