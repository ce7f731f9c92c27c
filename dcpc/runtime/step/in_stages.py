"""A step of a model in stages: this rank's schedule, then one sum of all gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dcpc.buckets import BATCH, Bucket, Sizes
from dcpc.errors import PlanError
from dcpc.runtime.data.steps import MicroBatch, Step
from dcpc.runtime.parameters.store import ParameterStore
from dcpc.runtime.pipeline.executor import PipelineBatch, run_schedule
from dcpc.runtime.pipeline.forward import from_last
from dcpc.runtime.pipeline.grid import PipelineGrid
from dcpc.runtime.pipeline.schedule import Action, PipelineSchedule, check
from dcpc.runtime.pipeline.stage import Shaped, StageSetting
from dcpc.runtime.step.clock import Clock
from dcpc.runtime.step.execution import Ran, ReadyStep
from dcpc.runtime.step.facts import gather_facts
from dcpc.runtime.step.gradients import check_norm
from dcpc.runtime.step.recording import name_of, named

Inputs = Mapping[str, Tensor]
# (bucket, inputs, lengths of all dims) -> inputs and lengths that stages take.
Given = Callable[[Bucket, Inputs, Sizes], tuple[Inputs, Sizes]]


@dataclass
class InStages:
    """Runs this rank's stage of a model in stages; it is an `Execution`.

    Attributes:
        grid: place of this rank among the stages and pipelines.
        settings: stage of this rank, with each setting of recompute.
        parameters: parameters that the stage reads, by their names in the model.
        store: store of these parameters.
        summed: function that sums their gradients over all ranks and returns the summed bytes.
        given: function that returns the inputs that stages take of a micro-batch, the same on all
            ranks of a pipeline.
        seed: (epoch, number of the step, of the micro-batch) -> seed of its random numbers.
        shapes: (micro-batch, lengths) -> shape and dtype of what forward returns, the loss first;
            None: the loss alone is wanted.
        take: function that keeps the outputs of a micro-batch.
    """

    grid: PipelineGrid
    settings: Sequence[StageSetting]
    parameters: Mapping[str, nn.Parameter]
    store: ParameterStore
    summed: Callable[[], int]
    given: Given
    seed: Callable[[int, int, int], int]
    shapes: Callable[[MicroBatch, Sizes], Sequence[Shaped]] | None = None
    take: Callable[[MicroBatch, Sequence[Tensor]], None] | None = None

    def _counts(self, name: str) -> bool:
        """Whether this rank counts its part of a parameter's gradient: no element counts twice."""
        grid, p = self.grid, self.parameters[name]
        alone = self.store.shard(p) is p or not p.dim()  # whole on each rank that reads it
        first = not grid.replica and not grid.lane
        return p.requires_grad and (not alone or (first and min(grid.readers[name]) == grid.stage))

    def ready(self, step: Step) -> ReadyStep:
        """Returns this rank's part of a step, with its schedule and its inputs.

        Raises:
            PlanError: the schedule does not end, or is none of these stages.
        """
        schedule = _schedule(self.grid, step)
        batches = [self._batch(step, mb) for mb in step.micro_batches]
        return ReadyStep(f"{self.grid.stages} stages", partial(self._run, step, schedule, batches))

    def _batch(self, step: Step, mb: MicroBatch) -> PipelineBatch:
        """Returns a micro-batch as the executor takes it, on this rank's device."""
        planned = step.plan.micro_batches[mb.number]
        found = mb.inputs_on(self.grid.groups.device)
        run = {**planned.shape.sizes, BATCH: planned.batch}
        inputs, sizes = self.given(mb.bucket, found, run)
        return PipelineBatch(inputs, sizes, mb.weight, self.seed(step.epoch, step.index, mb.number))

    def _run(
        self,
        step: Step,
        whole: PipelineSchedule,
        every: Sequence[PipelineBatch],
        total: float,
    ) -> Ran:
        """Adds a step's gradient, summed over all ranks, to this stage's parameters."""
        # Where no label counts a mean is NaN, and so is NaN * 0: all stages leave it out.
        counted = [i for i, mb in enumerate(step.micro_batches) if mb.weight != 0]
        shares = [replace(every[i], weight=every[i].weight / total) for i in counted]
        part, grid = None, self.grid
        clock, schedule = Clock(grid.groups.device), whole.only(counted)
        if counted:
            made = dict[int, Sequence[Tensor]]()
            keep = None if self.shapes is None else made.__setitem__

            def name(a: Action) -> AbstractContextManager[object]:
                mb, at = step.micro_batches[counted[a.micro_batch]], f"stage {grid.stage}, {a.kind}"
                return named(lambda: f"{at} of {name_of(mb, grid.groups.rank)}")

            part = run_schedule(self.settings, shares, schedule, grid, clock.mark, keep, name)
            if self.shapes is not None and self.take is not None:
                for place, i in enumerate(counted):
                    mb = step.micro_batches[i]
                    shapes = self.shapes(mb, shares[place].sizes)
                    self.take(mb, from_last(made.pop(place, ()), shapes, grid))
        sums = Clock(grid.groups.device)
        sums.mark()
        with named(lambda: f"sum of gradients, rank {grid.groups.rank}"):
            reduced_bytes = self.summed()
        sums.mark()
        (reduction_s,) = sums.spans_s()
        micro_batch_s = [0.0] * len(step.micro_batches)
        order = schedule.orders[grid.stage]
        for action, took_s in zip(order, clock.spans_s()[::2], strict=True):
            micro_batch_s[counted[action.micro_batch]] += took_s
        own_loss = 0.0 if part is None or grid.lane else float(part)  # the same in every lane
        return Ran(own_loss, tuple(micro_batch_s), reduction_s, reduced_bytes)

    def clip(self, max_norm: float) -> float:
        """Scales a gradient of the whole model that is too long down to `max_norm`, in place.

        Returns its norm before. Collective over all ranks. A parameter that several stages read
        counts once.

        Raises:
            DataError: `max_norm` is no positive number.
        """
        check_norm(max_norm)
        every = self.parameters.items()
        held = {n: _local(g) for n, p in every if (g := self.store.shard(p).grad) is not None}
        counted = [g for n, g in held.items() if self._counts(n)]
        squares = float(torch.nn.utils.get_total_norm(counted).double() ** 2) if counted else 0.0
        norm = gather_facts([squares], self.grid.groups).sum().sqrt()
        share = torch.clamp(max_norm / (norm + 1e-6), max=1.0)  # as torch's clip_grads_with_norm_
        for gradient in held.values():
            gradient.mul_(share.to(gradient.device))
        return float(norm)


def _local(gradient: Any) -> Tensor:
    """Returns a gradient, of one whose rows ranks share out this rank's."""
    found: Tensor = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    return found


def _schedule(grid: PipelineGrid, step: Step) -> PipelineSchedule:
    """Returns the schedule of this rank's pipeline, once it is known to end.

    Raises:
        PlanError: it does not, or the step was planned for other stages.
    """
    told = step.plan.pipelines
    if len(told) != grid.replicas:
        raise PlanError(
            f"step {step.index} of epoch {step.epoch}: got schedules of {len(told)} pipelines; "
            f"expected {grid.replicas}; make the loader of this compiled model"
        )
    try:
        found = PipelineSchedule.of_text(told[grid.replica])
    except (ValueError, IndexError) as e:
        raise PlanError(
            f"step {step.index} of epoch {step.epoch}: got a schedule that cannot be read ({e}); "
            "expected one that the loader made; run the same dcpc on all ranks"
        ) from e
    check(found, len(step.micro_batches))
    return found
