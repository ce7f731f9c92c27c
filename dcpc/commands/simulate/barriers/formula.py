"""What a group of ranks costs by a formula: sequences packed end to end, bound by memory."""

from dataclasses import dataclass
from math import inf

import numpy as np

from dcpc.commands.simulate.barriers.costs import FloatArray, IntArray, check_degrees


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
