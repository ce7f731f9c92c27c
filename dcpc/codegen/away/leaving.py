"""Has some saved values of a schedule leave the device, and come back in backward.

    forward   ... v, leave(v) ... last call that reads v or the next such value, gone(v) ...
    backward  ask(first) ... ask(next), arrive(v), first call that reads v ...

So at most two such values are on their way at once: while one is copied, the next is used. The
first to come back is asked for where backward reads a value as large that stayed, else at its
start. The last value that forward makes stays, as backward begins with it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from dcpc.codegen.away.away_ops import ARRIVE, ASK, GONE, LEAVE
from dcpc.fx.leaves import size_key
from dcpc.ir import Schedule

STANDS_FOR = "stands_for"  # in `meta` of a call of `arrive`: the value that it brings back


@dataclass(frozen=True, slots=True)
class AwayNodes:
    """The calls by which one value leaves and comes back."""

    leave: fx.Node
    gone: fx.Node
    ask: fx.Node
    arrive: fx.Node


class Leaving:
    """Values of one joint graph that leave.

    Args:
        graph: joint graph; calls are added to it, which none of its own nodes knows of.
        mode: fake mode of its values.
        store: name of the store, see `store_of`.
        stays: names of values that never leave.
    """

    def __init__(self, graph: fx.Graph, mode: Any, store: str, stays: Collection[str]) -> None:
        self._graph, self._mode, self._store, self._stays = graph, mode, store, frozenset(stays)
        self._made: dict[fx.Node, AwayNodes] = {}
        self._order = functools.cache(_order)  # each of a plan's schedules asks for it
        self._count = 1 + max(
            (s for n in graph.nodes for s in n.meta.get("storage", ())), default=0
        )

    def able(self, schedule: Schedule) -> list[fx.Node]:
        """Returns the saved values that could leave, in the order in which forward makes them.

        Each is dense and has its memory for itself; the last one stays.
        """
        held = {
            storage for n in (*schedule.outputs, *schedule.primals, *schedule.tangents)
            for storage in n.meta.get("storage", ())
        }  # fmt: skip
        counts: dict[int, int] = {}
        for n in schedule.saved:
            for storage in n.meta.get("storage", ()):
                counts[storage] = counts.get(storage, 0) + 1
        place = {n: i for i, n in enumerate(schedule.forward)}
        read = {s for n in schedule.backward for s in n.all_input_nodes}

        def alone(n: fx.Node) -> bool:
            storages = n.meta.get("storage", ())
            return len(storages) == 1 and storages[0] not in held and counts[storages[0]] == 1

        found = [n for n in schedule.saved if n in place and n in read and alone(n)]
        found = [n for n in found if n.name not in self._stays]
        return sorted((n for n in found if self._order(n) is not None), key=place.__getitem__)[:-1]

    def schedule(self, whole: Schedule, names: Collection[str]) -> Schedule:
        """Returns a schedule in which the values of these names leave, where they can."""
        going = [n for n in self.able(whole) if n.name in names]
        if not going:
            return whole
        nodes = {n: self._nodes(n) for n in going}
        forward = self._forward(whole.forward, going, nodes)
        backward, order = self._backward(whole.backward, nodes, self.able(whole))
        saved = tuple(nodes[n].gone if n in nodes else n for n in whole.saved)
        returning = tuple((nodes[n].ask, n) for n in order)
        return replace(whole, forward=forward, backward=backward, saved=saved, returning=returning)

    def _forward(
        self,
        calls: Sequence[fx.Node],
        going: Sequence[fx.Node],
        nodes: Mapping[fx.Node, AwayNodes],
    ) -> tuple[fx.Node, ...]:
        own = {n.meta["storage"][0]: n for n in going}
        last = {n: i for i, call in enumerate(calls) for n in _read(call, own)}
        following = [*going[1:], going[-1]]
        freed: dict[int, list[fx.Node]] = {}
        for n, after in zip(going, following, strict=True):
            freed.setdefault(max(last[n], last[after]), []).append(nodes[n].gone)
        order: list[fx.Node] = []
        for i, call in enumerate(calls):
            order.append(call)
            if call in nodes:
                order.append(nodes[call].leave)
            order += freed.get(i, ())
        return tuple(order)

    def _backward(
        self,
        calls: Sequence[fx.Node],
        nodes: Mapping[fx.Node, AwayNodes],
        able: Sequence[fx.Node],
    ) -> tuple[tuple[fx.Node, ...], list[fx.Node]]:
        first: dict[fx.Node, int] = {}
        for i, call in enumerate(calls):
            for source in call.all_input_nodes:
                if source in nodes or source in able:
                    first.setdefault(source, i)
        wanted = sorted(nodes, key=first.__getitem__)
        asked = {at: n for at, n in itertools.pairwise(wanted)}
        before = [
            first[n] for n in able
            if first[n] < first[wanted[0]] and _bytes(n) >= _bytes(wanted[0])
        ]  # fmt: skip
        begin, order = max(before, default=0), list[fx.Node]()
        arriving: dict[int, list[fx.Node]] = {}
        for n in wanted:
            arriving.setdefault(first[n], []).append(n)
        for i, call in enumerate(calls):
            if i == begin:
                order.append(nodes[wanted[0]].ask)
            for n in arriving.get(i, ()):
                if n in asked:
                    order.append(nodes[asked[n]].ask)
                order.append(nodes[n].arrive)
            order.append(call)
        return tuple(order), wanted

    def _nodes(self, value: fx.Node) -> AwayNodes:
        if value not in self._made:
            order, fake = self._order(value), value.meta["val"]
            assert order is not None, f"{value} is dense"
            with self._graph.inserting_before(self._graph.output_node()):
                leave = self._call(LEAVE, (value, self._store), value)
                gone = self._call(GONE, (leave, value), value)
                ask = self._call(ASK, (gone, order, fake.device), value)
                arrive = self._call(ARRIVE, (ask,), value, ask.meta["storage"])
            arrive.meta[STANDS_FOR] = value
            for node in (leave, gone):
                value.users.pop(node, None)  # other schedules of the graph have no such calls
            self._made[value] = AwayNodes(leave, gone, ask, arrive)
        return self._made[value]

    def _call(
        self, target: Any, args: Any, value: fx.Node, storage: tuple[int, ...] = ()
    ) -> fx.Node:
        given = [a.meta["val"] if isinstance(a, fx.Node) else a for a in args]
        node = self._graph.call_function(target, args)
        if target in (ASK, ARRIVE):
            fake = value.meta["val"]
        else:
            with self._mode:
                fake = target(*given)
        if not storage:
            storage, self._count = (self._count,), self._count + 1
        node.meta |= {"val": fake, "storage": storage}
        return node


def _read(call: fx.Node, own: Mapping[int, fx.Node]) -> list[fx.Node]:
    """Returns those of the values whose memory a call reads."""
    storages = (s for n in call.all_input_nodes for s in n.meta.get("storage", ()))
    return [own[s] for s in storages if s in own]


def _order(node: fx.Node) -> list[int] | None:
    """Returns the dims of a dense value, the outermost in memory first; None: it is not dense."""
    value = node.meta["val"]
    if not isinstance(value, Tensor) or not value.dim():
        return None
    strides = [_hint(s) for s in value.stride()]
    order = sorted(range(value.dim()), key=lambda d: -strides[d])
    expected: Any = 1
    for d in reversed(order):
        if not _same(value.stride(d), expected):
            return None
        expected = expected * value.shape[d]
    whole = _same(value.untyped_storage().nbytes(), expected * value.dtype.itemsize)
    return order if whole and _same(value.storage_offset(), 0) else None


def _bytes(node: fx.Node) -> int:
    """Returns the bytes of a value at the sizes of the trace."""
    value = node.meta["val"]
    return _hint(value.numel()) * int(value.dtype.itemsize)


def _hint(size: Any) -> int:
    return int(size.node.hint) if isinstance(size, torch.SymInt) else int(size)


def _same(one: Any, other: Any) -> bool:
    """Whether two sizes are equal for all values of their symbols."""
    return bool(sympy.expand(size_key(one) - size_key(other)) == 0)
