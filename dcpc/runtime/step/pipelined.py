"""One optimizer step of a model in stages: this rank's schedule, then one sum of all gradients."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from dcpc.buckets import BATCH, Bucket, Sizes
from dcpc.errors import DcpcError, PlanError
from dcpc.runtime.data.steps import MicroBatch, Step
from dcpc.runtime.groups.agreement import agree
from dcpc.runtime.parameters.store import WholeStore
from dcpc.runtime.pipeline.executor import PipelineBatch, run_schedule
from dcpc.runtime.pipeline.forward import from_last
from dcpc.runtime.pipeline.grid import PipelineGrid
from dcpc.runtime.pipeline.schedule import PipelineSchedule, check
from dcpc.runtime.pipeline.stage import Shaped, StageSetting
from dcpc.runtime.step.clock import Clock
from dcpc.runtime.step.facts import gather_facts, refuse_different, total_weight
from dcpc.runtime.step.gradients import beside_earlier, check_norm
from dcpc.runtime.step.result import StepResult
from dcpc.runtime.step.step import not_finite

Inputs = Mapping[str, Tensor]
# (bucket, inputs, lengths of all dims) -> inputs and lengths that stages take.
Given = Callable[[Bucket, Inputs, Sizes], tuple[Inputs, Sizes]]


class Returned(Protocol):
    """Takes what the micro-batches of a step return."""

    def shapes(self, mb: MicroBatch, sizes: Sizes) -> Sequence[Shaped]:
        """Returns shape and dtype of what the last stage returns, the loss first."""

    def take(self, mb: MicroBatch, tensors: Sequence[Tensor]) -> None:
        """Takes what a micro-batch returned."""


@dataclass(frozen=True)
class OwnStage:
    """What this rank runs of a model in stages.

    Attributes:
        grid: where it is among the stages and pipelines.
        settings: its stage with each setting of recompute.
        parameters: of the model by name: those that its stage reads.
        store: what holds them, for an optimizer.
        summed: sums their gradients over all ranks, and returns the bytes that were summed.
        given: returns what stages take of a micro-batch, the same on all ranks of a pipeline.
        returned: takes what forward returns; None: the loss alone is wanted.
    """

    grid: PipelineGrid
    settings: Sequence[StageSetting]
    parameters: Mapping[str, nn.Parameter]
    store: WholeStore
    summed: Callable[[], int]
    given: Given
    returned: Returned | None = None

    @property
    def mine(self) -> list[nn.Parameter]:
        """What an optimizer has of gradients that this rank counts: no element counts twice."""
        grid, found = self.grid, list[nn.Parameter]()
        first = not grid.replica and not grid.lane
        for name, p in self.parameters.items():
            if p.requires_grad:
                kept = self.store.shard(p)
                alone = kept is p or not p.dim()  # whole on each rank that reads it
                if not alone or (first and min(grid.readers[name]) == grid.stage):
                    found.append(kept)
        return found


def pipelined_step(
    own: OwnStage,
    step: Step,
    seeds: Mapping[int, int],
    *,
    clip: float | None = None,
    nonfinite: str = "raise",
    problem: DcpcError | None = None,
) -> StepResult:
    """Adds the gradient of the global batch's weighted loss to this stage's parameters.

    Collective over all ranks.

    Args:
        own: what this rank runs.
        step: from the loader, planned for these stages.
        seeds: number of a micro-batch of this rank -> seed of its random numbers.
        clip: largest norm of the whole model's gradient.
        nonfinite: as for `train_step`.
        problem: of this rank, because of which no rank may go on.

    Raises:
        GroupError: the ranks are not in the same step with the same plan, or one did not arrive.
        DataError: as from `train_step`.
        PlanError: a schedule does not end, or is none of these stages.
    """
    start_s = time.perf_counter()
    grid, groups = own.grid, own.grid.groups
    schedule, batches = PipelineSchedule((), ()), list[PipelineBatch]()
    try:
        schedule = _schedule(own, step)
        batches = [_batch(step, mb, seeds[mb.number], own) for mb in step.micro_batches]
    except DcpcError as e:
        problem = problem or e
    text = f"{step.index} of epoch {step.epoch}, plan {step.plan.fingerprint}, clip {clip}"
    agree(groups, groups.world, "step", f"{text}, nonfinite {nonfinite}", problem)
    refuse_different(step, groups)
    total = total_weight(step, groups)
    # Where no label counts a mean is NaN, and so is NaN * 0: all stages leave it out.
    counted = [i for i, mb in enumerate(step.micro_batches) if mb.weight != 0]
    shares = [PipelineBatch(batches[i].inputs, batches[i].sizes, batches[i].weight / total,
                            batches[i].seed) for i in counted]  # fmt: skip
    with beside_earlier(own.store) as put_back:
        part, clock, schedule = None, Clock(groups.device), schedule.only(counted)
        if counted:
            made = dict[int, Sequence[Tensor]]()
            keep = None if own.returned is None else made.__setitem__
            part = run_schedule(own.settings, shares, schedule, grid, clock.mark, keep)
            if own.returned is not None:
                for place, number in enumerate(counted):
                    mb, sizes = step.micro_batches[number], shares[place].sizes
                    shapes = own.returned.shapes(mb, sizes)
                    own.returned.take(mb, from_last(made.pop(place, ()), shapes, grid))
        sums = Clock(groups.device)
        sums.mark()
        reduced_bytes = own.summed()
        sums.mark()
        (reduction_s,) = sums.spans_s()
        micro_batch_s = [0.0] * len(batches)
        order = schedule.orders[grid.stage]
        for action, took_s in zip(order, clock.spans_s()[::2], strict=True):
            micro_batch_s[counted[action.micro_batch]] += took_s
        own_loss = 0.0 if part is None or grid.lane else float(part)  # the same in every lane
        facts = gather_facts([own_loss, sum(micro_batch_s)], groups)
        loss = facts[:, 0].sum()  # the same on every rank, and so is what follows from it
        if not loss.isfinite():
            if nonfinite == "raise":
                raise not_finite(step, loss)
            put_back.append(float(loss))
    norm = None if clip is None or put_back else clip_stages(own, clip)
    return StepResult(
        loss=loss,
        busy_s=tuple(facts[:, 1].tolist()),
        seconds_s=time.perf_counter() - start_s,
        total_weight=total,
        reduced_bytes=reduced_bytes,
        micro_batch_s=tuple(micro_batch_s),
        reduction_s=reduction_s,
        grad_norm=norm,
        skipped=bool(put_back),
    )


def clip_stages(own: OwnStage, max_norm: float) -> float:
    """Scales a gradient of the whole model that is too long down to `max_norm`, in place.

    Collective over all ranks. A parameter that several stages read counts once.

    Args:
        own: what this rank runs; its gradients are summed.
        max_norm: above 0, in the 2-norm.

    Returns:
        The norm of the whole model's gradient before.

    Raises:
        DataError: `max_norm` is no positive number.
    """
    check_norm(max_norm)
    counted = [_local(grad) for p in own.mine if (grad := p.grad) is not None]
    squares = float(torch.nn.utils.get_total_norm(counted).double() ** 2) if counted else 0.0
    norm = gather_facts([squares], own.grid.groups).sum().sqrt()
    held = [own.store.shard(p) for p in own.parameters.values()]
    share = torch.clamp(max_norm / (norm + 1e-6), max=1.0)  # as torch's clip_grads_with_norm_
    for gradient in [_local(p.grad) for p in held if p.grad is not None]:
        gradient.mul_(share.to(gradient.device))
    return float(norm)


def _local(gradient: Any) -> Tensor:
    """Returns a gradient, of one whose rows ranks share out this rank's."""
    found: Tensor = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    return found


def _schedule(own: OwnStage, step: Step) -> PipelineSchedule:
    """Returns the schedule of this rank's pipeline, once it is known to end.

    Raises:
        PlanError: it does not, or the step was planned for other stages.
    """
    grid, told = own.grid, step.plan.pipelines
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


def _batch(step: Step, mb: MicroBatch, seed: int, own: OwnStage) -> PipelineBatch:
    """Returns a micro-batch as the executor takes it, on this rank's device."""
    rows = step.plan.micro_batches[mb.number].batch
    device = own.grid.groups.device
    inputs, sizes = own.given(mb.bucket, mb.inputs_on(device), {**mb.bucket.sizes, BATCH: rows})
    return PipelineBatch(inputs, sizes, mb.weight, seed)
