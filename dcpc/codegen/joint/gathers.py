"""Adds to a joint graph the gathers of parameters held as rows, and the sums of their gradients.

A unit of parameters is gathered before its first use in forward. In backward it is gathered again,
or is a value that forward keeps; the gradients of a unit are summed once all of them are made.

    forward     gather 0 ─ use ─ gather 1 ─ use ─ gather 2 ─ use ─► loss
    backward    gather 1 ─ use 2 ─ sum 2 ─ gather 0 ─ use 1 ─ sum 1 ─ use 0 ─ sum 0

All graphs of a program, of whatever placement and recompute, gather and sum in one order: ranks
that run different ones do so together. A unit that a graph needs before its turn it keeps from
forward, and gathers it all the same when its turn comes.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx

from dcpc.codegen.collectives.rows import ROWS_GROUP, rows_shape
from dcpc.errors import CodegenError
from dcpc.ir import GatherUnits

aten = torch.ops.aten
_DENSE = aten.clone.default
_NONE: Mapping[str, Any] = MappingProxyType({})
_CONTIGUOUS = MappingProxyType({"memory_format": torch.contiguous_format})
HOST = torch.device("cpu")
ROW_CALLS = frozenset({torch.ops.dcpc.gather_rows.default, torch.ops.dcpc.sum_rows.default})


@dataclass(frozen=True, slots=True)
class UnitNodes:
    """The nodes of a unit (parameters that are gathered together) in a joint graph.

    Attributes:
        number: index of the unit.
        gather: node that gathers the unit.
        whole: nodes of the whole parameters: results of the gather, and views of them.
        gradients: gradients of the unit's parameters, where they have one.
        sum: node that sums these gradients over the ranks; None: there are none.
        rows: results of the sum.
        summed: names of the placeholders whose gradients are summed.
    """

    number: int
    gather: fx.Node
    whole: tuple[fx.Node, ...]
    gradients: tuple[fx.Node, ...] = ()
    sum: fx.Node | None = None
    rows: tuple[fx.Node, ...] = ()
    summed: tuple[str, ...] = ()


def gather_key(unit: Sequence[str]) -> tuple[str, str, int]:
    """Returns the key of a unit's gather, equal in every trace, as in `LoweredPair.keys`."""
    return unit[0], str(torch.ops.dcpc.gather_rows.default), 0


