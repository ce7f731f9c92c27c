"""One optimizer step: agree, weigh, execute, look for numbers that are not finite, clip, result.

The rule: a rank differentiates its share of the loss, the objective is the sum over
ranks, so every parameter's gradient is summed over all ranks exactly once, whatever degrees the
step mixes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from dcpc.errors import DataError, DcpcError
from dcpc.runtime.data.steps import Step
from dcpc.runtime.groups.agreement import agree
from dcpc.runtime.step.execution import Execution, ReadyStep, StepState
from dcpc.runtime.step.facts import gather_facts, refuse_different, total_weight
from dcpc.runtime.step.gradients import beside_earlier, check_norm
from dcpc.runtime.step.result import StepResult


def train_step(
    execution: Execution,
    step: Step,
    *,
    clip: float | None = None,
    nonfinite: str = "raise",
    state: StepState | None = None,
    every: bool = False,
) -> StepResult:
    """Adds the gradient of the global batch's weighted loss to every parameter's `grad`.

    Collective over all ranks.

    Args:
        execution: execution of this rank's micro-batches.
        step: step of the loader.
        clip: largest norm of the whole gradient; a longer one is scaled down to it.
        nonfinite: what becomes of a loss that is NaN or infinite: "raise", or "skip" the step.
            Either way gradients are as they were before it. All ranks know the step's loss.
        state: state of the model that ranks compare. Default: none.
        every: whether all ranks are to know the seconds of every micro-batch.

    Returns:
        The step's loss and measured seconds.

    Raises:
        GroupError: the ranks are not in the same step with the same plan and parameters, or one
            did not arrive.
        DataError: the weights of the step are all zero, ranks loaded different values of a sample
            that they take together, the loss is not finite, or `clip` is no positive number.
        PlanError: a schedule does not end, or is none of these stages.
        OutOfMemoryInStepError: on all ranks, where one ran out of memory and the others could be
            told: gradients are what they were, and the step may be run again.
    """
    if clip is not None:
        check_norm(clip)
    start_s, groups = time.perf_counter(), execution.store.groups
    settings = f"clip {clip}, nonfinite {nonfinite}"
    ready, total = _begun(execution, step, settings, state or StepState())
    with beside_earlier(execution.store) as put_back:
        ran = ready.run(total)
        own_s = _own_s(step, ran.micro_batch_s) if every else []
        facts = gather_facts([ran.loss, sum(ran.micro_batch_s), *own_s], groups)
        loss = facts[:, 0].sum()  # the same on every rank, and so is what follows from it
        if not loss.isfinite():
            if nonfinite == "raise":
                raise _not_finite(step, loss)
            put_back.append(float(loss))
    norm = None if clip is None or put_back else execution.clip(clip)
    return StepResult(
        loss=loss,
        busy_s=tuple(facts[:, 1].tolist()),
        seconds_s=time.perf_counter() - start_s,
        total_weight=total,
        reduced_bytes=ran.reduced_bytes,
        early_bytes=ran.early_bytes,
        micro_batch_s=ran.micro_batch_s,
        reduction_s=ran.reduction_s,
        grad_norm=norm,
        skipped=bool(put_back),
        every_s=tuple(facts[:, 2:].amax(0).tolist()),
    )


def _begun(
    execution: Execution, step: Step, settings: str, state: StepState
) -> tuple[ReadyStep, float]:
    """Returns this rank's part of a step, and its total weight, once all ranks are in it."""
    groups, problem, own, ready = execution.store.groups, state.problem, "", None
    try:
        ready = execution.ready(step)
        own = ready.text
    except DcpcError as e:  # the other ranks wait for this one
        problem = problem or e
    text = f"{step.index} of epoch {step.epoch}, plan {step.plan.fingerprint}, {own}"
    agree(groups, groups.world, "step", f"{text}, {settings}{state.text}", problem)
    assert ready is not None, "its problem was raised"
    state.check()
    execution.store.begin()
    refuse_different(step, groups)
    return ready, total_weight(step, groups)


def _own_s(step: Step, micro_batch_s: Sequence[float]) -> list[float]:
    """Returns this rank's seconds for each micro-batch of the plan; 0 for those of others."""
    own_s = [0.0] * len(step.plan.micro_batches)
    for mb, took_s in zip(step.micro_batches, micro_batch_s, strict=True):
        own_s[mb.number] = took_s if mb.weight != 0 else 0.0
    return own_s


def _not_finite(step: Step, loss: torch.Tensor) -> DataError:
    """Returns the error of a step whose loss is no number, with its first samples."""
    return DataError(
        f"step {step.index} of epoch {step.epoch}, samples "
        f"{sorted(i for mb in step.plan.micro_batches for i in mb.sample_ids)[:8]}: got a loss of "
        f"{float(loss)}; expected a finite one; gradients are as they were before the step: look "
        "at these samples and the learning rate, clip gradients (clip=), or leave such steps out "
        "and count them with train_step(step, nonfinite='skip')"
    )
