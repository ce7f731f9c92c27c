"""Builds a variant from program, placement and recompute plan: the phase in order."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection
from functools import cached_property
from typing import Any, TypeAlias

import sympy
from torch import Tensor, fx

from dcpc.codegen.away.leaving import Leaving
from dcpc.codegen.joint.joint import Joint, Tracer
from dcpc.codegen.joint.partition import partition
from dcpc.codegen.joint.schedule import Scheduler
from dcpc.codegen.lower.lower import Lowered, lower
from dcpc.codegen.variant.backends import compile_graphs
from dcpc.codegen.variant.boxed import Boxed, handing_over
from dcpc.codegen.variant.variant import Variant
from dcpc.ir import GatherUnits, Partition, Placement, Schedule

log = logging.getLogger(__name__)

# Key of a node of the joint graph: its program's node, its op, and its number among these nodes.
# It is equal in every trace of a placement, at any sizes.
Key: TypeAlias = tuple[str, str, int]


class LoweredPair:
    """One placement of a program, lowered and differentiated once; makes partitions and variants.

    Attributes:
        lowered: forward graph of one rank.
        joint: forward and backward in one graph.
        any_degree: whether the graph serves every degree, if that was requested.
    """

    def __init__(
        self,
        tracer: Tracer,
        placement: Placement,
        group: str,
        backend: str,
        *,
        any_degree: bool = False,
        units: GatherUnits | None = None,
        store: str = "",
    ) -> None:
        """Lowers and differentiates.

        Args:
            tracer: tracer of the program.
            placement: placement of the program.
            group: name of the process group of the collectives.
            backend: "eager" or "inductor".
            any_degree: whether pieces of constant dims are integers, see `lower`. It is dropped if
                an op takes none, such as the number of groups of a norm.
            units: units of parameters that a rank holds as rows; None: it holds all whole.
            store: name of the store of values that leave the device, see `store_of`.
        """
        self.program, self.placement, self.backend = tracer.program, placement, backend
        self._library = tracer.library
        self.lowered: Lowered = lower(self.program, placement, group, any_degree=any_degree)
        self.any_degree = any_degree and not self.lowered.fixes_sizes
        if any_degree and not self.any_degree:
            self.lowered = lower(self.program, placement, group)
        self.joint: Joint = tracer.joint(self.lowered)
        if units is not None:
            self.joint = self.joint.gathered(units)
        self._scheduler = Scheduler(self.program, self.joint)
        stays = {n.name for unit in self.joint.gathers for n in unit.whole}
        self._leaving = Leaving(self.joint.gm.graph, self.joint.fake_mode, store, stays)

    def choices(self) -> tuple[list[fx.Node], frozenset[str]]:
        """Returns the nodes that a recompute plan decides on, and those that backward reads."""
        return self._scheduler.choices()

    @cached_property
    def fixed(self) -> dict[str, int]:
        """Integers that torch replaced by numbers while it differentiated -> these numbers.

        The graph, and every prediction about it, holds for these sizes only.
        """
        equations = (g for g in self.joint.guards if isinstance(g, sympy.Eq))
        return {str(g.lhs): int(g.rhs) for g in equations if g.lhs.is_Symbol and g.rhs.is_Integer}

    @property
    def _present(self) -> frozenset[sympy.Symbol]:
        """The torch symbols of sizes that are never 0: dims, if no rank has just a piece."""
        if self.placement.sp > 1:
            return frozenset()
        dims = {*self.program.symbols.values()}
        return frozenset(symbol for symbol, size in self.joint.names.items() if size in dims)

    @cached_property
    def keys(self) -> dict[Key, str]:
        """Key of each forward node of the joint graph, equal in every trace -> the node's name."""
        seen: Counter[tuple[str, str]] = Counter()
        found: dict[Key, str] = {}
        for node in self.joint.gm.graph.nodes:
            if node.name in self.joint.forward:
                made = (self.joint.owner[node.name], str(node.target))
                found[*made, seen[made]] = node.name
                seen[made] += 1
        return found

    def schedule(self, made_again: Collection[Key], away: Collection[Key] = ()) -> Schedule:
        """Returns the calls of forward and backward.

        Args:
            made_again: keys of the values that backward recomputes.
            away: keys of the saved values that leave the device, where they can.
        """
        schedule = self._scheduler.schedule(self._names(made_again))
        return self._leaving.schedule(schedule, self._names(away)) if away else schedule

    def able_to_leave(self, schedule: Schedule) -> list[fx.Node]:
        """Returns the saved values of a schedule that could leave, in the order they are made."""
        return self._leaving.able(schedule)

    def partition(self, made_again: Collection[Key], away: Collection[Key] = ()) -> Partition:
        """Returns the forward and backward graphs of such a schedule."""
        return partition(self.schedule(made_again, away), self.joint.names)

    def _names(self, keys: Collection[Key]) -> frozenset[str]:
        return frozenset(self.keys[key] for key in keys if key in self.keys)

    def variant(self, parts: Partition) -> Variant:
        """Returns a runnable variant of a partition."""
        placeholders = [n for n in parts.forward.graph.nodes if n.op == "placeholder"]
        tensors = tuple(n.name for n in placeholders if isinstance(n.meta["val"], Tensor))
        trainable = tuple(tensors.index(n) for n in self.joint.trainable)
        how = self.backend, self.joint.fake_mode, self._present
        graphs = [parts.forward, *([parts.backward] if parts.begins else [])]
        made = compile_graphs(graphs, *how)
        handing: Boxed | None = None
        if parts.begins and self.backend == "eager":
            handing = handing_over(parts.backward)
        names = self.joint.names
        found: list[Any] = [g.subs(names) for _, guards in made for g in guards]
        if self.backend != "eager":
            # A size that Inductor fixed in another graph of this library is fixed in this one, too.
            found += self._library.guards(names)
        return Variant(
            partition=parts,
            integers=self.lowered.integers,
            placeholders=tensors,
            trainable=trainable,
            sp=self.placement.sp,
            guards=tuple(dict.fromkeys((*self.joint.guards, *found))),
            run_forward=made[0][0],
            run_backward=made[1][0] if parts.begins else _no_backward,
            run_handing_over=handing,
            backend=self.backend,
        )


def _no_backward(arguments: list[Any]) -> tuple[()]:
    """Replaces the backward of a program that has none."""
    return ()
