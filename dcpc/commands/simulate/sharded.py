"""Systems that shard parameters over all ranks (ZeRO-3) and so go through a step in rounds.

In each round all ranks gather the parameters, gather them again and sum the gradients, whatever
each of them runs; a round lasts as long as its slowest group. Generous: planning knows all costs,
and a collective is at the wire's full bandwidth. Source of both: FlexSP (arXiv 2412.01523), whose
micro-batches all ranks run together; torch's FSDP2 with one SP degree.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from dcpc.buckets import Bucket
from dcpc.commands.simulate.model_rows import ModelCosts, SimRow
from dcpc.commands.simulate.workload import Epoch
from dcpc.runtime.planner.plans import StepPlan, step_plan
from dcpc.runtime.planner.step_planner import plan_step
from dcpc.runtime.planner.table import make_table


def flexsp_rounds(costs: ModelCosts, epoch: Epoch) -> Iterator[StepPlan]:
    """Yields the best plans that mix degrees, in rounds."""
    yield from _planned(costs, epoch, {b.bucket: b.least for b in costs.buckets})


def fixed_degree(costs: ModelCosts, epoch: Epoch) -> Iterator[StepPlan]:
    """Yields the best plans at the smallest degree that holds all buckets, in rounds.

    Raises:
        PlanError: there is none.
    """
    sp = costs.fixed_degree(least=True)
    rows = {b.bucket: tuple(row for row in b.least if row.sp == sp) for b in costs.buckets}
    yield from _planned(costs, epoch, rows)


def _planned(
    costs: ModelCosts, epoch: Epoch, rows: dict[Bucket, tuple[SimRow, ...]]
) -> Iterator[StepPlan]:
    table = make_table(rows, costs.world, costs.node_ranks)
    table = replace(table, block=costs.world)
    for samples in epoch.batches:
        plan = plan_step(samples, table)
        slower = [replace(mb, seconds_s=mb.seconds_s + costs.gather_s) for mb in plan.micro_batches]
        yield step_plan(slower, costs.world, costs.world)
