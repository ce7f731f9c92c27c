"""What a group of ranks costs: one interface, by formula (`LinearCost`) or by table (`TableCost`).

A *key* is what a cost knows a sequence by: its length in tokens (formula), its bucket (table).
A *setting* is a choice a group makes once for its work in a micro-step: which recompute row.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dcpc.errors import PlanError

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Run:
    """One forward and backward of a group: the row it uses and how many of its keys it takes.

    Attributes:
        row: the setting's or the table row's name.
        keys: the keys it runs, a multiset in order.
    """

    row: str
    keys: tuple[int, ...]


class GroupCost(Protocol):
    """Seconds and memory of a group of ranks, additive over the sequences that it is given.

    Attributes:
        ranks: how many ranks there are.
        node_ranks: ranks of a node; a group of at most so many is never spread over two.
        degrees: allowed group sizes, ascending.
        settings: names of the rows a group chooses between.
        fixed_s: seconds of a micro-step before the first sequence.
        additive: `group_s` is exactly the sum of `seconds`; if not, `seconds` is a guide to it.
    """

    @property
    def ranks(self) -> int:
        """How many ranks there are."""

    @property
    def node_ranks(self) -> int:
        """Ranks of a node."""

    @property
    def degrees(self) -> tuple[int, ...]:
        """Allowed group sizes, ascending."""

    @property
    def settings(self) -> tuple[str, ...]:
        """Names of the rows a group chooses between."""

    @property
    def fixed_s(self) -> float:
        """Seconds of a micro-step before the first sequence."""

    @property
    def additive(self) -> bool:
        """Whether `group_s` is exactly the sum of `seconds`."""

    def seconds(self, keys: IntArray) -> FloatArray:
        """Seconds that one sequence adds, [setting, degree, key]; inf: not at all."""

    def weights(self, keys: IntArray) -> FloatArray:
        """What one sequence takes of its group's capacity, [key]."""

    def capacities(self) -> FloatArray:
        """What a group holds at once, in the unit of `weights`, [setting, degree]."""

    def group_s(self, keys: Sequence[int], degree: int, setting: int) -> float:
        """Seconds of a group for these keys, `fixed_s` left out."""

    def runs(self, keys: Sequence[int], degree: int, setting: int) -> tuple[Run, ...]:
        """What the group runs one after another: each key in exactly one run."""


@dataclass(frozen=True, slots=True)
class Recompute:
    """A recompute setting of a formula.

    Attributes:
        name: for the report.
        token_bytes: activations that a token leaves on the group, over all its ranks.
        compute_factor: compute seconds over those without recompute.
    """

    name: str
    token_bytes: float
    compute_factor: float = 1.0


