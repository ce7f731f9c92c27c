"""One optimizer step: every micro-batch of this rank, then one sum of all gradients.

The rule: a rank differentiates its share of the loss, the objective is the sum over
ranks, so every parameter's gradient is summed over all ranks exactly once, whatever degrees the
step mixes.
"""

from __future__ import annotations

import gc
import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from dcpc.errors import DataError
from dcpc.runtime.data.steps import MicroBatch, Step
from dcpc.runtime.groups.agreement import agree
from dcpc.runtime.groups.groups import Groups
from dcpc.runtime.groups.same_state import checksum
from dcpc.runtime.parameters.reduction import (
    COMM_BUCKET_BYTES,
    GivenUpError,
    Reduction,
    summary,
    trained,
)
from dcpc.runtime.parameters.store import WholeStore
from dcpc.runtime.planner.plans import PlannedMicroBatch, imbalance, rounds_of
from dcpc.runtime.step.clock import Clock
from dcpc.runtime.step.shortage import Attempt, OutOfMemoryInStepError, Shortage

ModelCall = Callable[[MicroBatch, Mapping[str, torch.Tensor]], torch.Tensor]
# (takes a parameter and its gradient) -> context; backward of what is called in it hands each
# gradient over as soon as it is final, and adds nothing to `grad` itself.
Delivering = Callable[["Deliver"], AbstractContextManager[object]]
Deliver = Callable[[torch.nn.Parameter, torch.Tensor], None]


class InRounds(Protocol):
    """What a step in rounds asks of the model."""

    def begin(self, together: Sequence[PlannedMicroBatch]) -> None:
        """Begins a round, in which the ranks run these."""

    def idle(self, deliver: Deliver) -> None:
        """Takes part in a round in which this rank runs nothing.

        Args:
            deliver: takes what is taken for a parameter, and this rank's rows of its gradient.
        """


@dataclass(frozen=True)
class StepResult:
    """What came of a step.

    Attributes:
        loss: weighted mean loss of the global batch, float64 scalar, the same on every rank.
        busy_s: measured seconds each rank took for its micro-batches, waits for its peers inside
            collectives included, compiling excluded.
        seconds_s: measured seconds of the whole step on this rank, reduction included.
        total_weight: sum of the weights of all micro-batches.
        reduced_bytes: gradients that this rank put into the sum over ranks; 0 alone.
        early_bytes: those of them that were on the way before its last backward had ended.
        micro_batch_s: measured seconds of each micro-batch of this rank; 0 of one that does not
            count.
        reduction_s: measured seconds from the end of this rank's micro-batches to the sum of
            gradients: waiting for slower ranks, and the wire.
        grad_norm: of the summed gradient before it was clipped; None: not asked for, or skipped.
        skipped: whether its loss was NaN or infinite: gradients are as they were before it.
        every_s: measured seconds of each micro-batch of the plan, on its slowest rank, the same on
            every rank; 0 of one that does not count; empty: not asked for.
    """

    loss: torch.Tensor
    busy_s: tuple[float, ...]
    seconds_s: float
    total_weight: float
    reduced_bytes: int = 0
    early_bytes: int = 0
    micro_batch_s: tuple[float, ...] = ()
    reduction_s: float = 0.0
    grad_norm: float | None = None
    skipped: bool = False
    every_s: tuple[float, ...] = ()

    @property
    def imbalance(self) -> float:
        """Measured mean idle share of the ranks, 0 to 1."""
        return imbalance(self.busy_s)

    @property
    def idle_s(self) -> tuple[float, ...]:
        """Measured seconds of each rank from its last micro-batch to that of the last rank."""
        return tuple(max(self.busy_s) - t for t in self.busy_s)


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
    agree(
        groups,
        groups.world,
        "step",
        f"{step.index} of epoch {step.epoch}, plan {step.plan.fingerprint}, "
        f"{summary(trained(store.whole))}, clip {clip}, nonfinite {nonfinite}{state}",
    )
    if check is not None:
        check()
    store.begin()
    _refuse_different(step, groups)
    groups.prepare(step.plan.ranges)
    total = _total_weight(step, groups)
    with _beside_earlier(store) as put_back:
        turns = _turns(step, store, groups)
        for turn in turns:
            if in_rounds is not None:
                in_rounds.begin(turn.together)
            if prepare is not None and turn.own is not None:
                prepare(turn.own)
        reduction, clock = store.reduction(comm_bucket_bytes), Clock(groups.device)
        share = _summed(call, step, turns, total, groups, reduction, delivering, in_rounds, clock)
        clock.mark()
        *micro_batch_s, reduction_s = clock.spans_s()
        own_s = [0.0] * len(step.plan.micro_batches) if every else []
        if every:
            for mb, took_s in zip(step.micro_batches, micro_batch_s, strict=True):
                own_s[mb.number] = took_s if mb.weight != 0 else 0.0
        facts = _gather([share, sum(micro_batch_s), *own_s], groups)
        loss = facts[:, 0].sum()  # the same on every rank, and so is what follows from it
        if not loss.isfinite():
            if nonfinite == "raise":
                raise _not_finite(step, loss)
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


