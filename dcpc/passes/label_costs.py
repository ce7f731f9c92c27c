"""What nodes and label changes cost: formulas catalogued once a model, priced bucket by bucket.

Repeated layers ask for the same formulas again and again, so a catalogue stays small (a few hundred
entries at 28 layers) and one bucket's prices are a few dozen array operations.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt
import sympy

from dcpc.ir import Factor
from dcpc.passes.rule_types import is_ring

Costs = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]

WHOLE = 0  # the share of a value that is not sharded
FREE, FORBIDDEN = 0, 1  # changes that are in every catalogue
NO_WORK = 0  # the work of a placeholder


@dataclass(frozen=True, slots=True)
class Rates:
    """What the placement needs to know of the machine.

    Attributes:
        flops_per_s: sustained floating-point rate of a contraction.
        bytes_per_s: memory bandwidth.
        link_bytes_per_s: what one rank sends to the others of its group.
        link_latency_s: start of one collective.
        overhead_s: start of one op.
        held_s_per_byte: price of a byte of an activation that a rank keeps for backward. Zero asks
            for the least time alone, which at short lengths or over slow links is to replicate
            everything; a group is formed to split memory.
        overlaps: whether a ring sends its next keys while it computes with these.
        near_ranks: ranks that `near_bytes_per_s` joins; 0: one link for all.
        near_bytes_per_s: what one rank sends to such near ones.
    """

    flops_per_s: float
    bytes_per_s: float
    link_bytes_per_s: float
    link_latency_s: float
    overhead_s: float
    held_s_per_byte: float = 0.0
    overlaps: bool = False
    near_ranks: int = 0
    near_bytes_per_s: float = 0.0

    def swap_bytes_per_s(self, ranks: int) -> float:
        """Returns what one rank sends to the others of so many consecutive ones."""
        return self.near_bytes_per_s if ranks <= self.near_ranks else self.link_bytes_per_s


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
    """One way to turn a label of a value into another.

    Attributes:
        kind: what is done.
        value: catalogue index of the value.
        have: catalogue index of the share that the fullest rank has before.
        want: the same, after.
        backward: whether a gradient takes the way back.
    """

    kind: Kind
    value: int
    have: int
    want: int
    backward: bool


@dataclass(frozen=True, slots=True)
class Rotation:
    """What a ring sends: keys and values forward, and their gradients backward.

    Attributes:
        rotated: (value, share) of keys and of values.
        swapped: (value, share) of what changes between rows and heads beside these.
        merged: (value, share) of the output, which each step adds to.
        across: ranks that share one piece of the rows.
        repeats: how often a key head is there, so that `across` divides them.
        wider: bytes of an element of a gradient that goes round, in those of a key's.
    """

    rotated: tuple[tuple[int, int], ...]
    swapped: tuple[tuple[int, int], ...]
    merged: tuple[int, int]
    across: int
    repeats: int
    wider: int


@dataclass(frozen=True, slots=True)
class Work:
    """What the fullest rank does for one node.

    Attributes:
        moved: (value, share) of each tensor read, and last of the one written.
        sizes: catalogue indices of the sizes whose product is the contraction's work; () for none.
        part: part of that product that is really computed.
        share: catalogue index of the share of it that is this rank's.
        backward: whether there is a backward, of twice the time.
        rotation: what it sends by itself.
    """

    moved: tuple[tuple[int, int], ...]
    sizes: tuple[int, ...]
    part: float
    share: int
    backward: bool
    rotation: Rotation | None = None


@dataclass(frozen=True, slots=True)
class Prices:
    """One bucket's seconds: of each change and of each work in the catalogue."""

    changes_s: Costs
    works_s: Costs


