"""The micro-batches of a rank in a step, one after the other, and the sum of their gradients."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch

from dcpc.errors import PlanError
from dcpc.runtime.data.steps import MicroBatch, Step
from dcpc.runtime.groups.groups import Groups
from dcpc.runtime.parameters.reduction import GivenUpError, Reduction
from dcpc.runtime.parameters.store import WholeStore
from dcpc.runtime.planner.plans import PlannedMicroBatch, rounds_of
from dcpc.runtime.step.clock import Clock
from dcpc.runtime.step.facts import gather_facts
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


@dataclass(frozen=True, slots=True)
class Turn:
    """What a rank does next.

    Attributes:
        own: what it runs; None: nothing, but it takes part in what others run.
        together: what ranks of a block run in this round; empty: ranks go on without each other.
    """

    own: MicroBatch | None
    together: tuple[PlannedMicroBatch, ...] = ()


def turns_of(step: Step, store: WholeStore, groups: Groups) -> list[Turn]:
    """Returns what this rank does, in order.

    Raises:
        PlanError: a group of ranks does not fit the blocks that share parameters out.
    """
    if not store.in_rounds:
        return [Turn(mb) for mb in step.micro_batches]
    own = iter(step.micro_batches)
    return [
        Turn(next(own) if any(groups.rank in mb.ranks for mb in together) else None, together)
        for together in rounds_of(step.plan, groups.rank, store.block)
    ]


def summed(
    call: ModelCall,
    step: Step,
    turns: Sequence[Turn],
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
        share = run_turns(
            call, turns, total, groups, reduction, delivering, in_rounds, clock, attempt
        )
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


def run_turns(
    call: ModelCall,
    turns: Sequence[Turn],
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
        inputs = mb.inputs_on(groups.device)
        with nullcontext() if early is None else early(reduction.deliver):
            loss = call(mb, inputs)
        if not loss.requires_grad:
            if not torch.is_grad_enabled():
                raise PlanError(
                    "train_step: got a call under torch.no_grad() or inference_mode(); expected "
                    "one outside, as it makes gradients; for a loss alone call evaluate()"
                )
            raise PlanError(
                "train_step: got a loss without a gradient; expected one that a parameter with "
                "requires_grad=True has a part in; unfreeze some before compile, take .detach() "
                "and argmax out of the loss, or call evaluate()"
            )
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
    facts = gather_facts([*mine, *(key in groups.broken for key in ranges)], groups)
    attempt.forget()
    groups.renew([key for key, broken in zip(ranges, facts[:, 2:].any(0), strict=True) if broken])
    every = enumerate(facts[:, :2].long().tolist())
    return OutOfMemoryInStepError([Shortage(r, n, wanted) for r, (n, wanted) in every if n >= 0])
