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
from dcpc.fx.large_graphs import LazyGraphModule, without_unused
from dcpc.ir import WHOLE_GRADIENT, Placement, Program, call_of, is_tuple, tensor_operands

MOST_RANKS = 8  # ranks of a group whose sizes are compared
_Tuples = dict[tuple[str, tuple[fx.Node, ...]], fx.Node]  # by call and operands


@dataclass(frozen=True, slots=True)
class Lowered:
    """A forward graph for one rank of a sequence-parallel (SP) group.

    Attributes:
        gm: graph module; placeholders: the program's, then `integers`; outputs: the program's.
        integers: descriptions of the last placeholders.
        group: name of the process group of the collectives.
        sp: number of ranks in the group.
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
            dims: length of every dim.
            p: number of ranks in the group.
            rank: index of the rank. Rank 0 has the largest pieces: the first ranks get one element
                more.
        """
        return {i.name: i.value(dims, p, rank) for i in self.integers}

    def sizes_of_ranks(
        self, dims: Mapping[sympy.Symbol, int], p: int, names: Collection[str]
    ) -> list[dict[str, int]]:
        """Returns the distinct integers of the ranks, rank 0 first.

        For more than `MOST_RANKS` ranks it takes a sample, with the first and the last.
        """
        first = self.local_sizes(dims, p)
        own = [i for i in self.integers if i.name in names and i.role not in COMMON]
        count = min(p, MOST_RANKS)
        ranks = [r * (p - 1) // (count - 1) for r in range(1, count)] if own else []
        found = [{**first, **{i.name: i.value(dims, p, r) for i in own}} for r in ranks]
        return [*{tuple(sizes.values()): sizes for sizes in (first, *found)}.values()]

    @property
    def fixes_sizes(self) -> bool:
        """Whether an op takes an integer input as a constant: a trace then holds for one value."""
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
    """Returns the program's forward graph for one rank of an SP group.

    Args:
        program: traced model; not changed.
        placement: placement of the program.
        group: name of the process group for collectives.
        any_degree: whether pieces of constant dims are integers, too, so that the graph serves
            every degree. A piece of one element is always a constant.
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
    """Adds a call's local form. A call with several results is added at its getitems."""
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
    if made is None:  # the same call on this rank's pieces
        made = _copied(local, node, node, operands)
    local.values[node.name, chosen.output] = made


def _item(local: LocalGraph, node: fx.Node, operands: list[fx.Node], tuples: _Tuples) -> fx.Node:
    """Emits one of several results; the call is emitted once for equal operands."""
    key = (call_of(node).name, tuple(operands))
    if key not in tuples:
        tuples[key] = _copied(local, node, call_of(node), operands)
    return local.graph.call_function(operator.getitem, (tuples[key], node.args[1]))


def _copied(local: LocalGraph, node: fx.Node, call: fx.Node, operands: list[fx.Node]) -> fx.Node:
    """Emits a call on this rank's pieces; its backward may need the gradient of all ranks."""
    made = local.copy(call, operands)
    if local.placement.nodes[node.name].name == WHOLE_GRADIENT and local.placement.sp > 1:
        made.kwargs = {**made.kwargs, "group": local.group, "ranks": local.placement.sp}
    return made


def _tag(graph: fx.Graph, name: str) -> None:
    """Marks the newest calls, collectives included, with the program's node they are for."""
    made = next(iter(reversed(graph.nodes)), None)
    while made is not None and made.op == "call_function" and "dcpc" not in made.meta:
        made.meta["dcpc"] = name
        made = made.prev
