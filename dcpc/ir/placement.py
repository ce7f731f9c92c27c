"""Shardings of a program's values over ranks, and the values computed without padding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import sympy


@dataclass(frozen=True, slots=True)
class Factor:
    """An atomic part of a dim: `[B, T*S, D]` has dims `(B) (T S) (D)`.

    Attributes:
        key: identity; factors that some op forces to be sharded alike share a key.
        size: global size.
        parent: key of the factor whose sharding this one follows, for a slice of a sharded dim; -1:
            none.
        shift: number of the parent's elements before this factor's first one.
    """

    key: int
    size: sympy.Expr
    parent: int = -1
    shift: int = 0


@dataclass(frozen=True, slots=True)
class Label:
    """Where a value's elements are across the ranks of an SP group.

    `Label()` is replicated; `Label(partial=True)` is a sum that is still spread over the ranks;
    `Label(dim, index)` is sharded along the `index`-th factor of dim `dim`.
    """

    dim: int = -1
    index: int = 0
    partial: bool = False

    @property
    def sharded(self) -> bool:
        """Whether each rank holds only its piece."""
        return self.dim >= 0

    def __str__(self) -> str:
        if self.partial:
            return "partial"
        if not self.sharded:
            return "replicated"
        return f"shard({self.dim}.{self.index})" if self.index else f"shard({self.dim})"


REPLICATED = Label()
PARTIAL = Label(partial=True)
# The name of an alternative in which every rank makes all of a call and needs all of its gradient.
WHOLE_GRADIENT = "whole gradient"


@dataclass(frozen=True, slots=True)
class NodePlacement:
    """Alternative chosen for one node: labels required of its tensor operands, and of its output.

    Attributes:
        operands: one label for each tensor operand, in the order of `tensor_operands`.
        output: label of the value that the node computes.
        name: the factor name of the op's sharding rule, "ring" or `WHOLE_GRADIENT`; "" when
            replicated otherwise.
        across: for ring attention: ranks that share positions, each with some of the heads.
    """

    operands: tuple[Label, ...]
    output: Label
    name: str = ""
    across: int = 1


@dataclass(frozen=True, slots=True)
class Placement:
    """Sharding of a forward graph over the `sp` ranks of a group.

    Attributes:
        sp: ranks in the group.
        nodes: node name -> chosen alternative; nodes without a tensor value are absent.
        factors: node name -> the factors of each dim of its value.
        parents: factor key -> factor, for every factor that is the parent of another.
        cost_s: predicted seconds of compute and collectives, forward and backward.
        width: largest number of variables in one table of the variable elimination.
        graph_hash: hash of the program that it was made for.
        zigzag: keys of the factors (no slices of others) of which a rank holds a chunk from either
            end.
        gap: share by which `cost_s` exceeds the least cost of any placement.
    """

    sp: int
    nodes: Mapping[str, NodePlacement]
    factors: Mapping[str, tuple[tuple[Factor, ...], ...]]
    parents: Mapping[int, Factor]
    cost_s: float
    width: int
    graph_hash: str
    zigzag: frozenset[int] = frozenset()
    gap: float = 0.0

    def key(self) -> tuple[object, ...]:
        """Returns a hashable identity: equal keys lower to the same graph."""
        nodes = tuple((n, p) for n, p in sorted(self.nodes.items()))
        return (self.sp, self.graph_hash, nodes, tuple(sorted(self.zigzag)))

    def is_zigzag(self, factor: Factor) -> bool:
        """Returns whether a rank's piece of a factor is two chunks, one from either end."""
        return (factor.key if factor.parent < 0 else factor.parent) in self.zigzag


@dataclass(frozen=True, slots=True)
class RowCheck:
    """Condition on a call's inputs at padded rows; if it fails, the plain model reads padding.

    Attributes:
        node: name of a value computed from inputs alone, indexed by (sample, position).
        number: number that each element at a padded row must equal.
    """

    node: str
    number: float


@dataclass(frozen=True, slots=True)
class TileRegion:
    """Calls of a program that can run a few rows at a time; a row is a (sample, position).

    Attributes:
        calls: names of the calls, in graph order.
        operands: names of the values that enter, in order.
        exits: names of the calls whose values are read elsewhere, too.
        rows: keys of the factors whose product is the number of rows, in their order.
        factors: node name -> the factors of each dim of its value.
        learns: indices of the operands that get a gradient.
    """

    calls: tuple[str, ...]
    operands: tuple[str, ...]
    exits: tuple[str, ...]
    rows: tuple[int, ...]
    factors: Mapping[str, tuple[tuple[Factor, ...], ...]]
    learns: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class UnpadPlan:
    """Values of a program that are computed for valid rows only; a row is a (sample, position).

    Attributes:
        keep: name of the value that marks valid rows: true, or 0 in a mask added to scores; indexed
            by (sample, position), or by (sample, query, position), where a row is valid if some
            query sees it; "": there is none.
        batch: key of the factor that counts samples.
        seq: key of the factor that counts positions.
        factors: node name -> the factors of each dim of its value.
        packed: names of values computed for valid rows only, in graph order.
        attentions: the attentions in `packed`: there, samples become sequences of one row.
        biased: the attentions in `packed` whose mask says more than the valid keys: each sample
            reads its part of the mask.
        summed: names of values without rows that are sums over valid rows.
        checks: conditions at padded rows.
        positions: positions that must be valid in every sample.
        runs: whether the valid positions of each sample must follow each other.
        nonempty: whether each sample must have a valid position.
        returned: names of the outputs other than the loss, which become 0 at padded rows.
        hiding: names of values `[.., queries, seq]` that must be false at padded keys and show each
            query a key, and whether the queries are rows, of which then only valid ones need a key.
        reason: reason why nothing is unpadded; "" if something is.
    """

    keep: str
    batch: int
    seq: int
    factors: Mapping[str, tuple[tuple[Factor, ...], ...]]
    packed: tuple[str, ...]
    attentions: frozenset[str]
    summed: frozenset[str]
    checks: frozenset[RowCheck]
    positions: frozenset[int]
    runs: bool
    nonempty: bool
    returned: frozenset[str] = frozenset()
    hiding: frozenset[tuple[str, bool]] = frozenset()
    biased: frozenset[str] = frozenset()
    reason: str = ""

    @property
    def row_sizes(self) -> tuple[sympy.Expr, sympy.Expr]:
        """Number of samples and number of positions, as expressions."""
        batch, *_, seq = (f.size for dim in self.factors[self.keep] for f in dim)
        return batch, seq