def reduce_gradients(
    parameters: Iterable[torch.nn.Parameter],
    groups: Groups,
    *,
    state: str = "",
    check: Callable[[], None] | None = None,
) -> None:
    """Sums every parameter's gradient over all ranks, in place; alone: nothing.

    A parameter without a gradient here counts as zeros, one without a gradient anywhere stays
    without. Collective over all ranks, also those that ran nothing. To be called once per optimizer
    step.

    Args:
        parameters: all of the model's, in the same order on every rank; tied ones count once.
        groups: the process groups.
        state: of the model, as for `train_step`.
        check: as for `train_step`.

    Raises:
        GroupError: the ranks have different parameters, or one did not arrive.
    """
    params = trained(parameters)
    agree(groups, groups.world, "reduce_gradients of", summary(params) + state)
    if check is not None:
        check()
    Reduction(params, groups).finish()


def clip_gradients(parameters: Iterable[torch.nn.Parameter], max_norm: float) -> float:
    """Scales gradients that are together longer than `max_norm` down to it, in place.

    After the sum over ranks: every rank has the whole gradient and finds the same norm.

    Args:
        parameters: of the whole model.
        max_norm: above 0, in the 2-norm.

    Returns:
        The norm of all gradients together, before.

    Raises:
        DataError: `max_norm` is no positive number.
    """
    check_norm(max_norm)
    norm = torch.nn.utils.clip_grad_norm_(list(parameters), max_norm)
    return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


def check_norm(max_norm: object) -> None:
    """Refuses what is no largest norm of a gradient.

    Raises:
        DataError: it is no positive number.
    """
    if isinstance(max_norm, bool) or not isinstance(max_norm, int | float) or not max_norm > 0:
        raise DataError(
            f"clipping of gradients: got a largest norm of {max_norm!r}; expected a positive "
            "number; pass e.g. 1.0"
        )


def _not_finite(step: Step, loss: torch.Tensor) -> DataError:
    return DataError(
        f"step {step.index} of epoch {step.epoch}, samples "
        f"{sorted(i for mb in step.plan.micro_batches for i in mb.sample_ids)[:8]}: got a loss of "
        f"{float(loss)}; expected a finite one; gradients are as they were before the step: look "
        "at these samples and the learning rate, clip gradients (clip=), or leave such steps out "
        "and count them with train_step(step, nonfinite='skip')"
    )


