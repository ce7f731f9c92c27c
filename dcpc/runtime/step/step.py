"""One optimizer step: every micro-batch of this rank, then one sum of all gradients.

The rule: a rank differentiates its share of the loss, the objective is the sum over
ranks, so every parameter's gradient is summed over all ranks exactly once, whatever degrees the
step mixes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

import torch

from dcpc.errors import DataError
from dcpc.runtime.data.steps import MicroBatch, Step
from dcpc.runtime.groups.agreement import agree
from dcpc.runtime.groups.groups import Groups
from dcpc.runtime.parameters.reduction import COMM_BUCKET_BYTES, summary, trained
from dcpc.runtime.parameters.store import WholeStore
from dcpc.runtime.step.clock import Clock
from dcpc.runtime.step.facts import gather_facts, refuse_different, total_weight
from dcpc.runtime.step.gradients import beside_earlier, check_norm, clip_gradients
from dcpc.runtime.step.result import StepResult
from dcpc.runtime.step.turns import Delivering, InRounds, ModelCall, Turn, summed, turns_of


def train_step(
    call: ModelCall,
    step: Step,
    parameters: Iterable[torch.nn.Parameter] | WholeStore,
    groups: Groups,
    *,
    prepare: Callable[[MicroBatch], None] | None = None,
    delivering: Delivering | None = None,
    in_rounds: InRounds | None = None,
    clip: float | None = None,
    nonfinite: str = "raise",
    comm_bucket_bytes: int = COMM_BUCKET_BYTES,
    state: str = "",
    check: Callable[[], None] | None = None,
    every: bool = False,
) -> StepResult:
    """Adds the gradient of the global batch's weighted loss to every parameter's `grad`.

    Collective over all ranks.

    Args:
        call: (micro-batch, its inputs on the device) -> the loss, scalar; each rank of the
            micro-batch's group gets the same one and differentiates its share of it.
        step: from the loader.
        parameters: all of the model's, tied ones count once; or who holds what of them.
        groups: the process groups the step was planned for.
        prepare: compiles what a micro-batch needs, before seconds are measured.
        delivering: lets backward hand over gradients before it ends; None: it does not.
        in_rounds: the model, for a store whose parameters are gathered.
        clip: largest norm of all gradients together; longer ones are scaled down to it.
        nonfinite: what becomes of a loss that is NaN or infinite: "raise", or "skip" the step.
            Either way gradients are as they were before it. All ranks know the step's loss.
        comm_bucket_bytes: gradients that are sent at once.
        state: of the model, as text: the same on every rank.
        check: runs once all ranks are known to have the same state, before anything else; what it
            raises it raises on every rank.
        every: whether all ranks are to know the seconds of every micro-batch.

    Returns:
        The step's loss and measured seconds.

    Raises:
        GroupError: the ranks are not in the same step with the same plan and parameters, or one
            did not arrive.
        DataError: the weights of the step are all zero, ranks loaded different values of a sample
            that they take together, the loss is not finite, or `clip` is no positive number.
        OutOfMemoryInStepError: on all ranks, where one ran out of memory and the others could be
            told: gradients are what they were, and the step may be run again.
    """
    if clip is not None:
        check_norm(clip)
    start_s = time.perf_counter()
    store = parameters if isinstance(parameters, WholeStore) else WholeStore(parameters, groups)
    total = _begun(step, store, groups, f"clip {clip}, nonfinite {nonfinite}{state}", check)
    with beside_earlier(store) as put_back:
        turns = turns_of(step, store, groups)
        _prepare(turns, prepare, in_rounds)
        reduction, clock = store.reduction(comm_bucket_bytes), Clock(groups.device)
        share = summed(call, step, turns, total, groups, reduction, delivering, in_rounds, clock)
        clock.mark()
        *micro_batch_s, reduction_s = clock.spans_s()
        own_s = _own_s(step, micro_batch_s) if every else []
        facts = gather_facts([share, sum(micro_batch_s), *own_s], groups)
        loss = facts[:, 0].sum()  # the same on every rank, and so is what follows from it
        if not loss.isfinite():
            if nonfinite == "raise":
                raise not_finite(step, loss)
            put_back.append(float(loss))
    norm = None if clip is None or put_back else clip_gradients(store.kept, clip)
    return StepResult(
        loss=loss,
        busy_s=tuple(facts[:, 1].tolist()),
        seconds_s=time.perf_counter() - start_s,
        total_weight=total,
        reduced_bytes=reduction.total_bytes,
        early_bytes=reduction.early_bytes,
        micro_batch_s=tuple(micro_batch_s),
        reduction_s=reduction_s,
        grad_norm=norm,
        skipped=bool(put_back),
        every_s=tuple(facts[:, 2:].amax(0).tolist()),
    )


def _begun(
    step: Step,
    store: WholeStore,
    groups: Groups,
    settings: str,
    check: Callable[[], None] | None,
) -> float:
    """Returns the step's total weight, once all ranks are in it with the same model and samples.

    Args:
        step: from the loader.
        store: who holds what of the parameters.
        groups: the process groups.
        settings: of the step and the model, as text: the same on every rank.
        check: as for `train_step`.
    """
    text = f"{step.index} of epoch {step.epoch}, plan {step.plan.fingerprint}"
    agree(groups, groups.world, "step", f"{text}, {summary(trained(store.whole))}, {settings}")
    if check is not None:
        check()
    store.begin()
    refuse_different(step, groups)
    groups.prepare(step.plan.ranges)
    return total_weight(step, groups)


def _prepare(
    turns: Sequence[Turn],
    prepare: Callable[[MicroBatch], None] | None,
    in_rounds: InRounds | None,
) -> None:
    """Compiles what the turns need, before seconds are measured."""
    for turn in turns:
        if in_rounds is not None:
            in_rounds.begin(turn.together)
        if prepare is not None and turn.own is not None:
            prepare(turn.own)


def _own_s(step: Step, micro_batch_s: Sequence[float]) -> list[float]:
    """Returns this rank's seconds for each micro-batch of the plan; 0 for those of others."""
    own_s = [0.0] * len(step.plan.micro_batches)
    for mb, took_s in zip(step.micro_batches, micro_batch_s, strict=True):
        own_s[mb.number] = took_s if mb.weight != 0 else 0.0
    return own_s


def not_finite(step: Step, loss: torch.Tensor) -> DataError:
    """Returns the error of a step whose loss is no number, with its first samples."""
    return DataError(
        f"step {step.index} of epoch {step.epoch}, samples "
        f"{sorted(i for mb in step.plan.micro_batches for i in mb.sample_ids)[:8]}: got a loss of "
        f"{float(loss)}; expected a finite one; gradients are as they were before the step: look "
        "at these samples and the learning rate, clip gradients (clip=), or leave such steps out "
        "and count them with train_step(step, nonfinite='skip')"
    )