@dataclass(frozen=True, slots=True)
class _Lists:
    """What prices are computed from, as arrays. A size of -1 stands for 1.

    Attributes:
        values: sizes of each value, `[values, most]`.
        element_bytes: of each value.
        changes: kind, value, have, want, backward, `[5, changes]`.
        moved: (value, share) of what works move, `[moved, 2]`.
        starts: of each work's among them.
        made: those that are written, `[works, 2]`.
        products: sizes of each work, `[works, most]`.
        parts: of each product, 0 where there is none.
        shares: of each product.
        backward: of each work.
    """

    values: Indices
    element_bytes: Indices
    changes: Indices
    moved: Indices
    starts: Indices
    made: Indices
    products: Indices
    parts: Costs
    shares: Indices
    backward: npt.NDArray[np.bool_]

    @classmethod
    def of(
        cls,
        values: Collection[tuple[tuple[int, ...], int]],
        changes: Collection[Change],
        works: Collection[Work],
    ) -> _Lists:
        """Returns the arrays of a catalogue's entries."""
        shapes, element_bytes = zip(*values, strict=True) if values else ((), ())
        moved = np.array([m for w in works for m in w.moved], np.intp).reshape(-1, 2)
        ends = np.cumsum([len(w.moved) for w in works], dtype=np.intp)
        rows = [(c.kind, c.value, c.have, c.want, c.backward) for c in changes]
        return cls(
            values=_padded(shapes),
            element_bytes=np.array(element_bytes, np.intp),
            changes=np.array(rows, np.intp).T,
            moved=moved,
            starts=np.append(0, ends)[:-1],
            made=moved[ends - 1],  # the last tensor is the output
            products=_padded([w.sizes for w in works]),
            parts=np.array([w.part if w.sizes else 0.0 for w in works]),
            shares=np.array([w.share for w in works], np.intp),
            backward=np.array([w.backward for w in works], np.bool_),
        )


def _padded(rows: Sequence[tuple[int, ...]]) -> Indices:
    width = max(map(len, rows), default=0)
    padded = [(*row, *(-1,) * (width - len(row))) for row in rows]
    return np.array(padded, np.intp).reshape(len(rows), width)


class Catalogue:
    """Distinct sizes, shares, values, changes and works; each has an index that does not change."""

    def __init__(self) -> None:
        """A catalogue with the share of a whole value, and the free and the forbidden change."""
        self._sizes: dict[sympy.Expr, int] = {}
        self._shares: dict[tuple[int, int, int], int] = {(-1, -1, 0): WHOLE}
        self._values: dict[tuple[tuple[int, ...], int], int] = {}
        free, never = (Change(kind, 0, WHOLE, WHOLE, False) for kind in (Kind.NONE, Kind.NEVER))
        self._changes: dict[Change, int] = {free: FREE, never: FORBIDDEN}
        self._works: dict[Work, int] = {}
        self._numbers: dict[tuple[object, ...], Costs] = {}
        self._listed: tuple[tuple[int, ...], _Lists] | None = None

    def size(self, expr: sympy.Expr) -> int:
        """Returns the index of a size."""
        return self._sizes.setdefault(expr, len(self._sizes))

    def share(self, factor: Factor, parents: Mapping[int, Factor]) -> int:
        """Returns the index of the fullest rank's share of a factor."""
        split = self.size(parents[factor.parent].size) if factor.parent >= 0 else -1
        key = (self.size(factor.size), split, factor.shift if factor.parent >= 0 else 0)
        return self._shares.setdefault(key, len(self._shares))

    def value(self, shape: tuple[sympy.Expr, ...], element_bytes: int) -> int:
        """Returns the index of a tensor of this shape."""
        key = (tuple(sorted(self.size(s) for s in shape)), element_bytes)
        return self._values.setdefault(key, len(self._values))

    def change(self, change: Change) -> int:
        """Returns the index of a change."""
        return self._changes.setdefault(change, len(self._changes))

    def work(self, work: Work) -> int:
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

    def prices(self, numbers: Costs, shares: Costs, sp: int, rates: Rates) -> Prices:
        """Returns the seconds of everything in the catalogue."""
        lists = self._lists()
        numbers = np.append(numbers, 1.0)
        values_bytes = numbers[lists.values].prod(axis=1) * lists.element_bytes
        return Prices(
            self._changes_s(lists, values_bytes, shares, sp, rates),
            self._works_s(lists, values_bytes, numbers, shares, sp, rates),
        )

    def _lists(self) -> _Lists:
        counts = len(self._values), len(self._changes), len(self._works)
        if self._listed is None or self._listed[0] != counts:
            self._listed = counts, _Lists.of(self._values, self._changes, self._works)
        return self._listed[1]

    def _changes_s(
        self, lists: _Lists, values_bytes: Costs, shares: Costs, sp: int, rates: Rates
    ) -> Costs:
        kind, value, have, want, backward = lists.changes
        whole = values_bytes[value]
        away = (sp - 1) / sp / rates.link_bytes_per_s

        def wire(sent_bytes: Costs, copied_bytes: Costs) -> Costs:
            one = rates.link_latency_s + sent_bytes * away + copied_bytes / rates.bytes_per_s
            both: Costs = one * (1 + backward)
            return both

        piece = whole * np.maximum(shares[have], shares[want])
        cut = whole * shares[want]
        padding = rates.overhead_s + (whole + cut) / rates.bytes_per_s
        by_kind = {
            Kind.NONE: np.zeros(len(kind)),
            Kind.NEVER: np.full(len(kind), np.inf),
            Kind.ALL_TO_ALL: wire(piece, 4 * piece),
            # What is gathered is kept for backward, in whole.
            Kind.ALL_GATHER: wire(whole, 2 * whole)
            + backward * (whole - whole * shares[have]) * rates.held_s_per_byte,
            Kind.REDUCE_SCATTER: wire(whole, 2 * whole),
            Kind.ALL_REDUCE: wire(2 * whole, 2 * whole),
            Kind.SLICE: rates.overhead_s + 2 * cut / rates.bytes_per_s + backward * padding,
        }
        seconds: Costs = np.choose(kind, [by_kind[k] for k in Kind])
        assert not np.isnan(seconds).any(), "a change of label has no price"
        return seconds

    def _works_s(
        self,
        lists: _Lists,
        values_bytes: Costs,
        numbers: Costs,
        shares: Costs,
        sp: int,
        rates: Rates,
    ) -> Costs:
        if not self._works:
            return np.zeros(1)
        moved, starts, made, backward = lists.moved, lists.starts, lists.made, lists.backward
        touched = np.add.reduceat(values_bytes[moved[:, 0]] * shares[moved[:, 1]], starts)
        flops = 2.0 * numbers[lists.products].prod(axis=1) * lists.parts * shares[lists.shares]
        seconds = np.maximum(touched / rates.bytes_per_s, flops / rates.flops_per_s)
        held = values_bytes[made[:, 0]] * shares[made[:, 1]] * rates.held_s_per_byte
        once = seconds + rates.overhead_s
        seconds = once * np.where(backward, 3.0, 1.0)
        for i, work in enumerate(self._works):
            if work.rotation is not None:
                pieces = values_bytes, shares
                seconds[i] = _ring_s(work.rotation, once[i], work.backward, pieces, sp, rates)
        seconds = seconds + np.where(backward, held, 0.0)
        result: Costs = np.concatenate([[0.0], seconds])
        return result


