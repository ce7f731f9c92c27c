"""Costs of a group of ranks by a formula: sequences packed end to end, bound by memory."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from dcpc.buckets import Bucket, Sizes
from dcpc.errors import PlanError
from dcpc.ir import PlanRow
from dcpc.runtime.planner.own_lengths import OwnLengths
from dcpc.runtime.planner.packed.bins import PackedPrices
from dcpc.runtime.planner.plans import StepPlan
from dcpc.runtime.planner.step_planner import plan_rows
from dcpc.runtime.planner.table import PlanTable

TOKENS = "tokens"
# Capacities of packed rows that dcpc plans with, at most.
MOST_CAPACITIES = 24


@dataclass(frozen=True, slots=True)
class Recompute:
    """A recompute setting of a formula.

    Attributes:
        name: name in the report.
        token_bytes: activations that a token leaves on the group, over all its ranks.
        compute_factor: compute seconds over those without recompute.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")  # in a file

    name: str
    token_bytes: float
    compute_factor: float = 1.0


@dataclass(frozen=True, slots=True)
class LinearCost:
    """A formula: fixed + sum of (a s^2 + b s)/d + bytes(s)/d/bandwidth(d); tokens bound by memory.

    A degree that `bandwidth_bytes_per_s` does not list has the bandwidth of the smallest listed
    one above it; degree 1 communicates nothing.

    Attributes:
        ranks: number of ranks.
        fixed_s: seconds of a micro-batch before the first sequence.
        quadratic_s: a, seconds a token^2.
        linear_s: b, seconds a token.
        comm_bytes: bytes a token sends, over all ranks of its group.
        bandwidth_bytes_per_s: degree -> bytes that a rank sends in a second.
        memory_bytes: memory of a rank, for activations alone.
        recompute: the settings a group chooses between.
        node_ranks: ranks of a node.
        degrees: group sizes to choose from, ascending; none: every one from 1 to `ranks`.

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
        """Fills in the degrees, or checks them.

        Raises:
            PlanError: they are not ascending from 1 on.
        """
        if not self.degrees:
            object.__setattr__(self, "degrees", tuple(range(1, self.ranks + 1)))
        ascending = list(self.degrees) == sorted(set(self.degrees))
        if not ascending or not 1 <= self.degrees[0] <= self.degrees[-1] <= self.ranks:
            raise PlanError(
                f"degrees: got {self.degrees}; expected ascending group sizes from 1 to "
                f"{self.ranks} ranks; correct them"
            )

    def tokens(self, setting: int = 0) -> int:
        """Returns the tokens that fit on one rank."""
        return int(self.memory_bytes // self.recompute[setting].token_bytes)

    def bandwidth(self, degree: int) -> float:
        """Returns bytes a second between the ranks of a group; inf for a group of one."""
        if degree == 1:
            return inf
        listed = [d for d in self.bandwidth_bytes_per_s if d >= degree]
        nearest = min(listed) if listed else max(self.bandwidth_bytes_per_s)
        return self.bandwidth_bytes_per_s[nearest]

    def load_s(self, tokens: int, degree: int, setting: int = 0) -> float:
        """Returns the seconds that one sequence adds to a micro-batch."""
        compute_s = (self.quadratic_s * tokens + self.linear_s) * tokens
        comm_s = self.comm_bytes * tokens / self.bandwidth(degree)
        return (self.recompute[setting].compute_factor * compute_s + comm_s) / degree

    def seconds_s(self, bucket: Bucket, row: PlanRow, sizes: Sizes, count: int) -> float:
        """Returns the seconds of a micro-batch of sequences of one length by a row."""
        return self.fixed_s + count * self.load_s(sizes[TOKENS], row.sp, row.menu_step)

    def prices(self) -> PackedPrices:
        """Returns the formula as the planner of packed micro-batches asks for it."""
        return PackedPrices(OwnLengths(lambda b, s: True, self.seconds_s, lambda b: {TOKENS: 1}))

    def table(self) -> PlanTable:
        """Returns the rows of packed micro-batches: capacities that some degree fills.

        Where there would be more than `MOST_CAPACITIES` of them, some degrees are left out.
        """
        settings = range(len(self.recompute))
        degrees = _spread(self.degrees, MOST_CAPACITIES // len(self.recompute))
        rooms = sorted({self.tokens(i) * d for i in settings for d in degrees})
        buckets = tuple(Bucket(((TOKENS, room),)) for room in rooms)
        rows = tuple(
            tuple(
                PlanRow(d, 1, i, self.fixed_s + self.load_s(room, d, i))
                for d in degrees
                for i in settings
                if self.tokens(i) * d >= room
            )
            for room in rooms
        )
        return PlanTable(buckets, rows, self.ranks, self.node_ranks)


class _CostFile(BaseModel):
    model_config = ConfigDict(extra="forbid")
    fixed_s: float
    quadratic_s: float
    linear_s: float
    comm_bytes: float
    bandwidth_bytes_per_s: dict[int, float]
    memory_bytes: float
    recompute: list[Recompute]
    node_ranks: int = 8


def read_cost(file: Path, world: int) -> LinearCost:
    """Returns the formula of a JSON file with `LinearCost`'s fields, for so many ranks.

    Raises:
        PlanError: the file is not of this form.
    """
    try:
        found = _CostFile.model_validate(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError, ValidationError) as error:
        raise PlanError(
            f"{file}: got {error}; expected a JSON file with the fields "
            f"{', '.join(_CostFile.model_fields)}, as examples/flexsp_cost.json; correct it"
        ) from error
    return LinearCost(
        ranks=world,
        recompute=tuple(found.recompute),
        degrees=degrees_of(world, found.node_ranks),
        **found.model_dump(exclude={"recompute"}),
    )


def degrees_of(world: int, node_ranks: int) -> tuple[int, ...]:
    """Returns every degree up to two nodes, then whole nodes up to 16, then ever twice as many."""
    found = {*range(1, 2 * node_ranks + 1), *range(node_ranks, 16 * node_ranks + 1, node_ranks)}
    power = 16 * node_ranks
    while power <= world:
        found.add(power)
        power *= 2
    return tuple(sorted(d for d in {*found, world} if d <= world))


def longest_that_fits(cost: LinearCost) -> int:
    """Returns the tokens of the longest sequence that all ranks together hold."""
    return cost.degrees[-1] * max(cost.tokens(i) for i in range(len(cost.recompute)))


def dcpc_plan(lengths: Sequence[int], cost: LinearCost, turns: Iterable[int] = ()) -> StepPlan:
    """Returns dcpc's plan of a global batch; samples are positions in it.

    Args:
        lengths: tokens of each sequence.
        cost: cost formula.
        turns: turns of mode "evolve"; none: as mode "auto" plans.

    Raises:
        PlanError: no sequences, or one that all ranks together cannot hold.
    """
    numbered = list(enumerate(lengths))
    plan, rows = plan_rows(numbered, cost.table(), cost.prices(), turns=turns)
    return plan.packed(rows)


def _spread(degrees: Sequence[int], most: int) -> list[int]:
    """At most so many of the degrees, with the first and the last: those nearest a fixed ratio."""
    if len(degrees) <= most:
        return list(degrees)
    wanted, found = float(degrees[0]), list[int]()
    for left in range(most, 0, -1):
        later = [d for d in degrees if not found or d > found[-1]]
        found.append(min(later[: len(later) - left + 1], key=lambda d: abs(d - wanted)))
        wanted = found[-1] * (degrees[-1] / found[-1]) ** (1 / max(1, left - 1))
    return found