@contextmanager
def _beside_earlier(store: WholeStore) -> Iterator[list[float]]:
    """Has gradients made as if there were none, and adds them to those that are there.

    These were reduced by an earlier step: they are not summed again. Where making them fails there
    is what was there before: a part of a step's gradient is no gradient. So it is where the block
    puts something into the list that it gets.
    """
    params = trained(store.kept)
    earlier = [p.grad for p in params]
    for p in params:
        p.grad = None
    put_back: list[float] = []
    try:
        yield put_back
    except BaseException:
        _restore(store, params, earlier)
        raise
    if put_back:
        _restore(store, params, earlier)
        return
    for p, grad in zip(params, earlier, strict=True):
        if grad is not None:
            p.grad = grad if p.grad is None else grad.add_(p.grad)


def _restore(
    store: WholeStore,
    params: Sequence[torch.nn.Parameter],
    earlier: Sequence[torch.Tensor | None],
) -> None:
    store.failed()
    for p, grad in zip(params, earlier, strict=True):
        p.grad = grad


@dataclass(frozen=True, slots=True)
class _Turn:
    """What a rank does next.

    Attributes:
        own: what it runs; None: nothing, but it takes part in what others run.
        together: what ranks of a block run in this round; empty: ranks go on without each other.
    """

    own: MicroBatch | None
    together: tuple[PlannedMicroBatch, ...] = ()


def _turns(step: Step, store: WholeStore, groups: Groups) -> list[_Turn]:
    """Returns what this rank does, in order."""
    if not store.in_rounds:
        return [_Turn(mb) for mb in step.micro_batches]
    own = iter(step.micro_batches)
    return [
        _Turn(next(own) if any(groups.rank in mb.ranks for mb in together) else None, together)
        for together in rounds_of(step.plan, groups.rank, store.block)
    ]


def _summed(
    call: ModelCall,
    step: Step,
    turns: Sequence[_Turn],
    total: float,
    groups: Groups,
    reduction: Reduction,
    delivering: Delivering | None,
    in_rounds: InRounds | None,
    clock: Clock,
) -> float:
    """Returns this rank's part of the step's loss; all ranks' gradients are summed then.

    Raises:
        OutOfMemoryInStepError: on all ranks, where one gave the step up.
    """
    attempt = Attempt(groups, step.micro_batches)
    share, shortage = 0.0, None
    try:
        share = _run(call, turns, total, groups, reduction, delivering, in_rounds, clock, attempt)
    except Exception as e:
        shortage = attempt.given_up(e, in_rounds is not None)
        if shortage is None:
            raise
    # The error is gone here, and with it the frames that held what the micro-batch had.
    if shortage is not None:
        gc.collect()
        reduction.give_up()
    try:
        reduction.finish()
    except GivenUpError:
        raise _given_up(step, shortage, attempt, groups) from None
    return share


def _run(
    call: ModelCall,
    turns: Sequence[_Turn],
    total: float,
    groups: Groups,
    reduction: Reduction,
    delivering: Delivering | None,
    in_rounds: InRounds | None,
    clock: Clock,
    attempt: Attempt,
) -> float:
    """Returns this rank's part of the step's loss; groups count on their first rank.

    Marks the clock before the first micro-batch and after each.
    """
    losses = []
    counts = [turn.own is not None and turn.own.weight != 0 for turn in turns]
    last = max((i for i, each in enumerate(counts) if each), default=-1)
    clock.mark()
    for i, turn in enumerate(turns):
        mb = turn.own
        if in_rounds is not None:
            in_rounds.begin(turn.together)
        if mb is None or not counts[i]:
            # Every label ignored: a mean over nothing is NaN, and NaN * 0 too. All of the group
            # skip it.
            if in_rounds is not None:
                in_rounds.idle(reduction.deliver)
            if mb is not None:
                clock.mark()
            continue
        attempt.running = mb
        last_or_all = reduction.takes_all or i == last
        early = delivering if last_or_all and groups.world > 1 else None
        inputs = {k: x.to(groups.device, non_blocking=True) for k, x in mb.inputs.items()}
        with nullcontext() if early is None else early(reduction.deliver):
            loss = call(mb, inputs)
        factor = mb.weight / total
        (loss * factor).backward()
        reduction.collect()
        if mb.ranks[0] == groups.rank:
            losses.append(loss.detach().double() * factor)
        clock.mark()
    reduction.send()
    return float(torch.stack(losses).sum()) if losses else 0.0


