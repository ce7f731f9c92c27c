"""Decides the calls of forward and backward, as lists of a joint graph's nodes.

A value of forward that backward needs is, in this order: an input or parameter (free), a view of an
available value (recomputed), a mask made of positions alone (recomputed; small tables that are dear
to make are saved, see `position_tables.py`), a value that the plan recomputes, or else a saved
activation. A value is recomputed right before its first use in backward, so that recomputed values
of one block at a time are alive.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

from torch import Tensor, fx

from dcpc.codegen.joint.gathers import ROW_CALLS, GatherOrder, UnitNodes
from dcpc.codegen.joint.joint import Joint
from dcpc.codegen.joint.position_tables import VIEWS, before_views, made_of_positions, small_tables
from dcpc.errors import CodegenError
from dcpc.ir import GatherUnits, Program, Schedule

Reads = Mapping[fx.Node, tuple[fx.Node, ...]]  # of each node: the nodes it reads


class Scheduler:
    """Schedules one joint graph, for any choice of recomputed values."""

    def __init__(self, program: Program, joint: Joint) -> None:
        self._nodes = list(joint.gm.graph.nodes)
        self._reads = {n: tuple(n.all_input_nodes) for n in self._nodes}
        count = len(program.outputs)
        outputs: Any = self._nodes[-1].args[0]
        self._outputs, self._gradients = outputs[:count], outputs[count:]
        given = [n for n in self._nodes if n.op == "placeholder"]
        self._primals = tuple(n for n in given if n.name not in joint.tangents)
        self._tangents = tuple(n for n in given if n.name in joint.tangents)
        self._begins = joint.begins
        self._forward = [n for n in self._nodes if n.name in joint.forward]
        self._names, self._units, self._gathers = joint.forward, joint.units, joint.gathers
        self._always = {n for n in self._forward if not isinstance(n.meta.get("val"), Tensor)}
        cheap = made_of_positions(program, joint)
        kept = small_tables(program, joint, cheap)
        self._always |= {n for n in self._forward if n.name in cheap - kept or n.target in VIEWS}
        made = [g for u in joint.gathers for g in u.gradients]
        rows = {n for u in joint.gathers for n in u.rows}
        own = [g for g in self._gradients if g not in rows]
        self._backward_outputs = [g for g in (*made, *own) if g is not None]
        # Sums of rows have their turns, see `gathers.py`.
        backward = _backward_nodes(joint, self._backward_outputs, self._reads)
        calls = [n for n in self._nodes if n in backward]
        self._backward = _releasing_first(joint, calls, self._reads)
        self._cheap, self._readers = cheap, backward

    def choices(self) -> tuple[list[fx.Node], frozenset[str]]:
        """Returns the forward nodes that recompute plans decide on, and those that backward reads.

        They are in execution order, with views and getitems, without integers and values made of
        positions alone. The values read include the bases of views.
        """
        light, fixed = self._cheap, self._gathered()
        nodes = [n for n in self._forward if n.name not in light and _makes_tensors(n)]
        nodes = [n for n in nodes if n not in fixed]
        decided = set(nodes)
        needed = {g for g in self._backward_outputs if g in decided}
        needed.update(s for n in self._readers for s in self._reads[n] if s in decided)
        return nodes, frozenset(n.name for n in needed)

    def schedule(self, made_again: frozenset[str]) -> Schedule:
        """Returns the calls of forward and backward.

        Args:
            made_again: names of the forward nodes that backward recomputes, gathers included.
        """
        run = self._run(made_again)
        for node in self._backward:
            run.add(node)
            run.settle()
        for gradient in self._backward_outputs:
            run.need(gradient)
        run.end()
        gathers = [u.gather for u in self._gathers]
        turns = [n for n in run.order if n.target in ROW_CALLS]
        gradients = [g for g in self._gradients if g is not None]
        order, read = self._needed(run.order, [*gradients, *turns])
        saved = tuple(n for n in run.saved if n in read)
        forward = self._needed(self._forward, [*self._outputs, *saved, *gathers])[0]
        self._check_order(forward, order, made_again)
        return Schedule(
            primals=self._primals,
            forward=forward,
            outputs=tuple(self._outputs),
            begins=self._begins,
            saved=saved,
            backward_primals=tuple(n for n in run.primals if n in read),
            tangents=self._tangents,
            backward=order,
            gradients=tuple(self._gradients),
        )

    def _check_order(
        self, forward: Sequence[fx.Node], backward: Sequence[fx.Node], made_again: frozenset[str]
    ) -> None:
        """Checks that gathers and sums are in the order of `GatherUnits.events`, as on all ranks.

        Raises:
            CodegenError: they are not: ranks would mix up parameters, or wait for each other
                forever.
        """
        if self._units is None:
            return
        by_number = {u.number: u for u in self._gathers}
        summed = {u.number for u in self._gathers if u.sum is not None}
        events = self._units.events(summed, self._gather_again(made_again))
        expected = [by_number[k].gather for k in sorted(by_number)]
        for kind, k in (e for e in events if e[1] in by_number):
            node = by_number[k].gather if kind == "gather" else by_number[k].sum
            assert node is not None, f"unit {k} has no gradient"
            expected.append(node)
        got = [n for n in (*forward, *backward) if n.target in ROW_CALLS]
        if got != expected:
            raise CodegenError(
                f"parameters='rounds': got a graph that gathers and sums as {got}; expected "
                f"{expected}, the order of all ranks; report the model, or take parameters='step'"
            )

    def _gather_again(self, made_again: Set[str]) -> Set[int]:
        """Returns the indices of the units that are gathered again in backward."""
        assert self._units is not None, "there are units"
        return {u.number for u in self._gathers if u.gather.name in made_again} & self._units.again

    def _gathered(self) -> set[fx.Node]:
        """Returns gathered parameters, and values made of those that backward gathers no more.

        To recompute such a value, the parameter, which nothing else needs, would have to stay
        alive.
        """
        units, own = self._units, set(self._readers)
        found: set[fx.Node] = set()
        for unit in self._gathers:
            found |= {unit.gather, *unit.whole}
            views, reads = [*unit.whole], set[fx.Node]()
            for node in views:
                reads |= node.users.keys()
                views += [u for u in node.users if u.target in VIEWS and u.name in self._names]
            assert units is not None, "what is gathered is in a unit"
            if unit.number not in units.again and not reads & own:
                found |= {u for u in reads if u.name in self._names and u.target not in VIEWS}
        return found

    def _run(self, made_again: frozenset[str]) -> _BackwardCalls:
        units, gathers = self._units, self._gathers
        given = self._reads, self._tangents, self._always, made_again
        if units is None:
            return _BackwardCalls(*given)
        again = self._gather_again(made_again)
        return _GatheringCalls(*given, units, gathers, frozenset(self._backward), again)

    def _needed(
        self, calls: Sequence[fx.Node], outputs: Sequence[fx.Node]
    ) -> tuple[tuple[fx.Node, ...], set[fx.Node]]:
        """Returns the calls that the outputs depend on, in order, and all nodes that they read."""
        read = set(outputs)
        kept = []
        for node in reversed(calls):
            if node in read:
                kept.append(node)
                read.update(self._reads[node])
        return tuple(reversed(kept)), read


class _BackwardCalls:
    """The calls of backward while it is built.

    Attributes:
        order: calls so far.
        saved: values of forward that are needed and not recomputed.
        primals: placeholders that are needed.
    """

    def __init__(
        self, reads: Reads, tangents: Sequence[fx.Node], always: Set[fx.Node], made_again: Set[str]
    ) -> None:
        self._reads, self._always, self._again = reads, always, made_again
        self.order: list[fx.Node] = []
        self.saved: dict[fx.Node, None] = {}
        self.primals: dict[fx.Node, None] = {}
        self._done: set[fx.Node] = {*tangents}

    def add(self, node: fx.Node) -> None:
        """Adds a call, after the calls whose results it reads."""
        for source in self._reads[node]:
            self.need(source)
        self.order.append(node)
        self._done.add(node)

    def need(self, node: fx.Node) -> None:
        """Makes a value available: recomputes it, saves it, or takes the placeholder."""
        if node in self._done:
            return
        if node.op == "placeholder":
            self._done.add(node)
            self.primals[node] = None
        elif node in self._always or node.name in self._again:
            self._done.add(node)
            self.add(node)
        else:
            self._done.add(node)
            self.saved[node] = None

    def settle(self) -> None:
        """Does nothing; a hook after each call of backward."""

    def end(self) -> None:
        """Does nothing; a hook after the last call."""


class _GatheringCalls(_BackwardCalls):
    """A backward that also gathers parameters and sums their gradients, in the common order."""

    def __init__(
        self,
        reads: Reads,
        tangents: Sequence[fx.Node],
        always: Set[fx.Node],
        made_again: Set[str],
        units: GatherUnits,
        nodes: Sequence[UnitNodes],
        backward: Set[fx.Node],
        again: Set[int],
    ) -> None:
        super().__init__(reads, tangents, always, made_again)
        self._turns = GatherOrder(units, nodes, backward, self._done, again)

    def need(self, node: fx.Node) -> None:
        """Makes a value available; gathers a parameter if its turn can come now."""
        if node in self._turns.of and node not in self._done:
            self._take(self._turns.up_to_gather(self._turns.of[node]))
        super().need(node)

    def settle(self) -> None:
        """Adds the sums whose gradients are all made."""
        self._take(self._turns.due())

    def end(self) -> None:
        """Adds all remaining gathers and sums."""
        self._take(self._turns.due(end=True))

    def _take(self, events: Sequence[tuple[str, int]]) -> None:
        for kind, number in events:
            unit = self._turns.nodes[number]
            first, made = unit.gather, unit.whole
            if kind == "sum":
                assert unit.sum is not None, f"unit {number} has no gradient"
                first, made = unit.sum, unit.rows
            self.add(first)
            for node in made:
                if node not in self._done:  # values that forward had to save are available
                    self.add(node)


def _makes_tensors(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) or (
        isinstance(value, tuple | list) and any(isinstance(v, Tensor) for v in value)
    )


def _backward_nodes(
    joint: Joint, gradients: Sequence[fx.Node | None], reads: Reads
) -> set[fx.Node]:
    """Returns the nodes made by differentiation that some gradient needs."""
    found: set[fx.Node] = set()
    stack = [g for g in gradients if g is not None]
    while stack:
        node = stack.pop()
        own = node.op == "call_function" and node.name not in joint.forward
        if own and node not in found:
            found.add(node)
            stack.extend(reads[node])
    return found


def _releasing_first(joint: Joint, calls: Sequence[fx.Node], reads: Reads) -> list[fx.Node]:
    """Returns the calls, with the last readers of other values moved as early as possible.

    The moved calls are needed by parameters' gradients only, such as the product for a weight.
    Torch may compute the gradient of a product's input first: then both gradients are alive,
    together with an activation that only the weight's gradient still reads.
    """
    own, forward = set(calls), joint.forward
    leads: set[fx.Node] = set()
    for node in reversed(calls):
        if all(user in leads or user not in own for user in node.users):
            leads.add(node)
    readers: dict[fx.Node, fx.Node] = {}
    for node in calls:
        if node.target not in VIEWS:
            read = [s for s in reads[node] if s in own or s.name in forward]
            readers |= {before_views(s): node for s in read}
    last = set(readers.values())
    waits = {
        node: {s for s in reads[node] if s in own}
        for node in calls
        if node in leads and (node in last or node.target in VIEWS)
    }
    order: list[fx.Node] = []

    def emit(node: fx.Node) -> None:
        waits.pop(node, None)
        order.append(node)
        for user in sorted(u for u in node.users if u in waits):
            waits[user].discard(node)
            if not waits[user]:
                emit(user)

    done: set[fx.Node] = set()
    for node in calls:
        if node not in done:
            first = len(order)
            emit(node)
            done.update(order[first:])
    return order
