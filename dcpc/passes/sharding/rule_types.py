"""A sharding rule applied to one node: which parts of its operands' dims its output shares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import sympy

Names = tuple[tuple[str, ...], ...]  # of one tensor: the names that make up each dim; () for size 1

# How an op passes on an operand that is a partial sum:
# "none": it needs the whole sum. "one": linear in each operand alone (mul). "all": linear in all
# together (add, cat). "first": linear in its first operand (div, neg, sum, views).
Linear = Literal["none", "one", "all", "first"]


@dataclass(frozen=True, slots=True)
class RingRule:
    """How attention runs with queries and keys both split: keys and values go round the ranks.

    Attributes:
        operands: name that each operand is split along, "" where every rank has all of it.
        output: name that the output is split along.
        rotated: positions of the operands that go round.
        heads: how many query heads and key heads there are.
        across: how many ranks may share one piece of the rows, each with a part of the heads.
    """

    operands: tuple[str, ...]
    output: str
    rotated: tuple[int, ...]
    heads: tuple[int, int]
    across: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RowWindow:
    """How an op reads a dim of its first operand: a window of it for each position of its output.

    Attributes:
        source: name of the operand's dim.
        stride: rows between two windows.
        reach: rows of a window.
        before: rows that the first window begins before the first row.
    """

    source: str
    stride: int = 1
    reach: int = 1
    before: int = 0


def is_ring(across: int, sp: int) -> bool:
    """Returns whether keys and values can go round groups of `across` of `sp` ranks."""
    return across > 0 and sp % across == 0 and sp > across


def is_usable(across: int, sp: int) -> bool:
    """Returns whether `sp` ranks can have an alternative: 0 is no ring, which they always can."""
    return across == 0 or is_ring(across, sp)


@dataclass(frozen=True, slots=True)
class OpSharding:
    """One node's rule, in names that are the node's own.

    A name in the output that need not be whole may be sharded: each rank makes its piece from its
    pieces of the operands that have the name, and the whole of the others. A name that is only in
    operands and summed over leaves a partial sum.

    Attributes:
        operands: names of each tensor operand, in the order of `ir.tensor_operands`.
        output: names of the output.
        sizes: global size of each name.
        whole: names that no rank may have a piece of.
        summed: contracted names whose pieces add up.
        linear: how partial sums pass.
        slices: output name -> (operand's name, first element): the output's pieces are the
            operand's, cut.
        multiplies: whether the work is the product of all names' sizes (a contraction), not the
            elements moved.
        work: part of that product that is really computed when a name is sharded, or "" for all
            other ways (causal attention: 1/2, but all of it where the queries are sharded).
        ring: how it runs with two names split at once; None: it cannot.
        later: name whose later elements are more work (queries that see the keys before them).
        windows: names of the output, whole by themselves, that a rank may have a piece of if it
            gets rows of its neighbours.
        averages: names, whole by themselves, that are averaged over: a rank may have a piece of
            them if ranks add up their sums.
        is_view: whether the output is the operand's memory.
        nonempty: names of which every rank needs an element: the op's kernels refuse empty tensors.
        reason: why everything is replicated, "" where a rule applies.
        deliberate: whether the table itself gives that reason, so that there is nothing to warn of.
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
    reason: str = ""
    deliberate: bool = False

    @property
    def multiplied(self) -> list[sympy.Expr]:
        """Sizes whose product is the work: a window's source counts as the output's dim alone."""
        sources = {w.source for n, w in self.windows.items() if w.source != n}
        return [size for name, size in self.sizes.items() if name not in sources]
