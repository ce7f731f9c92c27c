"""A graph whose rows hold several sequences: dims along the row, and the inputs of each value."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import sympy
from torch import fx

from dcpc.fx.large_graphs import source_line
from dcpc.ir import Program
from dcpc.passes.sharding.attention_ways import attentions
from dcpc.passes.sharding.op_kinds import arguments
from dcpc.passes.sharding.rule_types import OpSharding


class MixedError(Exception):
    """Raised where an op joins the sequences of a row."""


class RowGraph:
    """Facts about a model's graph: which dims are along the row, and which inputs a value reads.

    Attributes:
        length: length of a row, as a symbol.
        nodes: nodes of the graph.
        sources: node name -> placeholders that its value depends on; empty for sizes.
        live: names of the nodes that the loss depends on, other than through segments.
    """

    def __init__(self, program: Program, rules: Mapping[str, OpSharding], dim: str) -> None:
        self.program, self.rules = program, rules
        self.length = program.symbols[dim]
        self.nodes = list(program.gm.graph.nodes)
        self.sources = self._sources()
        self.live = self._live()

    def _sources(self) -> dict[str, frozenset[str]]:
        found: dict[str, frozenset[str]] = {}
        for node in self.nodes:
            if node.op == "placeholder":
                found[node.name] = frozenset({node.name})
            elif node.name in self.program.scalars:
                found[node.name] = frozenset()
            else:
                found[node.name] = frozenset().union(*(found[n.name] for n in node.all_input_nodes))
        return found

    def _live(self) -> set[str]:
        found = {*self.program.outputs, "output"}
        for node in reversed(self.nodes):
            if any(u.name in found and not is_segment(node, u) for u in node.users):
                found.add(node.name)
        return found

    @cached_property
    def attentions(self) -> list[fx.Node]:
        """The attentions whose queries or keys are along the row."""
        found = []
        for node in attentions(self.program):
            q, k = (self.program.info[x.name].shape[2] for x in node.all_input_nodes[:2])
            if self.along(q) or self.along(k):
                found.append(node)
        return found

    def learned(self, node: fx.Node) -> bool:
        """Returns whether a value depends on parameters."""
        return not self.sources[node.name].isdisjoint(self.program.parameters)

    def along(self, size: sympy.Expr) -> bool:
        """Returns whether a size depends on the row's length."""
        return self.length in sympy.sympify(size).free_symbols

    def of_length(self, number: fx.Node) -> bool:
        """Returns whether a number that is no tensor depends on the row's length."""
        size = self.program.scalars.get(number.name)
        if size is not None:
            return self.along(size)
        return any(map(self.of_length, number.all_input_nodes))

    def where(self, node: fx.Node) -> str:
        """Returns a node's name, op and source line, as text."""
        line = source_line(node)
        return f"node {node.name} ({node.target}{f', {line}' if line else ''})"


def segment_of(attention: fx.Node) -> fx.Node | None:
    """Returns the node of an attention's segments, or None."""
    found = arguments(attention)["segment"]
    return found if isinstance(found, fx.Node) else None


def is_segment(node: fx.Node, user: fx.Node) -> bool:
    """Returns whether a user reads a node as its segments and for nothing else."""
    if str(user.target) != "dcpc.attention.default":
        return False
    others = [x for x in user.all_input_nodes[:3] if x is node]
    return segment_of(user) is node and not others and arguments(user)["keep"] is not node
