"""How values are split over ranks, and which are made without padding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import sympy


@dataclass(frozen=True, slots=True)
class Factor:
    """An atomic part of a dim: `[B, T*S, D]` has dims `(B) (T S) (D)`.

    Attributes:
        key: identity; factors that some op forces to be sharded alike have the same key.
        size: its global size.
        parent: the factor (by key) whose split this one follows, for a slice of a sharded dim; -1:
            none.
        shift: elements of the parent before this factor's first one.
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


@dataclass(frozen=True, slots=True)
class NodePlacement:
    """The alternative chosen for one node: the label it wants of each tensor operand, and its own.

    Attributes:
        operands: one label for each tensor operand, in the order of `tensor_operands`.
        output: label of the value as the node makes it.
        name: the factor name of the op's sharding rule, or "ring"; "" when replicated.
        across: of a ring: ranks that share its positions, each with some of the heads.
    """

    operands: tuple[Label, ...]
    output: Label
    name: str = ""
    across: int = 1


@dataclass(frozen=True, slots=True)
class Placement:
    """How a forward graph is split over the `sp` ranks of a group.

    Attributes:
        sp: ranks in the group.
        nodes: node name -> its chosen alternative; nodes without a tensor value are absent.
        factors: node name -> the factors of each dim of its value.
        parents: factor key -> factor, for every factor that is the parent of another.
        cost_s: predicted seconds of compute and collectives, forward and backward.
        width: largest number of variables that one table of the elimination had.
        graph_hash: the program it was made for.
        zigzag: factors (none is a slice of another) of which a rank has a chunk from either end.
    """

    sp: int
    nodes: Mapping[str, NodePlacement]
    factors: Mapping[str, tuple[tuple[Factor, ...], ...]]
    parents: Mapping[int, Factor]
    cost_s: float
    width: int
    graph_hash: str
    zigzag: frozenset[int] = frozenset()

    def key(self) -> tuple[object, ...]:
        """A hashable identity: equal keys lower to the same graph."""
        nodes = tuple((n, p) for n, p in sorted(self.nodes.items()))
        return (self.sp, self.graph_hash, nodes, tuple(sorted(self.zigzag)))

    def is_zigzag(self, factor: Factor) -> bool:
        """Returns whether a rank's piece of a factor is two runs, one from either end."""
        return (factor.key if factor.parent < 0 else factor.parent) in self.zigzag


@dataclass(frozen=True, slots=True)
class RowCheck:
    """What must hold of a call's inputs at padded rows, lest the plain model reads padding.

    Attributes:
        node: name of a value that is made of inputs alone, by (sample, position).
        number: what each of its elements at a padded row must be equal to.
    """

    node: str
    number: float


@dataclass(frozen=True, slots=True)
class UnpadPlan:
    """Which values of a program are computed for valid rows alone, a row being (sample, position).

    Attributes:
        keep: name of the value that says which rows are valid: true, or a number that is added to
            scores, there 0; of (sample, position) alone, or of (sample, query, position), where a
            row is valid that a query sees; "": there is none.
        batch: key of the factor that counts samples.
        seq: key of the factor that counts positions.
        factors: node name -> the factors of each dim of its value.
        packed: names of values that are made for valid rows, in graph order.
        attentions: those of them that are attentions: samples are then sequences of one row.
        biased: those of them whose mask is more than which keys are valid: each sample reads its
            part of the mask.
        summed: names of values without rows that are made of valid rows alone: sums.
        checks: what must hold at padded rows.
        positions: positions that must be valid in every sample.
        runs: whether the valid positions of each sample must follow each other.
        nonempty: whether each sample must have a valid position.
        returned: names of what is returned beside the loss and is 0 at padded rows.
        hiding: names of values `[.., queries, seq]` that must be false at padded keys and show each
            query a key, and whether the queries are rows, of which valid ones alone need one.
        reason: why all stays padded; "" where it need not.
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
        """How many samples and positions there are."""
        batch, *_, seq = (f.size for dim in self.factors[self.keep] for f in dim)
        return batch, seq
