"""A step on groups of ranks: a rank's micro-batches one after the other, one sum of gradients."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from dcpc.errors import PlanError
from dcpc.runtime.data.steps import MicroBatch, Step
from dcpc.runtime.groups.groups import Groups
from dcpc.runtime.parameters.reduction import (
    COMM_BUCKET_BYTES,
    GivenUpError,
    Reduction,
    summary,
    trained,
)
from dcpc.runtime.parameters.row_store import RowStore
from dcpc.runtime.parameters.store import WholeStore
from dcpc.runtime.planner.plans import PlannedMicroBatch, rounds_of
from dcpc.runtime.step.clock import Clock
from dcpc.runtime.step.execution import Ran, ReadyStep
from dcpc.runtime.step.facts import gather_facts
from dcpc.runtime.step.gradients import clip_gradients
from dcpc.runtime.step.recording import name_of, named
from dcpc.runtime.step.shortage import Attempt, OutOfMemoryInStepError, Shortage

ModelCall = Callable[[MicroBatch, Mapping[str, torch.Tensor]], torch.Tensor]
# (takes a parameter and its gradient) -> context; backward of what is called in it hands each
# gradient over as soon as it is final, and adds nothing to `grad` itself.
Delivering = Callable[["Deliver"], AbstractContextManager[object]]
Deliver = Callable[[torch.nn.Parameter, torch.Tensor], None]


class InRounds(Protocol):
    """The model's part of a step in rounds, in which the ranks of a block gather together."""

    def begin_step(self, rounds: Sequence[Sequence[PlannedMicroBatch]]) -> None:
        """Begins a step of these rounds, each of micro-batches that ranks run at once."""

    def begin(self, together: Sequence[PlannedMicroBatch]) -> None:
        """Begins a round, in which the ranks run these micro-batches."""

    def idle(self, deliver: Deliver) -> None:
        """Takes part in a round in which this rank runs nothing.

        Args:
            deliver: function called with the tensor that graphs take for a parameter, and this
                rank's rows of its gradient.
        """


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a rank in a step.

    Attributes:
        own: micro-batch that it runs; None: it only takes part in those of others.
        together: micro-batches that the ranks of a block run in this round; empty: ranks go on
            without each other.
    """

    own: MicroBatch | None
    together: tuple[PlannedMicroBatch, ...] = ()


@dataclass(frozen=True)
class OnGroup:
    """Runs micro-batches, each on the ranks of its group; it is an `Execution`.

    Attributes:
        call: (micro-batch, its inputs on the device) -> the loss, scalar; each rank of the
            micro-batch's group gets the same one and differentiates its share of it.
        store: parameters of the model, and the ranks the step was planned for.
        prepare: function that compiles a micro-batch's variant before seconds are measured.
        delivering: context in which backward hands gradients over before it ends; None: there is
            none.
        in_rounds: model whose graphs gather parameters in rounds; None: ranks go on alone.
        comm_bucket_bytes: bytes of gradients that are sent at once.
    """

    call: ModelCall
    store: WholeStore | RowStore
    prepare: Callable[[MicroBatch], None] | None = None
    delivering: Delivering | None = None
    in_rounds: InRounds | None = None
    comm_bucket_bytes: int = COMM_BUCKET_BYTES

    def ready(self, step: Step) -> ReadyStep:
        """Returns this rank's part of a step; ranks compare the trained parameters."""
        return ReadyStep(summary(trained(self.store.whole)), partial(self._run, step))

    def _run(self, step: Step, total: float) -> Ran:
        """Adds a step's gradient, summed over all ranks, to `grad` of the store's parameters.

        Raises:
            OutOfMemoryInStepError: on all ranks, where one gave the step up.
            PlanError: a group of ranks does not fit the blocks that share parameters out.
        """
        groups = self.store.groups
        groups.prepare(step.plan.ranges)
        turns = self._turns(step)
        for turn in turns:
            if self.in_rounds is not None:
                self.in_rounds.begin(turn.together)
            if self.prepare is not None and turn.own is not None:
                self.prepare(turn.own)
        if self.in_rounds is not None:
            self.in_rounds.begin_step([turn.together for turn in turns])
        reduction = self.store.reduction(self.comm_bucket_bytes)
        clock = Clock(groups.device)
        share = self._summed(step, turns, total, reduction, clock)
        clock.mark()
        *micro_batch_s, reduction_s = clock.spans_s()
        sent = reduction.total_bytes, reduction.early_bytes
        return Ran(share, tuple(micro_batch_s), reduction_s, *sent)

    def clip(self, max_norm: float) -> float:
        """Scales the summed gradient down to a largest norm; returns its norm before."""
        return clip_gradients(self.store.kept, max_norm)

    def _turns(self, step: Step) -> list[Turn]:
        """Returns this rank's turns, in order."""
        store, rank = self.store, self.store.groups.rank
        if not store.in_rounds:
            return [Turn(mb) for mb in step.micro_batches]
        own = iter(step.micro_batches)
        return [
            Turn(next(own) if any(rank in mb.ranks for mb in together) else None, together)
            for together in rounds_of(step.plan, rank, store.block)
        ]

    def _summed(
        self, step: Step, turns: Sequence[Turn], total: float, reduction: Reduction, clock: Clock
    ) -> float:
        """Returns this rank's part of the step's loss; all ranks' gradients are summed then."""
        groups = self.store.groups
        attempt = Attempt(groups, step.micro_batches)
        share, shortage = 0.0, None
        try:
            share = self.run_turns(turns, total, reduction, clock, attempt)
        except Exception as e:
            shortage = attempt.given_up(e, self.in_rounds is not None)
            if shortage is None:
                raise
        # The error is gone here, and with it the frames that held what the micro-batch had.
        if shortage is not None:
            gc.collect()
            reduction.give_up()
        try:
            with named(lambda: f"sum of gradients, rank {groups.rank}"):
                reduction.finish()
        except GivenUpError:
            raise _given_up(step, shortage, attempt, groups) from None
        return share

    def run_turns(
        self,
        turns: Sequence[Turn],
        total: float,
        reduction: Reduction,
        clock: Clock,
        attempt: Attempt,
    ) -> float:
        """Returns this rank's part of the step's loss; groups count on their first rank.

        Marks the clock before the first micro-batch and after each.
        """
        losses, groups = [], self.store.groups
        counts = [turn.own is not None and turn.own.weight != 0 for turn in turns]
        last = max((i for i, each in enumerate(counts) if each), default=-1)
        clock.mark()
        for i, turn in enumerate(turns):
            mb = turn.own
            if self.in_rounds is not None:
                self.in_rounds.begin(turn.together)
            if mb is None or not counts[i]:
                # Every label ignored: a mean over nothing is NaN, and NaN * 0 too. All of the group
                # skip it.
                if self.in_rounds is not None:
                    self.in_rounds.idle(reduction.deliver)
                if mb is not None:
                    clock.mark()
                continue
            attempt.running = mb
            takes = reduction.takes_all or (i == last and groups.world > 1)
            deliver = reduction.deliver if takes else reduction.add
            with named(partial(name_of, mb, groups.rank)):
                inputs = mb.inputs_on(groups.device)
                with self._handing(deliver):
                    loss = self.call(mb, inputs)
                if not loss.requires_grad:
                    raise _no_gradient()
                factor = mb.weight / total
                (loss * factor).backward()
                reduction.collect()
            if mb.ranks[0] == groups.rank:
                losses.append(loss.detach().double() * factor)
            clock.mark()
        reduction.send()
        return float(torch.stack(losses).sum()) if losses else 0.0

    def _handing(self, deliver: Deliver | None) -> AbstractContextManager[object]:
        """Returns a context for calls whose gradients go there; None: autograd adds them up."""
        if deliver is None or self.delivering is None:
            return nullcontext()
        return self.delivering(deliver)


def _no_gradient() -> PlanError:
    """Returns the error of a loss that no gradient is made of."""
    if not torch.is_grad_enabled():
        return PlanError(
            "train_step: got a call under torch.no_grad() or inference_mode(); expected "
            "one outside, as it makes gradients; for a loss alone call evaluate()"
        )
    return PlanError(
        "train_step: got a loss without a gradient; expected one that a parameter with "
        "requires_grad=True has a part in; unfreeze some before compile, take .detach() "
        "and argmax out of the loss, or call evaluate()"
    )


def _given_up(
    step: Step, shortage: Shortage | None, attempt: Attempt, groups: Groups
) -> OutOfMemoryInStepError:
    """Returns who had too little memory, once all ranks know it and broken groups are made anew.

    Collective over all ranks.
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
