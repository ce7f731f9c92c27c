"""Calls of a compiled model, its evaluation, and its optimizer steps."""

from __future__ import annotations

import logging
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dcpc.compiled.editions import Edition
from dcpc.compiled.evaluation import filled_up, in_eval, length_edition, refuse_arguments
from dcpc.compiled.model.core import ModelCore
from dcpc.compiled.model.running import ModelExecution
from dcpc.compiled.outputs.gradients import refusing_gradients
from dcpc.compiled.outputs.wanted import WithOutputs, output_kind
from dcpc.errors import DataError, DcpcError, DispatchError, check_choice, checking_call, explaining
from dcpc.runtime.data.arguments import check_step
from dcpc.runtime.data.steps import Step
from dcpc.runtime.groups.agreement import agree
from dcpc.runtime.planner.speeds import speeds_line
from dcpc.runtime.step.gradients import check_norm, reduce_gradients
from dcpc.runtime.step.recording import named
from dcpc.runtime.step.result import StepResult
from dcpc.runtime.step.stats import log_step
from dcpc.runtime.step.step import train_step

LOG = logging.getLogger("dcpc")


class ModelRuns:
    """Runs calls and steps of a compiled model.

    Args:
        core: state that all parts of the model share.
        execution: execution that runs the calls and steps.
    """

    def __init__(self, core: ModelCore, execution: ModelExecution) -> None:
        self.core, self.execution = core, execution
        self._loggers: list[Callable[[Step, StepResult], None]] = [log_step]

    def forward(
        self, args: tuple[Tensor, ...], outputs: bool | str | Tensor, inputs: dict[str, Tensor]
    ) -> Any:
        """Returns the result of `CompiledModel.forward`."""
        if isinstance(outputs, Tensor):
            inputs, outputs = {**inputs, "outputs": outputs}, False
        kind = output_kind("a call", outputs)
        self.core.refuse_unmade("a call")
        if torch.is_grad_enabled():
            self.execution.refuse_by_hand("a call with gradients")
        with self.execution.waiting("call"):
            edition, problem = self._edition(kind)
            found = self._run(
                edition, problem, self.core.dispatch.named(self.core.model, args, inputs)
            )
        made = edition.planned.loss
        if not isinstance(made, WithOutputs):
            return found[0]
        return made.restored(refusing_gradients(edition.planned.traces[0].traced.program, found))

    @checking_call("evaluate", DispatchError)
    def evaluate(
        self,
        batch: Mapping[str, Tensor],
        *,
        between: str | None = None,
        pad: Mapping[str, int | float] | None = None,
        outputs: bool | str = False,
    ) -> Any:
        """Returns the loss of a batch in eval() and under no_grad; the model's mode stays.

        The first call captures and plans the model in eval(), where its graphs are others there.
        Ranks call it as they call the model: those of an SP group with the same batch.

        Args:
            batch: tensors by input name.
            between: treatment of lengths that no bucket has: None: they run by the graphs of
                the smallest bucket that holds them, or are refused where these are not right;
                "pad": they are filled up to that bucket; "compile": they are captured and planned
                when they first come.
            pad: input name -> value that fills it up at its end, as for `dcpc.DataLoader`.
            outputs: whether what forward returns comes back, too: then `(loss, outputs)`, as from
                a call.

        Raises:
            DispatchError: names, dtypes or shapes match no bucket, no bucket is as long, an input
                has no value in `pad`, or padding changes the loss.
            TraceError: forward returns something else than tensors and numbers.
            GroupError: as for a call.
        """
        kind = output_kind("evaluate", outputs)
        core = self.core
        refuse_arguments(batch, between, pad, core.buckets, bool(kind))
        core.refuse_unmade("evaluate")
        inputs = core.buckets.completed(batch)
        with self.execution.waiting("evaluate"), in_eval(core.model), torch.no_grad():
            edition, problem = self._edition(kind)
            if problem is not None and (kind or between is not None):
                raise problem
            if between == "pad":
                inputs = filled_up(edition, inputs, pad or {})
            elif between == "compile":
                edition = length_edition(core.editions, edition, inputs)
            found = self._run(edition, problem, inputs)
            made = edition.planned.loss
            return made.restored(found) if isinstance(made, WithOutputs) else found[0]

    def _edition(self, kind: str, in_step: bool = False) -> tuple[Edition, DcpcError | None]:
        """Returns the edition of the model as it is with a kind of outputs, and its problem."""
        edition, problem = self.core.editions.now()
        if in_step:
            problem = problem or self._step_problem(edition)
        if kind and problem is None:
            return self.core.editions.with_outputs(edition, kind)
        return edition, problem

    def _run(
        self, edition: Edition, problem: DcpcError | None, inputs: dict[str, Tensor]
    ) -> tuple[Any, ...]:
        with self.core.groups.watch.naming():
            return self.execution.call(edition, problem, inputs)

    @checking_call("train_step", DataError)
    @explaining("train_step")
    def train_step(
        self,
        step: Step,
        *,
        clip: float | None = None,
        nonfinite: str = "raise",
        outputs: bool | str = False,
    ) -> StepResult:
        """Runs all micro-batches of a planned step and sums the gradients over the ranks.

        The gradient is that of the weighted mean loss of the whole global batch, as one device
        would compute it. Collective over all ranks.

        Where a rank runs out of memory, all put their gradients back, the bucket is planned again
        with less memory, and the step of the same samples runs again.

        Args:
            step: step of a `dcpc.DataLoader`.
            clip: largest norm of the whole batch's gradient; a longer one is scaled down to it.
            nonfinite: effect of a loss that is NaN or infinite: "raise" a `DataError`, or
                "skip" the step: `skipped` of the result is set, and `stats().skipped` counts it.
                Either way all ranks do the same, and gradients are as they were before the step.
            outputs: whether what forward returns comes back, too, as `outputs` of the result:
                "gathered" (or True), each tensor whole on every rank that runs the micro-batch; or
                "sharded", each as an `OutputPiece`: what this rank has of it, and where that lies.
                The first such step captures, plans and verifies the graphs that return them.

        Returns:
            The global loss, measured seconds and imbalance; and, where they are asked for, the
            outputs of each micro-batch of this rank, detached, in the order of its samples.

        Raises:
            DataError: an argument or a sample is wrong on some rank, or the loss is not finite.
            DispatchError: the model changed since it was compiled.
            GroupError: the ranks are not in the same step, or one did not arrive.
            PlanError: a rank ran out of memory, and nothing smaller is left to try; or what the
                micro-batches give back does not fit.
            TraceError: with outputs, forward returns something else than tensors and numbers.
        """
        core, refused = self.core, _refused(step, clip, nonfinite, outputs)
        if refused is not None:
            core.agreed.of_step(None)  # its turn is over on this rank, too
            agree(core.groups, core.groups.world, "step", "", refused)
        core.refuse_unmade("a train step")
        edition, problem = self._edition(output_kind("train_step", outputs), in_step=True)
        state, every = core.agreed.of_step(problem), core.learned.learns
        if isinstance(edition.planned.loss, WithOutputs):
            state = replace(state, text=f"{state.text}, outputs of {edition.text}")

        def attempt(step: Step) -> StepResult:
            execution, own, kept = self.execution.of_step(step, edition, state)
            with core.averages.of_step() as put_back:
                result = train_step(
                    execution, step, clip=clip, nonfinite=nonfinite, state=own, every=every
                )
                put_back += [True] * result.skipped
            return result if kept is None else replace(result, outputs=kept.of(step))

        what = f"train_step, step {step.index} of epoch {step.epoch}"
        name = named(lambda: f"{what}, rank {core.groups.rank}")
        try:
            with name, core.groups.watch.section(what), edition.dispatch.own_casts():
                step, result = core.tighter.run(step, attempt)
        finally:
            edition.dispatch.bind_blocks()
            edition.dispatch.end_step()
        self._stepped(step, result)
        return result

    def _step_problem(self, edition: Edition) -> DcpcError | None:
        """Returns why this rank's model as it is now cannot train with an edition; None: it can."""
        if edition.dispatch is not self.core.dispatch:
            first = self.core.editions.first.modes
            return DispatchError(
                f"train_step: got the model in {edition.modes}; expected {first}, in which it was "
                "compiled: steps are planned for the graphs of that mode, and those of this one "
                "are others; call compiled.train() before a step, or compile the model in the mode "
                "in which it is trained"
            )
        return self.core.store.follow(edition.followed.parameters)

    def _stepped(self, step: Step, result: StepResult) -> None:
        """Counts a step's result, and tells the loggers."""
        self.core.dispatch.stats.stepped(step, result)
        if self.core.learned.observe(step.plan, result.every_s) and self.core.groups.rank == 0:
            LOG.warning("%s", speeds_line(self.core.learned.speeds, self.core.learned.changes))
        if self.core.groups.rank == 0:
            for log in self._loggers:
                log(step, result)

    def log_to(self, logger: Callable[[Step, StepResult], None]) -> None:
        """Has rank 0 call this after each train step, e.g. a `dcpc.TensorBoardLogger`.

        Args:
            logger: function called with the step and its result.

        Raises:
            DataError: it cannot be called.
        """
        if not callable(logger):
            raise DataError(
                f"log_to: got {reprlib.repr(logger)}; expected a function of a step and its "
                "result; pass one, or a dcpc.TensorBoardLogger"
            )
        self._loggers.append(logger)

    def reduce_gradients(self) -> None:
        """Sums every parameter's gradient over all ranks, once an optimizer step.

        Raises:
            DispatchError: no rank has whole gradients, as ranks share out the parameters, or each
                runs a stage.
        """
        core = self.core
        core.refuse_unmade("reduce_gradients")
        self.execution.refuse_by_hand("reduce_gradients")
        with core.groups.watch.section("reduce_gradients"):
            core.averages.average()  # before they are compared
            state = core.agreed.of_step(None)
            reduce_gradients(core.model.parameters(), core.groups, state)

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Scales a gradient longer than `max_norm` down to it; returns its norm before.

        After `train_step` or `reduce_gradients`: then every rank has the gradient of the whole
        global batch.

        Args:
            max_norm: largest norm, above 0.

        Raises:
            DataError: `max_norm` is no positive number.
        """
        return self.execution.clip(max_norm)


def _refused(step: Step, clip: float | None, nonfinite: str, outputs: object) -> DcpcError | None:
    """Returns the error of this rank's step, or of the arguments with it; None: none."""
    try:
        check_step(step)
        if clip is not None:
            check_norm(clip)
        check_choice("got nonfinite=", nonfinite, ("raise", "skip"), DataError)
        output_kind("train_step", outputs)
    except DcpcError as error:
        return error
    return step.problem