class Gathering:
    """Inserts gathers and sums into a joint graph, in place."""

    def __init__(self, gm: fx.GraphModule, units: GatherUnits, mode: Any) -> None:
        self.graph, self.units, self._mode = gm.graph, units, mode
        self._placeholders = {n.name: n for n in self.graph.nodes if n.op == "placeholder"}
        nodes = self.graph.nodes
        self._storages = 1 + max(s for n in nodes for s in n.meta.get("storage", (-1,)))
        self._moved: dict[int, int] = {}  # storage of a parameter -> storage after the gather
        self._known: dict[tuple[Any, ...], Tensor] = {}
        self.owner: dict[str, str] = {}

    def run(self, forward: frozenset[str], trainable: Sequence[str]) -> tuple[UnitNodes, ...]:
        """Inserts all gathers and sums, and returns the nodes of each unit.

        Args:
            forward: names of the forward nodes.
            trainable: placeholder names of trainable parameters; the last outputs are their
                gradients.
        """
        every = list(self.graph.nodes)
        position = {n: i for i, n in enumerate(every)}
        used: dict[int, list[fx.Node]] = {}
        first: dict[int, int] = {}
        for k, names in enumerate(self.units.units):
            members = [self._placeholders[n] for n in names]
            readers = [position[u] for p in members for u in p.users if u.name in forward]
            # One that this graph does not read is gathered with the others: ranks do it together.
            used[k], first[k] = members, min(readers, default=len(every) - 1)
        # In the order of units, also of those that are wanted at one node.
        made: dict[int, UnitNodes] = {}
        at, before = len(every), every[-1]
        for k in sorted(used, reverse=True):
            if first[k] < at:
                at, before = first[k], every[first[k]]
            made[k] = self._gather(k, used[k], before)
            before = made[k].gather
        for node in every:
            if node.op != "placeholder" and "storage" in node.meta:
                lies = node.meta["storage"]
                node.meta["storage"] = tuple(self._moved.get(i, i) for i in lies)
        return self._sums([made[k] for k in sorted(made)], trainable)

    def _gather(self, number: int, members: Sequence[fx.Node], before: fx.Node) -> UnitNodes:
        """Inserts the gather of a unit, and lets the users of its parameters read the results."""
        # A parameter of several names is gathered once.
        same: dict[int, list[fx.Node]] = {}
        for p in members:
            same.setdefault(p.meta["storage"][0], []).append(p)
        firsts = [names[0] for names in same.values()]
        wholes = [p.meta["val"] for p in firsts]
        for p in members:
            p.meta["val"] = self._rows(p.meta["val"])
        ranks, owner = self.units.ranks, firsts[0].name
        to = {"to": wholes[0].device} if self.units.away else {}
        with self.graph.inserting_before(before):
            gather = self._call(
                owner, torch.ops.dcpc.gather_rows.default,
                (firsts, ranks, ROWS_GROUP), firsts, kwargs=to,
            )  # fmt: skip
            made: list[fx.Node] = []
            for i, (p, whole) in enumerate(zip(firsts, wholes, strict=True)):
                made += self._whole(owner, self._item(owner, gather, i), whole)
                found = made[-1]
                self._moved[p.meta["storage"][0]] = found.meta["storage"][0]
                for name in same[p.meta["storage"][0]]:
                    name.replace_all_uses_with(found, lambda user: user is not gather)
        return UnitNodes(number, gather, tuple(made))

    def _whole(self, owner: str, found: fx.Node, like: Tensor) -> list[fx.Node]:
        """Returns the nodes that make a parameter from its rows: without padding, right strides."""
        made = [found]
        if found.meta["val"].shape != like.shape:
            made.append(self._view(owner, aten.slice.Tensor, made[-1], 0, 0, like.shape[0]))
        if like.is_contiguous():
            return made
        order = sorted(range(like.dim()), key=like.stride, reverse=True)
        made.append(self._view(owner, aten.permute.default, made[-1], order))
        shape = made[-1].meta["val"].shape
        dense = self._fake(shape, like)
        made.append(self._call(owner, _DENSE, (made[-1],), (), dense, (), _CONTIGUOUS))
        back = [order.index(d) for d in range(like.dim())]
        made.append(self._view(owner, aten.permute.default, made[-1], back))
        if made[-1].meta["val"].stride() != like.stride():
            raise CodegenError(
                f"a parameter lies in memory with strides {like.stride()}, {tuple(like.shape)}; "
                "expected a dense one where ranks share out its rows; give it memory of its own "
                "(p.data = p.data.clone()), or take parameters='step'"
            )
        return made

    def _view(self, owner: str, target: Any, of: fx.Node, *args: Any) -> fx.Node:
        with self._mode:
            value = target(of.meta["val"], *args)
        return self._call(owner, target, (of, *args), (), value, of.meta["storage"])

    def _sums(self, made: Sequence[UnitNodes], trainable: Sequence[str]) -> tuple[UnitNodes, ...]:
        """Inserts the sums of gradients before the output, which returns their results."""
        output = self.graph.output_node()
        if self.units.ranks == 1:
            return tuple(made)
        outputs: Any = output.args[0]
        count = len(outputs) - len(trainable)
        returned, gradients = outputs[:count], outputs[count:]
        of = dict(zip(trainable, gradients, strict=True))
        found = []
        with self.graph.inserting_before(output):
            for unit in made:
                names = [n for n in self.units.units[unit.number] if of.get(n) is not None]
                by_storage: dict[int, list[str]] = {}
                for n in names:
                    storage = self._placeholders[n].meta["storage"][0]
                    by_storage.setdefault(storage, []).append(n)
                own: dict[str, fx.Node] = {}
                for first, *others in by_storage.values():
                    total = of[first]
                    for n in others:
                        total = self._added(first, total, of[n])
                        of[n] = None
                    own[first] = total
                if not own:
                    found.append(unit)
                    continue
                owner = next(iter(own))
                args = (list(own.values()), self.units.ranks, ROWS_GROUP)
                summed = self._call(
                    owner, torch.ops.dcpc.sum_rows.default, args, own.values(),
                    kwargs={"to": HOST} if self.units.away else _NONE,
                )  # fmt: skip
                rows = [self._item(owner, summed, i) for i in range(len(own))]
                of |= zip(own, rows, strict=True)
                found.append(
                    UnitNodes(
                        unit.number,
                        unit.gather,
                        unit.whole,
                        tuple(own.values()),
                        summed,
                        tuple(rows),
                        tuple(own),
                    )
                )
        output.args = ((*returned, *(of[n] for n in trainable)),)
        return tuple(found)

    def _added(self, owner: str, one: fx.Node, other: fx.Node) -> fx.Node:
        value = one.meta["val"]
        return self._call(owner, aten.add.Tensor, (one, other), (), self._fake(value.shape, value))

    def _rows(self, whole: Tensor) -> Tensor:
        home = HOST if self.units.away else whole.device
        return self._fake(rows_shape(whole.shape, self.units.ranks), whole, home)

    def _fake(self, shape: Sequence[int], like: Tensor, device: Any = None) -> Tensor:
        """Returns a contiguous fake tensor; equal ones are shared, so that costs are read once."""
        key = (tuple(shape), like.dtype, device or like.device)
        if key not in self._known:
            with self._mode:
                self._known[key] = torch.empty(key[0], dtype=like.dtype, device=key[2])
        return self._known[key]

    def _call(
        self,
        owner: str,
        target: Any,
        args: Any,
        operands: Iterable[fx.Node],
        value: Any = None,
        storage: tuple[int, ...] = (),
        kwargs: Mapping[str, Any] = _NONE,
    ) -> fx.Node:
        """Inserts a call. Without a given value it has one result for each operand, and a token."""
        node = self.graph.call_function(target, args, dict(kwargs))
        if value is None:
            shaped = [self._result(target, n.meta["val"], kwargs.get("to")) for n in operands]
            with self._mode:
                value = [*shaped, torch.empty(1, dtype=torch.uint8, device=shaped[0].device)]
        count = len(value) if isinstance(value, list) else 1
        if not storage:
            storage = tuple(range(self._storages, self._storages + count))
            self._storages += count
        node.meta |= {"val": value, "storage": storage}
        self.owner[node.name] = owner
        return node

    def _result(self, target: Any, given: Tensor, to: Any) -> Tensor:
        if target is torch.ops.dcpc.sum_rows.default:
            return self._rows(given)
        shape = [self.units.ranks * n for n in given.shape[:1]] + [*given.shape[1:]]
        return self._fake(shape, given, to)

    def _item(self, owner: str, node: fx.Node, position: int) -> fx.Node:
        storage = (node.meta["storage"][position],)
        value = node.meta["val"][position]
        return self._call(owner, operator.getitem, (node, position), (), value, storage)


