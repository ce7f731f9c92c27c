"""Costs of nodes and label changes: formulas catalogued once a model, priced for each bucket.

Repeated layers ask for the same formulas again and again, so a catalogue stays small (a few hundred
entries at 28 layers) and one bucket's prices are a few dozen array operations.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import sympy
import torch

from dcpc.ir import Factor
from dcpc.passes.placement.objective import Objective
from dcpc.passes.sharding.rule_types import is_ring
from dcpc.symbolic_profile.ops.flops import WIRE, ring_messages, ring_sent
from dcpc.symbolic_profile.seconds.fits import CallKind
from dcpc.symbolic_profile.seconds.hardware import Device
from dcpc.symbolic_profile.seconds.time import RateTable

Costs = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]

WHOLE = 0  # the share of a value that is not sharded
FREE, FORBIDDEN = 0, 1  # changes that are in every catalogue
NO_WORK = 0  # the work of a placeholder


class Kind(IntEnum):
    """How a value's label changes; the backward is the linear transpose.

    ALL_TO_ALL <-> ALL_TO_ALL, ALL_GATHER <-> REDUCE_SCATTER, ALL_REDUCE <-> ALL_REDUCE,
    SLICE <-> padding with zeros.
    """

    NONE = 0
    NEVER = 1
    ALL_TO_ALL = 2
    ALL_GATHER = 3
    REDUCE_SCATTER = 4
    ALL_REDUCE = 5
    SLICE = 6


@dataclass(frozen=True, slots=True)
class Change:
    """One way to change the label of a value.

    Attributes:
        kind: kind of change.
        value: catalogue index of the value.
        have: catalogue index of the fullest rank's share before.
        want: catalogue index of the fullest rank's share after.
        backward: whether a gradient takes the transposed change.
    """

    kind: Kind
    value: int
    have: int
    want: int
    backward: bool


class RingTurn(NamedTuple):
    """The traffic of one call of a ring, besides `PricedCall.sent`, which is one rank's piece.

    Attributes:
        merged: (value, share) of the tensor that each step adds to.
        across: number of ranks that share one piece of the rows.
        wider: size of a gradient's element as a multiple of a key's element.
    """

    merged: tuple[int, int]
    across: int
    wider: int


class PricedCall(NamedTuple):
    """One call on the fullest rank.

    Attributes:
        op_class: class of the op, as in `ir.Work`.
        forward: whether it is a call of forward.
        dtype: dtype in which it computes.
        op: name of the collective, "" for other calls.
        moved: (value, share) of each tensor read or written.
        sent: (value, share) of each tensor that a collective or a ring sends.
        elements: FLOPs for each element of the largest tensor moved.
        sizes: catalogue indices of the sizes whose product is the contraction's work; () for none.
        part: fraction of that product that is really computed.
        share: catalogue index of this rank's share of the product.
        swaps: number of neighbours in a swap; 0: all ranks.
        ring: traffic of the ring; None: no ring.
    """

    op_class: str
    forward: bool
    dtype: torch.dtype
    op: str
    moved: tuple[tuple[int, int], ...]
    sent: tuple[tuple[int, int], ...] = ()
    elements: float = 0.0
    sizes: tuple[int, ...] = ()
    part: float = 0.0
    share: int = WHOLE
    swaps: int = 0
    ring: RingTurn | None = None

    def kind(self, sp: int) -> CallKind:
        """Returns the facts besides sizes that its seconds depend on, in a group of `sp` ranks."""
        ranks = (self.swaps or sp) if self.sent else 1
        messages = 1
        if self.ring is not None:
            messages = ring_messages(max(1, sp // self.ring.across), not self.forward)
        return CallKind(self.op_class, self.forward, self.dtype, ranks, self.op, messages)


@dataclass(frozen=True, slots=True)
class NodeWork:
    """The work of the fullest rank for one node.

    Attributes:
        calls: calls of forward and backward.
        held: (value, share) of the activation saved for backward, None if there is none.
        across: number of ranks that share rows in a ring; 0: no ring.
    """

    calls: tuple[PricedCall, ...]
    held: tuple[int, int] | None = None
    across: int = 0


@dataclass(frozen=True, slots=True)
class Prices:
    """The costs of one bucket, for each change and each work in the catalogue."""

    changes_s: Costs
    works_s: Costs


@dataclass(frozen=True, slots=True)
class _Lists:
    """The catalogue's entries as arrays, from which prices are computed. A size of -1 stands for 1.

    Attributes:
        values: size indices of each value, `[values, most dims]`.
        item_bytes: bytes of an element of each value.
        calls: all distinct calls.
        moved: (call, value, share) of each tensor moved, `[3, moved]`, call by call.
        sent: (call, value, share) of each tensor sent, `[3, sent]`.
        starts: index of each call's first entry in `moved`.
        elements: `PricedCall.elements` of each call.
        products: size indices of each call's product, `[calls, most]`.
        parts: `PricedCall.part` of each call; 0 where there is no product.
        shares: share index of each call's product.
        works: (work, call) of each call of a work, `[2, any]`.
        changes: (change, call) of each call of a change, `[2, any]`.
        held: (work, value, share) of each saved activation, `[3, held]`.
        gathered: (change, value, share before) of each gathered value, `[3, any]`.
        never: indices of forbidden changes.
    """

    values: Indices
    item_bytes: Indices
    calls: tuple[PricedCall, ...]
    moved: Indices
    sent: Indices
    starts: Indices
    elements: Costs
    products: Indices
    parts: Costs
    shares: Indices
    works: Indices
    changes: Indices
    held: Indices
    gathered: Indices
    never: Indices

    @classmethod
    def of(
        cls,
        values: Collection[tuple[tuple[int, ...], torch.dtype]],
        changes: Collection[Change],
        works: Collection[NodeWork],
    ) -> _Lists:
        """Returns a catalogue's entries as arrays."""
        shapes, dtypes = zip(*values, strict=True) if values else ((), ())
        known: dict[PricedCall, int] = {}
        of_works = [
            (i, known.setdefault(c, len(known))) for i, w in enumerate(works, 1) for c in w.calls
        ]
        of_changes = [
            (i, known.setdefault(c, len(known)))
            for i, change in enumerate(changes)
            for c in _calls_of(change, dtypes)
        ]
        calls = (*known,)
        ends = np.cumsum([len(c.moved) for c in calls], dtype=np.intp)
        gathers = [
            (i, c.value, c.have)
            for i, c in enumerate(changes)
            if c.kind == Kind.ALL_GATHER and c.backward
        ]
        return cls(
            values=_padded(shapes),
            item_bytes=np.array([d.itemsize for d in dtypes], np.intp),
            calls=calls,
            moved=_columns([(i, *m) for i, c in enumerate(calls) for m in c.moved], 3),
            sent=_columns([(i, *m) for i, c in enumerate(calls) for m in c.sent], 3),
            starts=np.append(0, ends)[:-1],
            elements=np.array([c.elements for c in calls]),
            products=_padded([c.sizes for c in calls]),
            parts=np.array([c.part if c.sizes else 0.0 for c in calls]),
            shares=np.array([c.share for c in calls], np.intp),
            works=_columns(of_works, 2),
            changes=_columns(of_changes, 2),
            held=_columns([(i, *w.held) for i, w in enumerate(works, 1) if w.held], 3),
            gathered=_columns(gathers, 3),
            never=np.array([i for i, c in enumerate(changes) if c.kind == Kind.NEVER], np.intp),
        )


