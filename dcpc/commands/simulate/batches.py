"""Systems on a cost formula, without a model: each plans the same batches of lengths."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from dcpc.commands.simulate.formula import LinearCost, Recompute, dcpc_plan
from dcpc.commands.simulate.packers import best_homogeneous, first_fit, fixed_sp, random_fill
from dcpc.errors import PlanError
from dcpc.runtime.planner.plans import StepPlan

Planner = Callable[[Sequence[int], LinearCost], StepPlan]


class _RecomputeFile(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str
    token_bytes: float
    compute_factor: float = 1.0


class _CostFile(BaseModel):
    model_config = ConfigDict(extra="forbid")
    fixed_s: float
    quadratic_s: float
    linear_s: float
    comm_bytes: float
    bandwidth_bytes_per_s: dict[int, float]
    memory_bytes: float
    recompute: list[_RecomputeFile]
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
        fixed_s=found.fixed_s,
        quadratic_s=found.quadratic_s,
        linear_s=found.linear_s,
        comm_bytes=found.comm_bytes,
        bandwidth_bytes_per_s=found.bandwidth_bytes_per_s,
        memory_bytes=found.memory_bytes,
        recompute=tuple(Recompute(**r.model_dump()) for r in found.recompute),
        node_ranks=found.node_ranks,
        degrees=degrees_of(world, found.node_ranks),
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


def planners(cost: LinearCost, batches: Sequence[Sequence[int]]) -> dict[str, Planner]:
    """Returns each system by name; fixed SP is the smallest power of two at which all fit."""
    longest = max(max(batch) for batch in batches)
    fits = [d for d in cost.degrees if d & (d - 1) == 0 and cost.tokens(0) * d >= longest]
    if not fits:
        raise PlanError(
            f"fixed SP: got a sequence of {longest} tokens; expected at most "
            f"{cost.tokens(0) * cost.degrees[-1]}, which {cost.ranks} ranks hold; leave it out"
        )
    sp = min(fits)
    powers = [1 << i for i in range(7, longest.bit_length()) if 1 << i < longest]
    return {
        "padded bucket, fixed SP": lambda lens, c: fixed_sp(lens, c, sp, pad_to=[*powers, longest]),
        "packing, fixed SP": lambda lens, c: fixed_sp(lens, c, sp),
        "best homogeneous SP per batch": best_homogeneous,
        "VideoSys random fill": random_fill,
        "first fit": first_fit,
        "dcpc": dcpc_plan,
    }


def plans_of(
    planner: Planner, batches: Sequence[Sequence[int]], cost: LinearCost
) -> Iterator[tuple[StepPlan, Sequence[int]]]:
    """Yields the plan of each batch, and the batch."""
    for batch in batches:
        yield planner(batch, cost), batch
