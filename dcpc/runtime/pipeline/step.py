"""A step of pipelines: each stage runs its schedule, gradients are summed once."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn

from dcpc.errors import DataError
from dcpc.runtime.pipeline.executor import PipelineBatch, run_schedule
from dcpc.runtime.pipeline.grid import PipelineGrid
from dcpc.runtime.pipeline.schedule import PipelineSchedule
from dcpc.runtime.pipeline.stage import Stage


@dataclass(frozen=True, slots=True)
class PipelineResult:
    """What came of a step.

    Attributes:
        loss: weighted mean over all micro-batches of all pipelines, the same on every rank.
        total_weight: sum of their weights.
        seconds_s: of this rank, the sum of gradients included.
    """

    loss: float
    total_weight: float
    seconds_s: float


def pipeline_step(
    settings: Sequence[Stage],
    batches: Sequence[PipelineBatch],
    schedule: PipelineSchedule,
    grid: PipelineGrid,
    parameters: Iterable[tuple[str, nn.Parameter]],
) -> PipelineResult:
    """Adds the gradient of the global batch's weighted mean loss to this stage's parameters.

    Collective over all ranks. To be called with empty gradients: what is there is summed, too.

    Args:
        settings: this rank's stage for each setting of recompute.
        batches: the micro-batches of this pipeline; weights as they are.
        schedule: of its stages.
        grid: where this rank is.
        parameters: of the model, by name.

    Raises:
        DataError: all weights are zero.
        PlanError: the schedule cannot run; before anything of it is sent.
        GroupError: a rank did not take part in time.
    """
    begin_s = time.perf_counter()
    first = grid.stage == 0
    total = _summed(sum(b.weight for b in batches) if first else 0.0, grid)
    if total <= 0:
        raise DataError(
            f"pipeline step: got a total weight of {total} over all micro-batches; expected more "
            "than 0; check that not every label is ignored"
        )
    shares = [replace(b, weight=b.weight / total) for b in batches]
    part = run_schedule(settings, shares, schedule, grid)
    grid.sum_gradients(parameters)
    loss = _summed(0.0 if part is None else float(part), grid)
    return PipelineResult(loss, total, time.perf_counter() - begin_s)


def _summed(value: float, grid: PipelineGrid) -> float:
    """Returns the sum over all ranks."""
    pg = grid.groups.control(grid.groups.world)
    if pg is None:
        return value
    x = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(x, group=pg)
    return x.item()
