"""Applies a placement to a copy of the forward graph: local sizes, collectives, positions.

The result is a graph of plain ATen calls and dcpc's collectives that one rank runs. Its
placeholders are the program's, then integers: the length of every named dim, and for each factor
that is split the length (and start) of this rank's piece. The same graph serves every rank and
every length.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import sympy
import torch
from torch import fx

from dcpc.codegen.lower.integer_inputs import COMMON, IntegerInput
from dcpc.codegen.lower.local_graph import LocalGraph
from dcpc.codegen.lower.local_ops import LOCAL
from dcpc.codegen.lower.output_pieces import returned_label
from dcpc.fx.graphs import LazyGraphModule, without_unused
from dcpc.ir import Placement, Program, call_of, is_tuple, tensor_operands

MOST_RANKS = 8  # of a group whose sizes are told apart
_Tuples = dict[tuple[str, tuple[fx.Node, ...]], fx.Node]  # by call and operands


@dataclass(frozen=True, slots=True)
class Lowered:
    """A forward graph for one rank of an SP group.

    Attributes:
        gm: placeholders: the program's, then `integers`; outputs: the program's.
        integers: what the last placeholders are.
        group: name of the process group its collectives use.
        sp: its size.
    """

    gm: fx.GraphModule
    integers: tuple[IntegerInput, ...]
    group: str
    sp: int

    def local_sizes(
        self, dims: Mapping[sympy.Symbol, int], p: int, rank: int = 0
    ) -> dict[str, int]:
        """Returns the integers of one rank, by name.

        Args:
            dims: the length of every dim.
            p: ranks of the group.
            rank: which of them. Rank 0 is the fullest: the first ranks get one element more.
        """
        return {i.name: i.value(dims, p, rank) for i in self.integers}

    def sizes_of_ranks(
        self, dims: Mapping[sympy.Symbol, int], p: int, names: Collection[str]
    ) -> list[dict[str, int]]:
        """Returns the integers of each rank that differs from those before it, rank 0 first.

        Of more than `MOST_RANKS` some, the first and the last among them.

        Args:
            dims: the length of every dim.
            p: ranks of the group.
            names: of the integers that matter.
        """
        first = self.local_sizes(dims, p)
        own = [i for i in self.integers if i.name in names and i.role not in COMMON]
        count = min(p, MOST_RANKS)
        ranks = [r * (p - 1) // (count - 1) for r in range(1, count)] if own else []
        found = [{**first, **{i.name: i.value(dims, p, r) for i in own}} for r in ranks]
        return [*{tuple(sizes.values()): sizes for sizes in (first, *found)}.values()]

    @property
    def fixes_sizes(self) -> bool:
        """Whether some op takes an integer as a number, so that a trace would be of one alone."""
        calls = [n for n in self.gm.graph.nodes if isinstance(n.target, torch._ops.OpOverload)]
        return any(
            isinstance(value, fx.Node)
            for call in calls
            for of, value in zip(call.target._schema.arguments, call.args, strict=False)
            if of.real_type.kind() == "IntType"
        )


def lower(
    program: Program, placement: Placement, group: str, *, any_degree: bool = False
) -> Lowered:
    """Returns the program as one rank of an SP group runs it.

    Args:
        program: the traced model; not changed.
        placement: made for this program.
        group: name of the process group for collectives.
        any_degree: whether pieces of constants are integers as those of dims are, so that the graph
            is that of every degree; a piece of one element is a constant always.
    """
    assert placement.graph_hash == program.graph_hash, "the placement is of another program"
    local = LocalGraph(program, placement, group, any_degree)
    tuples: _Tuples = {}
    for node in program.gm.graph.nodes:
        if node.op == "call_function":
            _lower_call(local, node, tuples)
            _tag(local.graph, node.name)
    labels = {name: returned_label(program, placement, name) for name in program.outputs}
    local.graph.output(tuple(local.value(name, labels[name]) for name in program.outputs))
    without_unused(local.graph)
    used = local.integers.used()
    local.graph.lint()
    gm = LazyGraphModule(torch.nn.Module(), local.graph)
    return Lowered(gm, used, group, placement.sp)


def _lower_call(local: LocalGraph, node: fx.Node, tuples: _Tuples) -> None:
    """Adds what one rank makes of a call; one of several results is made where one is asked for."""
    if node.name in local.program.scalars:
        return  # made from its expression where it is used
    if node.name not in local.placement.nodes:
        if not is_tuple(node, local.program.info):  # those are made for each of their tensors
            local.others[node.name] = local.copy(node, None)
        return
    chosen = local.placement.nodes[node.name]
    sources = tensor_operands(node, local.program.info)
    operands = [local.value(s.name, w) for s, w in zip(sources, chosen.operands, strict=True)]
    made: fx.Node | None = None
    if node.target is operator.getitem:
        made = _item(local, node, operands, tuples)
    elif node.target in LOCAL:
        made = LOCAL[node.target](local, node, operands)
    if made is None:  # the same call of what this rank has
        made = local.copy(node, operands)
    local.values[node.name, chosen.output] = made


def _item(local: LocalGraph, node: fx.Node, operands: list[fx.Node], tuples: _Tuples) -> fx.Node:
    """One of several results; the call is made once for all that want the same operands."""
    key = (call_of(node).name, tuple(operands))
    if key not in tuples:
        tuples[key] = local.copy(call_of(node), operands)
    return local.graph.call_function(operator.getitem, (tuples[key], node.args[1]))


def _tag(graph: fx.Graph, name: str) -> None:
    """Notes for which node of the program the newest calls are, collectives among them."""
    made = next(iter(reversed(graph.nodes)), None)
    while made is not None and made.op == "call_function" and "dcpc" not in made.meta:
        made.meta["dcpc"] = name
        made = made.prev
