"""Sharding rules of single nodes: which dims of the operands correspond to dims of the output."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import sympy

Names = tuple[tuple[str, ...], ...]  # the names that form each dim of a tensor; () for size 1

# How partial sums pass through an op:
# "none": it needs the whole sum. "one": linear in each operand alone (mul). "all": linear in all
# together (add, cat). "first": linear in its first operand (div, neg, sum, views).
Linear = Literal["none", "one", "all", "first"]


@dataclass(frozen=True, slots=True)
class RingRule:
    """How attention runs with queries and keys both split: keys and values go round the ranks.

    Attributes:
        operands: name along which each operand is split, "" if every rank has all of it.
        output: name along which the output is split.
        rotated: indices of the operands that go round.
        heads: numbers of query heads and key heads.
        across: possible numbers of ranks that share one piece of the rows, each with some heads.
    """

    operands: tuple[str, ...]
    output: str
    rotated: tuple[int, ...]
    heads: tuple[int, int]
    across: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RowWindow:
    """How an op reads a dim of its first operand: a window for each position of its output.

    Attributes:
        source: name of the operand's dim.
        stride: number of rows from one window to the next.
        reach: number of rows of a window.
        before: number of rows by which the first window starts before the first row.
    """

    source: str
    stride: int = 1
    reach: int = 1
    before: int = 0


def is_ring(across: int, sp: int) -> bool:
    """Returns whether keys and values can go round groups of `across` of `sp` ranks."""
    return across > 0 and sp % across == 0 and sp > across


def is_usable(across: int, sp: int) -> bool:
    """Returns whether `sp` ranks can use an alternative; 0 means no ring, always usable."""
    return across == 0 or is_ring(across, sp)


@dataclass(frozen=True, slots=True)
class OpSharding:
    """One node's sharding rule, over names that only this node uses.

    A name in the output that need not be whole may be sharded: each rank makes its piece from its
    pieces of the operands that have the name, and the whole of the others. A name that is only in
    operands and summed over leaves a partial sum.

    Attributes:
        operands: names of each tensor operand, in the order of `ir.tensor_operands`.
        output: names of the output.
        sizes: global size of each name.
        whole: names of which no rank may have a piece.
        summed: contracted names whose pieces add up.
        linear: how partial sums pass through the op, see `Linear`.
        slices: output name -> (operand's name, first element): the output's pieces are the
            operand's, cut.
        multiplies: whether the work is the product of all names' sizes (a contraction), not the
            elements moved.
        work: part of that product that is really computed when a name is sharded, or "" for all
            other ways (causal attention: 1/2, but all of it where the queries are sharded).
        ring: rule for two names split at once by a ring; None: no ring.
        later: name whose later elements are more work (queries that see the keys before them).
        windows: names of the output, whole by themselves, that a rank may have a piece of if it
            gets rows of its neighbours.
        averages: names, whole by themselves, that are averaged over: a rank may have a piece of
            them if ranks add up their sums.
        is_view: whether the output is the operand's memory.
        nonempty: names of which every rank needs an element, as kernels refuse empty tensors.
        whole_gradient: whether backward needs the sum of the ranks' gradients where each rank makes
            all of the op, as it is not linear, or not known to be.
        reason: reason why everything is replicated, "" if a rule applies.
        deliberate: whether the table itself gives that reason, so that no warning is needed.
    """

    operands: tuple[Names, ...]
    output: Names
    sizes: Mapping[str, sympy.Expr]
    whole: frozenset[str] = frozenset()
    summed: frozenset[str] = frozenset()
    linear: Linear = "none"
    slices: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    multiplies: bool = False
    work: Mapping[str, float] = field(default_factory=dict)
    ring: RingRule | None = None
    later: str = ""
    windows: Mapping[str, RowWindow] = field(default_factory=dict)
    averages: frozenset[str] = frozenset()
    is_view: bool = False
    nonempty: frozenset[str] = frozenset()
    whole_gradient: bool = False
    reason: str = ""
    deliberate: bool = False

    @property
    def multiplied(self) -> list[sympy.Expr]:
        """Sizes whose product is the work: a window's source counts as the output's dim alone."""
        sources = {w.source for n, w in self.windows.items() if w.source != n}
        return [size for name, size in self.sizes.items() if name not in sources]
