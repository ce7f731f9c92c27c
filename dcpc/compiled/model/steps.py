"""Optimizer steps of a compiled model, and gradients of calls by hand."""

from __future__ import annotations

import logging
import reprlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from dcpc.codegen import delivering
from dcpc.compiled.dispatch import Dispatch
from dcpc.compiled.editions import Edition
from dcpc.compiled.model.insight import ModelInsight
from dcpc.compiled.outputs.settings import OutputSettings
from dcpc.compiled.outputs.step_run import StepRun
from dcpc.compiled.outputs.wanted import WithOutputs, output_kind
from dcpc.errors import DataError, DcpcError, DispatchError, explaining
from dcpc.runtime.data.arguments import check_choice, check_step
from dcpc.runtime.data.steps import Step
from dcpc.runtime.groups.agreement import agree
from dcpc.runtime.parameters.row_store import RowStore
from dcpc.runtime.parameters.store import WholeStore
from dcpc.runtime.planner.speeds import speeds_line
from dcpc.runtime.step.execution import StepState
from dcpc.runtime.step.gradients import check_norm, clip_gradients, reduce_gradients
from dcpc.runtime.step.on_group import OnGroup
from dcpc.runtime.step.result import StepResult
from dcpc.runtime.step.step import train_step

LOG = logging.getLogger("dcpc")


class TrainedModel(ModelInsight):
    """A compiled model that is trained step by step."""

    comm_bucket_bytes: int
    _loggers: list[Callable[[Step, StepResult], None]]
    _output_settings: dict[Dispatch, OutputSettings]

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
            step: from `dcpc.DataLoader`.
            clip: largest norm of the whole batch's gradient; a longer one is scaled down to it.
            nonfinite: what becomes of a loss that is NaN or infinite: "raise" a `DataError`, or
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
        refused = _refused(step, clip, nonfinite, outputs)
        if refused is not None:
            self._agreed.of_step(None)  # its turn is over on this rank, too
            agree(self.groups, self.groups.world, "step", "", refused)
        self._refuse_unmade("a train step")
        edition, problem = self._step_edition(output_kind("train_step", outputs))
        state = self._agreed.of_step(problem)

        def attempt(step: Step) -> StepResult:
            return self._attempt(step, edition, state, clip=clip, nonfinite=nonfinite)

        what = f"train_step, step {step.index} of epoch {step.epoch}"
        try:
            with self.groups.watch.section(what), edition.dispatch.own_casts():
                step, result = self._tighter.run(step, attempt)
        finally:
            edition.dispatch.bind_blocks()
            edition.dispatch.begin(())
        self._stepped(step, result)
        return result

    def _step_edition(self, kind: str) -> tuple[Edition, DcpcError | None]:
        """Returns what runs a step, and why this rank's model as it is now cannot; None: it can."""
        edition, problem = self._editions.now()
        if edition.dispatch is not self._dispatch:
            first = self._editions.first.modes
            problem = problem or DispatchError(
                f"train_step: got the model in {edition.modes}; expected {first}, in which it was "
                "compiled: steps are planned for the graphs of that mode, and those of this one "
                "are others; call compiled.train() before a step, or compile the model in the mode "
                "in which it is trained"
            )
        problem = problem or self._store.follow(self.model.parameters())
        if kind and problem is None:
            return self._editions.with_outputs(edition, kind)
        return edition, problem

    def _attempt(
        self, step: Step, edition: Edition, state: StepState, **options: Any
    ) -> StepResult:
        """Returns what comes of a step as it is planned now.

        Args:
            step: which one.
            edition: runs it.
            state: as for `runtime.step.step.train_step`.
            options: of it.
        """
        dispatch, made = edition.dispatch, edition.planned.loss
        run = StepRun(step, dispatch, made if isinstance(made, WithOutputs) else None)

        def check_all() -> None:
            state.check()
            self._settings_of(edition).choose(step.plan, self._tighter.budgets)

        told = state
        if run.made is not None:
            told = replace(state, text=f"{state.text}, outputs of {edition.text}", check=check_all)
        store = self._store
        assert isinstance(store, WholeStore | RowStore), "of a model in one piece"
        rounds = dispatch if store.in_rounds else None
        execution = OnGroup(
            run, store, dispatch.prepare, delivering, rounds, self.comm_bucket_bytes
        )
        result = train_step(execution, step, state=told, every=self._learned.learns, **options)
        return replace(result, outputs=run.outputs())

    def _settings_of(self, edition: Edition) -> OutputSettings:
        found = self._output_settings.get(edition.dispatch)
        if found is None:
            found = OutputSettings(edition.planned, edition.dispatch, self.groups)
            self._output_settings[edition.dispatch] = found
        return found

    def _stepped(self, step: Step, result: StepResult) -> None:
        """Takes down what came of a step, and tells the loggers."""
        self._dispatch.stats.stepped(step, result)
        if self._learned.observe(step.plan, result.every_s) and self.groups.rank == 0:
            LOG.warning("%s", speeds_line(self.speeds, self._learned.changes))
        if self.groups.rank == 0:
            for log in self._loggers:
                log(step, result)

    def log_to(self, logger: Callable[[Step, StepResult], None]) -> None:
        """Has rank 0 call this after each train step, e.g. a `dcpc.TensorBoardLogger`.

        Args:
            logger: called with the step and its result.

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
            DispatchError: ranks share out the parameters.
        """
        self._refuse_unmade("reduce_gradients")
        self._refuse_by_hand("reduce_gradients")
        state = self._agreed.of_step(None)
        with self.groups.watch.section("reduce_gradients"):
            reduce_gradients(self.model.parameters(), self.groups, state)

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Scales a gradient longer than `max_norm` down to it; returns its norm before.

        After `train_step` or `reduce_gradients`: then every rank has the gradient of the whole
        global batch.

        Args:
            max_norm: above 0.

        Raises:
            DataError: `max_norm` is no positive number.
        """
        return clip_gradients(self.parameters(), max_norm)

    def _refuse_by_hand(self, what: str) -> None:
        mode = self.planned.request.parameters
        if mode != "whole" and self.groups.world > 1:
            raise DispatchError(
                f"parameters='{mode}': got {what}; expected train_step: no rank keeps a whole "
                "gradient, so it is summed while a step runs; call the model under "
                "torch.no_grad() to evaluate, or compile it with parameters='whole'"
            )


def _refused(step: Step, clip: float | None, nonfinite: str, outputs: object) -> DcpcError | None:
    """Returns what is wrong with this rank's step, or with the arguments of it."""
    try:
        check_step(step)
        if clip is not None:
            check_norm(clip)
        check_choice("nonfinite", nonfinite, ("raise", "skip"))
        output_kind("train_step", outputs)
    except DcpcError as error:
        return error
    return step.problem
