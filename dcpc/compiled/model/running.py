"""How a compiled model runs calls and steps: on a group of ranks; in stages: `stage_runs.py`."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from torch import Tensor

from dcpc.codegen import delivering
from dcpc.compiled.dispatch import Dispatch
from dcpc.compiled.editions import Edition
from dcpc.compiled.model.core import ModelCore
from dcpc.compiled.outputs.settings import OutputSettings
from dcpc.compiled.outputs.step_run import StepOutputs, StepRun
from dcpc.compiled.outputs.wanted import WithOutputs
from dcpc.errors import DcpcError, DispatchError
from dcpc.runtime.data.steps import Step
from dcpc.runtime.groups.agreement import PART, agree
from dcpc.runtime.parameters.row_store import RowStore
from dcpc.runtime.parameters.store import WholeStore
from dcpc.runtime.planner.protocol import BatchPlanner
from dcpc.runtime.step.execution import Execution, StepState
from dcpc.runtime.step.gradients import clip_gradients
from dcpc.runtime.step.on_group import OnGroup

# What runs this rank's part of a step, the state that ranks compare, and what keeps the outputs.
StepOfEdition = tuple[Execution, StepState, StepOutputs | None]


class ModelExecution(Protocol):
    """Runs calls and steps of a compiled model: `ModelOnGroup`, or `ModelInStages`."""

    @property
    def planner(self) -> BatchPlanner | None:
        """Planner of a loader's batches; None: the loader's own plans them."""

    def waiting(self, what: str) -> AbstractContextManager[object]:
        """Returns a context of a call of this name, in which ranks may wait for each other."""

    def refuse_by_hand(self, what: str) -> None:
        """Refuses a call of this name, where no rank has whole gradients besides a step's."""

    def call(
        self, edition: Edition, problem: DcpcError | None, inputs: dict[str, Tensor]
    ) -> tuple[Any, ...]:
        """Returns an edition's outputs of inputs, once ranks that meet agree on both."""

    def of_step(self, step: Step, edition: Edition, state: StepState) -> StepOfEdition:
        """Returns the execution of a step by an edition, from a state that ranks compare."""

    def clip(self, max_norm: float) -> float:
        """Scales the summed gradient down to a largest norm; returns its norm before."""


@dataclass
class ModelOnGroup:
    """Runs each call and micro-batch on a group of ranks; it is a `ModelExecution`.

    Attributes:
        core: state that all parts of the model share.
        planner: None, as the loader's own planner plans its batches.
    """

    core: ModelCore
    planner: None = None
    _output_settings: dict[Dispatch, OutputSettings] = field(default_factory=dict)

    def waiting(self, what: str) -> AbstractContextManager[object]:
        """Returns a context without effect: groups wait where they meet."""
        return nullcontext()

    def refuse_by_hand(self, what: str) -> None:
        """Refuses gradients outside of a train step, where ranks share the parameters out."""
        mode = self.core.planned.request.parameters
        if mode != "whole":
            raise DispatchError(
                f"parameters='{mode}': got {what}; expected train_step: no rank keeps a whole "
                "gradient where graphs read the parameter, so it is summed while a step runs; call "
                "the model under torch.no_grad() to evaluate, or compile it with parameters='whole'"
            )

    def call(
        self, edition: Edition, problem: DcpcError | None, inputs: dict[str, Tensor]
    ) -> tuple[Any, ...]:
        """Returns an edition's outputs of inputs, once the ranks of a group agree on them."""
        core, dispatch = self.core, edition.dispatch
        bucket, sizes = dispatch.match(inputs)
        core.calls += 1
        problem = problem or dispatch.input_problem(bucket, inputs)
        if core.store.in_rounds:  # ranks of a block gather together, whatever each runs
            problem = problem or core.store.follow(core.model.parameters())
            text = PART.join([f"number {core.calls}", edition.text])
            agree(core.groups, core.store.block, "call of every rank", text, problem)
        setting = dispatch.setting(bucket)
        if setting.sp > 1:
            what = edition.call_text(core.calls, bucket, sizes, inputs)
            agree(core.groups, setting.sp, "bucket", PART.join(what), problem)
        if problem is not None:
            raise problem
        with dispatch.own_casts():
            return dispatch.run_call(bucket, sizes, inputs, setting)

    def of_step(self, step: Step, edition: Edition, state: StepState) -> StepOfEdition:
        """Returns the execution of a step's micro-batches, each on the ranks of its group."""
        core, dispatch, made = self.core, edition.dispatch, edition.planned.loss
        outputs = StepOutputs(made) if isinstance(made, WithOutputs) else None
        run, told = StepRun(step, dispatch, outputs), state

        def check() -> None:
            state.check()
            self.settings_of(edition).choose(step.plan, core.tighter.budgets)

        if outputs is not None:
            told = replace(state, check=check)
        store = core.store
        assert isinstance(store, WholeStore | RowStore), "of a model in one piece"
        rounds = dispatch if store.in_rounds else None
        execution = OnGroup(
            run, store, dispatch.prepare, delivering, rounds, core.comm_bucket_bytes
        )
        return execution, told, outputs

    def settings_of(self, edition: Edition) -> OutputSettings:
        """Returns the recompute of an edition's micro-batches that give outputs back."""
        found = self._output_settings.get(edition.dispatch)
        if found is None:
            found = OutputSettings(edition.planned, edition.dispatch, self.core.groups)
            self._output_settings[edition.dispatch] = found
        return found

    def clip(self, max_norm: float) -> float:
        """Scales the summed gradient down to a largest norm; returns its norm before."""
        self.core.refuse_unmade("parameters")
        named = self.core.store.named_parameters(self.core.model)
        return clip_gradients((p for _, p in named), max_norm)