def _given_up(
    step: Step, shortage: Shortage | None, attempt: Attempt, groups: Groups
) -> OutOfMemoryInStepError:
    """Returns who had too little memory, once all ranks know it and broken groups are made anew.

    Collective over all ranks.

    Args:
        step: that was given up.
        shortage: of this rank; None: it could have gone on.
        attempt: of this rank.
        groups: the process groups.
    """
    if groups.device.type == "cuda":
        torch.cuda.empty_cache()
    mine = (-1, 0) if shortage is None else (shortage.number, shortage.wanted_bytes)
    ranges = step.plan.ranges
    facts = _gather([*mine, *(key in groups.broken for key in ranges)], groups)
    attempt.forget()
    groups.renew([key for key, broken in zip(ranges, facts[:, 2:].any(0), strict=True) if broken])
    every = enumerate(facts[:, :2].long().tolist())
    return OutOfMemoryInStepError([Shortage(r, n, wanted) for r, (n, wanted) in every if n >= 0])


def _total_weight(step: Step, groups: Groups) -> float:
    """Returns the sum of all micro-batches' weights, each counted on its group's first rank."""
    total = step.total_weight
    if total is None:
        firsts = [mb for mb in step.micro_batches if mb.ranks[0] == groups.rank]
        total = float(_gather([sum(mb.weight for mb in firsts)], groups).sum())
    if total <= 0:
        raise DataError(
            f"step {step.index} of epoch {step.epoch}: got a total weight of {total} over its "
            f"{step.samples} samples; expected more than 0; check weight= and that not every label "
            "is ignored"
        )
    return total


def _refuse_different(step: Step, groups: Groups) -> None:
    """Raises on every rank where those that share a micro-batch have different inputs for it.

    Each has loaded the samples by itself, and a dataset may draw from the process's random numbers.
    Collective over all ranks, if there is such a micro-batch.
    """
    shared = [n for n, mb in enumerate(step.plan.micro_batches) if mb.sp > 1]
    pg = groups.control(groups.world)
    if pg is None or not shared:
        return
    mine = {mb.number: mb for mb in step.micro_batches}
    none = torch.iinfo(torch.int64).min
    found = torch.full((2, len(shared)), none)
    for at, number in enumerate(shared):
        if number in mine:
            texts = [f"{name} {x.dtype} {tuple(x.shape)} {checksum(x)}"
                     for name, x in mine[number].inputs.items()]  # fmt: skip
            text = f"{mine[number].weight} {texts}"
            digest = hashlib.blake2b(text.encode(), digest_size=7).digest()
            found[0, at] = int.from_bytes(digest, "big")
            found[1, at] = -found[0, at]
    dist.all_reduce(found, dist.ReduceOp.MAX, group=pg)
    for at, (most, least) in enumerate(found.t().tolist()):
        if most != -least:
            mb = step.plan.micro_batches[shared[at]]
            what = f"rows {list(mb.sample_ids)[:8]}" if step.rows else f"{list(mb.sample_ids)[:8]}"
            raise DataError(
                f"step {step.index} of epoch {step.epoch}, samples {what}: ranks "
                f"{','.join(map(str, mb.ranks))} take them together and got different inputs or "
                "weights; expected the same on each; have the dataset give a sample the same "
                "values on every rank: draw from a generator seeded by its index and the epoch"
            )


def _gather(values: Sequence[float], groups: Groups) -> torch.Tensor:
    """Returns `values` of every rank, float64 (world, len(values))."""
    mine = torch.tensor(values, dtype=torch.float64)
    pg = groups.control(groups.world)
    if pg is None:
        return mine[None]
    out = torch.empty(groups.world * len(values), dtype=torch.float64)
    dist.all_gather_into_tensor(out, mine, group=pg)
    return out.view(groups.world, -1)
