"""Bytes of each stage in a step: what the replay of its schedule says, and the allocator.

The executor runs a step that the loader planned on gloo ranks, under torch's profiler, which lists
each allocation. Parameters and their gradients are there before, as they are in the prediction. A
micro-batch's own inputs are copies that live from its forward to its backward, which is what the
prediction has of them; a loader's live for the whole step.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dcpc.buckets import BATCH
from dcpc.compiled.pipeline import PipelinedModel, ProgramStage, pipeline_work
from dcpc.compiled.pipeline.trained.planner import PipelinePlanner
from dcpc.runtime.data.steps import Step
from dcpc.runtime.pipeline.executor import PipelineBatch, run_schedule
from dcpc.runtime.pipeline.grid import PipelineGrid
from dcpc.runtime.pipeline.schedule import PipelineSchedule, replay
from examples.allocator import measured_peak_bytes


class OwnInputs:
    """A stage that has a copy of a micro-batch's inputs from its forward to its backward.

    Args:
        stage: of a pipeline.
    """

    def __init__(self, stage: ProgramStage) -> None:
        self.stage = stage
        self.index, self.count, self.parameters = stage.index, stage.count, stage.parameters
        self.received, self.sent = stage.received, stage.sent

    def at(self, sizes: Mapping[str, int]) -> OwnInputs:
        """What runs a micro-batch: the same at all sizes."""
        return self

    def forward(
        self, inputs: Mapping[str, Tensor], received: tuple[Tensor, ...], seed: int = 0
    ) -> tuple[tuple[Tensor, ...], Any]:
        """What the stage sends, and what its backward needs."""
        own = {n: inputs[n].clone() for n in self.stage.part.program.inputs.values() if n in inputs}
        sent, saved = self.stage.forward({**inputs, **own}, received, seed)
        return sent, [saved, own]

    def backward(self, saved: Any, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        """Gradients of what it received."""
        return self.stage.backward(saved[0], grads)

    def backward_input(
        self, saved: Any, grads: tuple[Tensor | None, ...]
    ) -> tuple[tuple[Tensor | None, ...], Any]:
        """Gradients of what it received, and what `backward_weight` needs."""
        return self.stage.backward_input(saved[0], grads)

    def backward_weight(self, rest: Any) -> None:
        """Adds to gradients of parameters."""
        self.stage.backward_weight(rest)


def largest_error(compiled: PipelinedModel, steps: Sequence[Step]) -> float:
    """Returns by how much told bytes of this rank's stage are off at most, as a share.

    Collective over all ranks. What is told is compared with the rank of a stage that holds most.

    Args:
        compiled: in stages.
        steps: that the loader planned for it, with labels in each micro-batch.
    """
    planner = compiled.batch_planner
    assert isinstance(planner, PipelinePlanner), "the model is in stages"
    (stage, *_) = planner.cost.rows[compiled.stage]
    grid = PipelineGrid.make(compiled.groups, planner.layout, stage.learning)
    for p in compiled.parameters():
        p.grad = torch.zeros_like(p)  # gradients are added in place
    found = [_told_and_measured(planner, grid, step) for step in steps]
    compiled.zero_grad()
    here = (grid.replica, grid.stage, found)
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, here)
    stage_ranks = [rank_found for *where, rank_found in every if tuple(where) == here[:2]]
    errors = [
        abs(told / max(measured for _, measured in of_step) - 1)
        for of_step in zip(*stage_ranks, strict=True)
        for told, _ in of_step[:1]
        if told
    ]
    return max(errors, default=0.0)


def _told_and_measured(planner: PipelinePlanner, grid: PipelineGrid, step: Step) -> tuple[int, int]:
    """Returns the bytes of a step on this rank's stage as told, and as this rank has them."""
    if not step.micro_batches:
        return 0, 0
    schedule = PipelineSchedule.of_text(step.plan.pipelines[grid.replica])
    batches = [
        PipelineBatch(mb.inputs, {**mb.bucket.sizes, BATCH: len(mb.samples)}, 1.0, mb.number)
        for mb in step.micro_batches
    ]
    settings = [OwnInputs(s.by_trace[0].in_lane(grid.lane)) for s in planner.cost.rows[grid.stage]]

    def run() -> None:
        run_schedule(settings, batches, schedule, grid)

    run()  # compiles what has not run yet
    gc.collect()  # nothing of before is freed during the run
    measured_bytes = measured_peak_bytes(run)
    work = pipeline_work(planner.cost.rows, [b.sizes for b in batches], planner.cost.devices)
    return round(replay(work, schedule).peak_bytes[grid.stage]), measured_bytes