def _ring_s(
    ring: Rotation,
    compute_s: float,
    backward: bool,
    pieces: tuple[Costs, Costs],
    sp: int,
    rates: Rates,
) -> float:
    """Returns the seconds of attention whose keys and values go round, with what it sends.

    Args:
        ring: what goes round.
        compute_s: of forward; backward is twice as much.
        backward: whether there is one.
        pieces: bytes of every value, and every share.
        sp: ranks of the group.
        rates: the machine.
    """
    if not is_ring(ring.across, sp):
        return np.inf
    values_bytes, shares = pieces
    steps = sp // ring.across
    turned = ring.repeats * sum(float(values_bytes[v] * shares[s]) for v, s in ring.rotated)
    step_s = rates.link_latency_s + turned / rates.link_bytes_per_s
    wide_s = rates.link_latency_s + turned * ring.wider / rates.link_bytes_per_s

    def both(compute_s: float, sent_s: float) -> float:
        return max(compute_s, sent_s) if rates.overlaps else compute_s + sent_s

    value, share = ring.merged
    added_bytes = 3 * float(values_bytes[value] * shares[share]) * ring.wider  # read two, write one
    added_s = (steps - 1) * (rates.overhead_s + added_bytes / rates.bytes_per_s)
    total = both(compute_s + added_s, (steps - 1) * step_s)
    if backward:
        total += both(2 * compute_s + added_s, (steps - 1) * step_s + steps * wide_s)
    if ring.across > 1:
        moved = turned + sum(float(values_bytes[v] * shares[s]) for v, s in ring.swapped)
        away = (ring.across - 1) / ring.across / rates.swap_bytes_per_s(ring.across)
        count = len(ring.rotated) + len(ring.swapped)
        swap_s = count * rates.link_latency_s + moved * (away + 4 / rates.bytes_per_s)
        total += swap_s * (1 + backward)
    return total


def _fullest(size: float, parent: float, shift: int, sp: int) -> float:
    """Returns the most elements a rank has of a factor whose pieces are a longer one's, cut."""
    base, extra = divmod(int(parent), sp)
    borders = np.minimum(np.arange(sp + 1), extra) + base * np.arange(sp + 1) - shift
    return float(np.diff(np.clip(borders, 0, int(size))).max())