@dataclass(frozen=True, slots=True)
class LinearCost:
    """A formula: fixed + sum of (a s^2 + b s)/d + bytes(s)/d/bandwidth(d); tokens bound by memory.

    A degree that `bandwidth_bytes_per_s` does not list has the bandwidth of the smallest listed
    one above it; degree 1 communicates nothing.

    Attributes:
        quadratic_s: a, seconds a token^2.
        linear_s: b, seconds a token.
        comm_bytes: bytes a token sends, over all ranks of its group.
        bandwidth_bytes_per_s: by degree.
        memory_bytes: of a rank, for activations alone.
        recompute: the rows a group chooses between.

    Source: FlexSP (ASPLOS 2025), the cost model of its public code.
    """

    ranks: int
    fixed_s: float
    quadratic_s: float
    linear_s: float
    comm_bytes: float
    bandwidth_bytes_per_s: dict[int, float]
    memory_bytes: float
    recompute: tuple[Recompute, ...]
    node_ranks: int = 8
    degrees: tuple[int, ...] = ()
    additive: bool = field(default=True, init=False)

    def __post_init__(self) -> None:
        """Fills in every degree from 1 to `ranks` if none are named."""
        if not self.degrees:
            object.__setattr__(self, "degrees", tuple(range(1, self.ranks + 1)))
        check_degrees(self.degrees, self.ranks)

    @property
    def settings(self) -> tuple[str, ...]:
        """Names of the recompute rows."""
        return tuple(row.name for row in self.recompute)

    def tokens(self, setting: int) -> int:
        """Tokens that fit on one rank."""
        return int(self.memory_bytes // self.recompute[setting].token_bytes)

    def bandwidth(self, degree: int) -> float:
        """Bytes a second between the ranks of a group; inf for a group of one."""
        if degree == 1:
            return inf
        listed = [d for d in self.bandwidth_bytes_per_s if d >= degree]
        nearest = min(listed) if listed else max(self.bandwidth_bytes_per_s)
        return self.bandwidth_bytes_per_s[nearest]

    def seconds(self, keys: IntArray) -> FloatArray:
        """Seconds that one sequence adds, [setting, degree, key]; inf if it does not fit."""
        s = keys.astype(np.float64)
        d = np.array(self.degrees, dtype=np.float64)[:, None]
        comm_s = np.array([[self.comm_bytes / self.bandwidth(x)] for x in self.degrees]) * s
        compute_s = self.quadratic_s * s * s + self.linear_s * s
        out = np.empty((len(self.recompute), len(self.degrees), len(keys)))
        for i, row in enumerate(self.recompute):
            out[i] = (row.compute_factor * compute_s + comm_s) / d
            out[i][s > self.tokens(i) * d] = inf
        return out

    def weights(self, keys: IntArray) -> FloatArray:
        """Tokens."""
        return keys.astype(np.float64)

    def capacities(self) -> FloatArray:
        """Tokens a group holds, [setting, degree]."""
        tokens = [self.tokens(i) for i in range(len(self.recompute))]
        return np.outer(tokens, self.degrees).astype(np.float64)

    def group_s(self, keys: Sequence[int], degree: int, setting: int) -> float:
        """Seconds of a group for these lengths, `fixed_s` left out."""
        factor = self.recompute[setting].compute_factor
        square = sum(key * key for key in keys)
        compute_s = self.quadratic_s * square + self.linear_s * sum(keys)
        comm_s = self.comm_bytes / self.bandwidth(degree) * sum(keys)
        return (factor * compute_s + comm_s) / degree

    def runs(self, keys: Sequence[int], degree: int, setting: int) -> tuple[Run, ...]:
        """One run: the sequences are packed."""
        return (Run(self.recompute[setting].name, tuple(keys)),)


@dataclass(frozen=True, slots=True)
class Row:
    """One way of running a bucket: a row of the joint plan table.

    Attributes:
        bucket: the key.
        degree: sp, ranks of the group.
        micro_batch: samples of one run.
        recompute: the setting's name.
        seconds_s: of one run of a full micro-batch.
        peak_bytes: on each rank.
    """

    bucket: int
    degree: int
    micro_batch: int
    recompute: str
    seconds_s: float
    peak_bytes: float


@dataclass(frozen=True, slots=True)
class TableCost:
    """A table of `Row`s; a group runs its micro-batches one after another, one bucket in each.

    Memory bounds a run, not the sum of a group's runs, so rows over `memory_bytes` are left out
    and a group holds any number of samples. A run short of samples costs what lies on the line
    between its row and the next smaller one (or nothing for no samples).
    """

    ranks: int
    rows: tuple[Row, ...]
    memory_bytes: float
    fixed_s: float = 0.0
    node_ranks: int = 8
    additive: bool = field(default=False, init=False)
    degrees: tuple[int, ...] = field(default=(), init=False)
    _by_cell: dict[tuple[int, int], tuple[Row, ...]] = field(default_factory=dict, init=False)
    _best: dict[tuple[int, int], list[tuple[float, int]]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        """Groups the rows that fit by bucket and degree."""
        cells: dict[tuple[int, int], list[Row]] = {}
        for row in self.rows:
            if row.peak_bytes <= self.memory_bytes and row.degree <= self.ranks:
                cells.setdefault((row.bucket, row.degree), []).append(row)
        self._by_cell.update({cell: tuple(rows) for cell, rows in cells.items()})
        degrees = tuple(sorted({row.degree for row in self.rows if row.degree <= self.ranks}))
        object.__setattr__(self, "degrees", degrees)
        check_degrees(self.degrees, self.ranks)

    @property
    def settings(self) -> tuple[str, ...]:
        """One: each run chooses its own row."""
        return ("table",)

    def seconds(self, keys: IntArray) -> FloatArray:
        """Seconds a sample at the best full micro-batch, [1, degree, key]."""
        out = np.full((1, len(self.degrees), len(keys)), inf)
        for j, degree in enumerate(self.degrees):
            for k, bucket in enumerate(keys.tolist()):
                rows = self._by_cell.get((bucket, degree), ())
                out[0, j, k] = min((r.seconds_s / r.micro_batch for r in rows), default=inf)
        return out

    def weights(self, keys: IntArray) -> FloatArray:
        """Nothing: memory does not add up over runs."""
        return np.zeros(len(keys))

    def capacities(self) -> FloatArray:
        """Any number, [1, degree]."""
        return np.ones((1, len(self.degrees)))

    def group_s(self, keys: Sequence[int], degree: int, setting: int) -> float:
        """Seconds of the cheapest split of each bucket's samples into runs."""
        counts: dict[int, int] = {}
        for key in keys:
            counts[key] = counts.get(key, 0) + 1
        return sum(self._split((key, degree), n)[n][0] for key, n in counts.items())

    def runs(self, keys: Sequence[int], degree: int, setting: int) -> tuple[Run, ...]:
        """The cheapest runs, longest buckets in the order given."""
        counts: dict[int, int] = {}
        for key in keys:
            counts[key] = counts.get(key, 0) + 1
        return tuple(
            Run(f"sp={degree} micro_batch={row.micro_batch} recompute={row.recompute}", (key,) * n)
            for key, count in counts.items()
            for row, n, _ in self.cheapest(key, degree, count)
        )

    def cheapest(self, key: int, degree: int, count: int) -> tuple[tuple[Row, int, float], ...]:
        """Returns row, samples and seconds of each run of the cheapest split of a bucket's samples.

        Args:
            key: the bucket.
            degree: of the group.
            count: samples.
        """
        best = self._split((key, degree), count)
        found = []
        while count > 0:
            row = self._by_cell[key, degree][best[count][1]]
            n = min(count, row.micro_batch)
            found.append((row, n, best[count][0] - best[count - n][0]))
            count -= n
        return tuple(found)

    def _split(self, cell: tuple[int, int], n: int) -> list[tuple[float, int]]:
        """Returns (seconds, first row) of the cheapest split of 0..n samples, kept for the next."""
        best = self._best.setdefault(cell, [(0.0, -1)])
        if n < len(best):
            return best
        rows = self._by_cell.get(cell, ())
        below = _next_smaller(rows)
        for m in range(len(best), n + 1):
            options = [
                (best[m - r.micro_batch][0] + r.seconds_s, i)
                if m >= r.micro_batch
                else (before_s + (r.seconds_s - before_s) * (m - few) / (r.micro_batch - few), i)
                for i, (r, (few, before_s)) in enumerate(zip(rows, below, strict=True))
                if m > few
            ]
            best.append(min(options, default=(inf, -1)))
        return best


def _next_smaller(rows: Sequence[Row]) -> list[tuple[int, float]]:
    """Samples and seconds of the next smaller micro-batch of each row; (0, 0.0) if none is."""
    sizes = sorted({(r.micro_batch, r.seconds_s) for r in rows})
    return [max((s for s in sizes if s[0] < r.micro_batch), default=(0, 0.0)) for r in rows]


def check_degrees(degrees: tuple[int, ...], ranks: int) -> None:
    """Refuses degrees that are not ascending, or not within 1 and `ranks`.

    Raises:
        PlanError: they are not.
    """
    if not degrees or list(degrees) != sorted(set(degrees)) or not 1 <= degrees[0] <= ranks:
        raise PlanError(
            f"degrees: got {degrees}, expected ascending group sizes from 1 to {ranks} ranks; "
            "give at least one that fits"
        )
    if degrees[-1] > ranks:
        raise PlanError(
            f"degrees: got {degrees[-1]}, but there are {ranks} ranks; leave out larger groups"
        )