def _calls_of(change: Change, dtypes: Sequence[torch.dtype]) -> Iterator[PricedCall]:
    """Yields the calls of a change: forward, and its transpose if a gradient flows back."""
    if change.kind in (Kind.NONE, Kind.NEVER):
        return
    ends = (change.value, change.have), (change.value, change.want)
    for forward in (True, False)[: 1 + change.backward]:
        given, made = ends if forward else ends[::-1]
        dtype = dtypes[change.value]
        if change.kind == Kind.SLICE:
            moved = (made, made) if forward else (given, made)
            yield PricedCall("copy", forward, dtype, "", moved)
        else:
            op = _OPS[change.kind if forward else _TRANSPOSED[change.kind]]
            yield PricedCall("collective", forward, dtype, op, (given, made), (given,))


_OPS = {
    Kind.ALL_TO_ALL: "dcpc::all_to_all",
    Kind.ALL_GATHER: "dcpc::all_gather",
    Kind.REDUCE_SCATTER: "dcpc::reduce_scatter",
    Kind.ALL_REDUCE: "dcpc::all_reduce",
}
_TRANSPOSED = {
    Kind.ALL_TO_ALL: Kind.ALL_TO_ALL,
    Kind.ALL_GATHER: Kind.REDUCE_SCATTER,
    Kind.REDUCE_SCATTER: Kind.ALL_GATHER,
    Kind.ALL_REDUCE: Kind.ALL_REDUCE,
}