class GatherOrder:
    """The order of gathers and sums, kept while the backward is scheduled.

    Args:
        units: units of the program.
        nodes: unit nodes of the joint graph.
        backward: calls made by differentiation.
        done: nodes that are scheduled; the set grows.
        again: indices of the units that are gathered again in backward.

    Attributes:
        nodes: index of a unit -> its nodes.
        of: node of a whole parameter -> index of its unit.
    """

    def __init__(
        self,
        units: GatherUnits,
        nodes: Sequence[UnitNodes],
        backward: Set[fx.Node],
        done: Set[fx.Node],
        again: Set[int],
    ) -> None:
        self.nodes = {u.number: u for u in nodes}
        self.of = {n: u.number for u in nodes for n in u.whole}
        self._backward, self._done = backward, done
        summed = {u.number for u in nodes if u.sum is not None}
        self._events = [e for e in units.events(summed, again) if e[1] in self.nodes]
        self._next = 0

    def up_to_gather(self, number: int) -> Sequence[tuple[str, int]]:
        """Returns the events up to the gather of a unit; empty if one of them is not ready."""
        wanted = ("gather", number)
        if wanted not in self._events[self._next :]:
            return ()
        stop = self._events.index(wanted) + 1
        due = self._events[self._next : stop]
        if not all(map(self._ready, due)):
            return ()
        self._next = stop
        return due

    def due(self, *, end: bool = False) -> Sequence[tuple[str, int]]:
        """Returns the events up to the last sum that is ready.

        Args:
            end: whether backward has ended: then all events are returned.
        """
        stop = self._next
        for i in range(self._next, len(self._events)):
            if not end and not self._ready(self._events[i]):
                break
            if end or self._events[i][0] == "sum":
                stop = i + 1
        found, self._next = self._events[self._next : stop], stop
        return found

    def _ready(self, event: tuple[str, int]) -> bool:
        kind, number = event
        waits_for = (g for g in self.nodes[number].gradients if g in self._backward)
        return kind == "gather" or all(g in self._done for g in waits_for)


def take_part(
    units: GatherUnits, nodes: Sequence[UnitNodes], taken: Mapping[str, Tensor], again: Set[int]
) -> Iterator[tuple[str, Tensor]]:
    """Takes part in the other ranks' gathers and sums without running forward and backward.

    Args:
        units: units of the program.
        nodes: unit nodes of a joint graph of the program, of any placement.
        taken: placeholder name -> this rank's rows.
        again: indices of the units that the others gather again in backward.

    Yields:
        Pairs of a placeholder name and this rank's rows of the gradient of its parameter.
    """
    by_number = {u.number: u for u in nodes}
    summed = {u.number for u in nodes if u.sum is not None}
    forward = [("gather", u.number) for u in nodes]
    backward = units.events(summed, units.again & again)
    for kind, number in (*forward, *backward):
        unit = by_number.get(number)
        if unit is None:
            continue
        if kind == "gather":
            members: Any = unit.gather.args[0]
            rows = [taken[p.name] for p in members]
            torch.ops.dcpc.gather_rows(rows, units.ranks, ROWS_GROUP, **unit.gather.kwargs)
            continue
        nothing = []
        for name, gradient in zip(unit.summed, unit.gradients, strict=True):
            made = gradient.meta["val"]
            zero = torch.zeros((), dtype=taken[name].dtype, device=made.device)
            nothing.append(zero.expand(made.shape))
        assert unit.sum is not None, "its gradients are summed"
        *found, _ = torch.ops.dcpc.sum_rows(nothing, units.ranks, ROWS_GROUP, **unit.sum.kwargs)
        yield from zip(unit.summed, found, strict=True)