def _columns(rows: Sequence[tuple[int, ...]], width: int) -> Indices:
    return np.array(rows, np.intp).reshape(-1, width).T


def _padded(rows: Sequence[tuple[int, ...]]) -> Indices:
    width = max(map(len, rows), default=0)
    padded = [(*row, *(-1,) * (width - len(row))) for row in rows]
    return np.array(padded, np.intp).reshape(len(rows), width)


class Catalogue:
    """The distinct sizes, shares, values, changes and works of a model, each with a fixed index."""

    def __init__(self) -> None:
        """Creates a catalogue with the whole share, the free change and the forbidden one."""
        self._sizes: dict[sympy.Expr, int] = {}
        self._shares: dict[tuple[int, int, int], int] = {(-1, -1, 0): WHOLE}
        self._values: dict[tuple[tuple[int, ...], torch.dtype], int] = {}
        free, never = (Change(kind, 0, WHOLE, WHOLE, False) for kind in (Kind.NONE, Kind.NEVER))
        self._changes: dict[Change, int] = {free: FREE, never: FORBIDDEN}
        self._works: dict[NodeWork, int] = {}
        self._numbers: dict[tuple[object, ...], Costs] = {}
        self._listed: tuple[tuple[int, ...], _Lists] | None = None
        self._tables: dict[tuple[int, Device, float | None], tuple[_Lists, RateTable]] = {}

    def size(self, expr: sympy.Expr) -> int:
        """Returns the index of a size."""
        return self._sizes.setdefault(expr, len(self._sizes))

    def share(self, factor: Factor, parents: Mapping[int, Factor]) -> int:
        """Returns the index of the fullest rank's share of a factor."""
        split = self.size(parents[factor.parent].size) if factor.parent >= 0 else -1
        key = (self.size(factor.size), split, factor.shift if factor.parent >= 0 else 0)
        return self._shares.setdefault(key, len(self._shares))

    def value(self, shape: tuple[sympy.Expr, ...], dtype: torch.dtype) -> int:
        """Returns the index of a tensor of this shape."""
        key = (tuple(sorted(self.size(s) for s in shape)), dtype)
        return self._values.setdefault(key, len(self._values))

    def change(self, change: Change) -> int:
        """Returns the index of a change."""
        return self._changes.setdefault(change, len(self._changes))

    def work(self, work: NodeWork) -> int:
        """Returns the index of a node's work, after NO_WORK."""
        return self._works.setdefault(work, len(self._works) + 1)

    def numbers(self, sizes: Mapping[sympy.Symbol, int]) -> Costs:
        """Returns the value of every size at one bucket's lengths."""
        key = (len(self._sizes), *sorted((s.name, n) for s, n in sizes.items()))
        if key not in self._numbers:
            given = {symbol: sympy.Integer(size) for symbol, size in sizes.items()}
            self._numbers[key] = np.array([float(e.xreplace(given)) for e in self._sizes])
        return self._numbers[key]

    def shares(self, numbers: Costs, sp: int) -> Costs:
        """Returns every share: above 1/sp where sp does not divide the factor, at most 1."""
        shares = [1.0]
        for size, split, shift in list(self._shares)[1:]:
            n = numbers.item(size)
            fullest = -(-n // sp) if split < 0 else _fullest(n, numbers.item(split), shift, sp)
            shares.append(fullest / n if n else 1.0)
        return np.array(shares)

    def prices(self, numbers: Costs, shares: Costs, sp: int, objective: Objective) -> Prices:
        """Returns the costs of everything in the catalogue."""
        lists = self._lists()
        numbers = np.append(numbers, 1.0)
        numels = numbers[lists.values].prod(axis=1)
        values_bytes = numels * lists.item_bytes
        moved, sent = _bytes(lists, values_bytes, shares, sp)
        rates = self._rates(lists, sp, objective.device, objective.tie_s)
        each_s = rates.seconds(_flops(lists, numels, numbers, shares), moved, sent)
        if objective.sending:
            with_starts = self._rates(lists, sp, objective.device, None)
            each_s += objective.sending * with_starts.sending_seconds(sent)
        held_s = values_bytes * objective.held_s_per_byte

        def total(owners: Indices, count: int, held: Indices, parts: Costs) -> Costs:
            found = np.bincount(owners[0], each_s[owners[1]], count)
            found = found + np.bincount(held[0], held_s[held[1]] * parts, count)
            return found.astype(np.float64)

        works_s = total(lists.works, len(self._works) + 1, lists.held, shares[lists.held[2]])
        for i, work in enumerate(self._works, 1):
            if work.across and not is_ring(work.across, sp):
                works_s[i] = np.inf
        # A gathered value is saved for backward as a whole.
        more = 1.0 - shares[lists.gathered[2]]
        changes_s = total(lists.changes, len(self._changes), lists.gathered, more)
        changes_s[lists.never] = np.inf
        assert not np.isnan(changes_s).any(), "a change of label has no price"
        return Prices(changes_s, works_s)

    def _lists(self) -> _Lists:
        counts = len(self._values), len(self._changes), len(self._works)
        if self._listed is None or self._listed[0] != counts:
            self._listed = counts, _Lists.of(self._values, self._changes, self._works)
        return self._listed[1]

    def _rates(self, lists: _Lists, sp: int, device: Device, start_s: float | None) -> RateTable:
        known = self._tables.get((sp, device, start_s))
        if known is None or known[0] is not lists:
            kinds = [call.kind(sp) for call in lists.calls]
            known = lists, RateTable(kinds, device, start_s)
            self._tables[sp, device, start_s] = known
        return known[1]


def _flops(lists: _Lists, numels: Costs, numbers: Costs, shares: Costs) -> Costs:
    _, value, share = lists.moved
    largest = np.maximum.reduceat(numels[value] * shares[share], lists.starts)
    products = 2.0 * numbers[lists.products].prod(axis=1) * lists.parts * shares[lists.shares]
    found: Costs = products + lists.elements * largest
    return found


def _bytes(lists: _Lists, values_bytes: Costs, shares: Costs, sp: int) -> tuple[Costs, Costs]:
    """Returns the bytes that each call moves, and those that it sends."""

    def total(at: Indices) -> Costs:
        call, value, share = at
        pieces = values_bytes[value] * shares[share]
        return np.bincount(call, pieces, len(lists.calls)).astype(np.float64)  # ints where empty

    moved, sent = total(lists.moved), total(lists.sent)
    for i in np.flatnonzero(sent).tolist():
        call = lists.calls[i]
        if call.ring is None:
            sent[i] = WIRE[call.op](sent[i], call.swaps or sp)
            continue
        value, share = call.ring.merged
        steps, wider = max(1, sp // call.ring.across), call.ring.wider
        moved[i] += 3 * (steps - 1) * values_bytes[value] * shares[share] * wider
        sent[i] = ring_sent((steps - 1) * sent[i], wider * sent[i], wider, not call.forward)
    return moved, sent


def _fullest(size: float, parent: float, shift: int, sp: int) -> float:
    """Returns the largest piece of a factor whose pieces are cut from those of a longer parent."""
    base, extra = divmod(int(parent), sp)
    borders = np.minimum(np.arange(sp + 1), extra) + base * np.arange(sp + 1) - shift
    return float(np.diff(np.clip(borders, 0, int(size))).max())
