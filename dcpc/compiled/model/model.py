"""A compiled model: an `nn.Module` that runs the variant of each call's shape."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from dcpc.buckets import Bucket, Buckets
from dcpc.compiled.agreed_state import AgreedState
from dcpc.compiled.dispatch import Dispatch
from dcpc.compiled.editions import Edition, Editions, Prepare
from dcpc.compiled.evaluation import filled_up, in_eval, length_edition, refuse_arguments
from dcpc.compiled.materialize import on_meta
from dcpc.compiled.model.steps import TrainedModel
from dcpc.compiled.outputs.gradients import refusing_gradients
from dcpc.compiled.outputs.wanted import WithOutputs, output_kind
from dcpc.compiled.seeds import Seeds
from dcpc.compiled.tighter import TighterPlans
from dcpc.errors import DcpcError
from dcpc.ir import BucketPlan
from dcpc.plan.planning import Planned
from dcpc.runtime.checkpoint.checkpoints import Checkpoints
from dcpc.runtime.data.steps import Step
from dcpc.runtime.groups.agreement import PART, agree
from dcpc.runtime.groups.groups import Groups
from dcpc.runtime.parameters.modes import install, shared_out, store_of
from dcpc.runtime.parameters.reduction import COMM_BUCKET_BYTES
from dcpc.runtime.parameters.store import ParameterStore, WholeStore
from dcpc.runtime.planner.protocol import BatchPlanner
from dcpc.runtime.planner.speeds import LearnedSpeeds
from dcpc.runtime.step.result import StepResult
from dcpc.runtime.step.stats import log_step
from dcpc.verify import Verifier


class CompiledModel(TrainedModel):
    """A model compiled for shape buckets; made by `dcpc.compile`.

    Shares the user's parameters: `parameters()` and `state_dict()` are the model's own, or, where
    ranks share them out, a `DTensor` for each, whose local part are the rows of this rank.
    """

    @property
    def batch_planner(self) -> BatchPlanner | None:
        """What plans a loader's batches, where the model runs in stages; None: it does not."""
        return None

    def __init__(
        self,
        model: nn.Module,
        buckets: Buckets,
        planned: Planned,
        groups: Groups,
        base_seed: int,
        verifier: Verifier,
        prepare: Prepare,
        learned: LearnedSpeeds,
        unpad: bool | str = False,
    ) -> None:
        """Wraps what `dcpc.compile` made; users call that."""
        super().__init__()
        self.model = model
        self.buckets = buckets
        self.planned = planned
        self.verifier = verifier
        # One object: what dispatch and reports read is the same, also where it is planned again.
        self.plans = cast(dict[Bucket, BucketPlan], planned.plans)
        self.tables = dict(planned.tables)
        self.groups = groups
        groups.number("users")
        self._closed = False
        self.memory_bytes = planned.memory_bytes
        self.training = model.training
        self._unmade = on_meta(model) and not shared_out(model)
        self._store: ParameterStore = WholeStore((), groups)
        asked = planned.request
        if not self._unmade:
            self._store = store_of(asked.parameters, model.parameters(), groups, asked.block)
            install(self._store, model)
        self.comm_bucket_bytes = COMM_BUCKET_BYTES  # gradients that are sent at once
        self._learned = learned

        self._seeds = Seeds(base_seed, groups)
        self._checkpoints = Checkpoints(groups)
        self._tighter = TighterPlans(planned, self.plans, self.tables, groups)

        def make(mine: Buckets, found: Planned) -> Dispatch:
            dispatch = Dispatch(mine, found, groups, self._seeds, self._store, unpad)
            dispatch.stats = self._dispatch.stats
            return dispatch

        self._dispatch = Dispatch(buckets, planned, groups, self._seeds, self._store, unpad)
        first = Edition.of(model, buckets, planned, verifier, self._dispatch)
        self._editions = Editions(model, first, prepare, make, groups.device.type)
        self._agreed = AgreedState(model, planned, groups)
        self._loggers: list[Callable[[Step, StepResult], None]] = [log_step]
        self._output_settings = {}
        self._calls = 0

    def close(self) -> None:
        """Gives back the process groups, with their threads and connections; collective.

        All compiled models of the same ranks share them: they are closed with the last that is
        open. One that was closed runs no more; parameters stay.

        Raises:
            GroupError: a rank does not close it, or closes another one.
        """
        if self._closed:
            return
        agree(self.groups, self.groups.world, "close", "")
        self._closed = True
        self.groups.leave()

    def __enter__(self) -> Self:
        """Returns it, to be closed at the end of the block."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Closes it; not after an error, of which other ranks may not know."""
        if kind is None:
            self.close()

    def forward(self, *args: Tensor, outputs: bool | str | Tensor = False, **inputs: Tensor) -> Any:
        """Returns the model's loss, computed by the variant of these inputs' shape.

        Lengths that no bucket has are run as they are, with the plan of the smallest bucket that
        holds them.

        With `outputs=` it returns `(loss, outputs)`: what forward returns, in its own structure. A
        gradient flows through the loss alone: backward through another output is an error.

        With sp > 1 all ranks of the SP group pass the same inputs and get the same loss; each one's
        `backward` adds its share of the gradient, which `reduce_gradients` sums. With
        `parameters="rounds"` all ranks of a block call at once, each group with inputs of its own.

        Args:
            args: inputs by position, in the order of the buckets' specs, if forward has the same.
            outputs: whether what forward returns comes back, too: "gathered" (or True), each tensor
                whole on every rank of an SP group; or "sharded", as an `OutputPiece` each. A tensor
                is an input of that name.
            inputs: inputs by name.

        Raises:
            DispatchError: names, dtypes or shapes match no bucket, the bucket's graphs are not
                right at these lengths, the model changed since it was compiled or was not
                materialized, or a gradient is asked for and ranks share out the parameters.
            GroupError: ranks of the SP group passed different shapes, or different values of
                inputs that are no floats.
            TraceError: with outputs, forward returns something else than tensors and numbers.
        """
        if isinstance(outputs, Tensor):
            inputs, outputs = {**inputs, "outputs": outputs}, False
        kind = output_kind("a call", outputs)
        self._refuse_unmade("a call")
        if torch.is_grad_enabled():
            self._refuse_by_hand("a call with gradients")
        edition, problem = self._editions.now()
        if kind and problem is None:
            edition, problem = self._editions.with_outputs(edition, kind)
        found = self._call(edition, problem, self._dispatch.named(self.model, args, inputs))
        made = edition.planned.loss
        if not isinstance(made, WithOutputs):
            return found[0]
        return made.restored(refusing_gradients(edition.planned.traces[0].traced.program, found))

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
            batch: inputs by name.
            between: what is done with lengths that no bucket has: None: they run by the graphs of
                the smallest bucket that holds them, or are refused where these are not right;
                "pad": they are filled up to that bucket; "compile": they are captured and planned
                when they first come.
            pad: input name -> what fills it up at its end, as for `dcpc.DataLoader`.
            outputs: whether what forward returns comes back, too: then `(loss, outputs)`, as from
                a call.

        Raises:
            DispatchError: names, dtypes or shapes match no bucket, no bucket is as long, an input
                has no value in `pad`, or padding changes the loss.
            TraceError: forward returns something else than tensors and numbers.
            GroupError: as for a call.
        """
        kind = output_kind("evaluate", outputs)
        refuse_arguments(batch, between, pad, self.buckets, bool(kind))
        self._refuse_unmade("evaluate")
        inputs = dict(batch)
        with in_eval(self.model), torch.no_grad():
            edition, problem = self._editions.now()
            if kind and problem is None:
                edition, problem = self._editions.with_outputs(edition, kind)
            if problem is not None and (kind or between is not None):
                raise problem
            if between == "pad":
                inputs = filled_up(edition, inputs, pad or {})
            elif between == "compile":
                edition = length_edition(self._editions, edition, inputs)
            found = self._call(edition, problem, inputs)
            made = edition.planned.loss
            return made.restored(found) if isinstance(made, WithOutputs) else found[0]

    def _call(
        self, edition: Edition, problem: DcpcError | None, inputs: dict[str, Tensor]
    ) -> tuple[Any, ...]:
        """Returns what an edition makes of inputs, once ranks that meet agree on all of it."""
        with self.groups.watch.naming():
            return self._run_call(edition, problem, inputs)

    def _run_call(
        self, edition: Edition, problem: DcpcError | None, inputs: dict[str, Tensor]
    ) -> tuple[Any, ...]:
        dispatch = edition.dispatch
        bucket, sizes = dispatch.match(inputs)
        self._calls += 1
        problem = problem or dispatch.input_problem(bucket, inputs)
        if self._store.in_rounds:  # ranks of a block gather together, whatever each runs
            problem = problem or self._store.follow(self.model.parameters())
            text = PART.join([f"number {self._calls}", edition.text])
            agree(self.groups, self._store.block, "call of every rank", text, problem)
        setting = dispatch.setting(bucket)
        if setting.sp > 1:
            what = edition.call_text(self._calls, bucket, sizes, inputs)
            agree(self.groups, setting.sp, "bucket", PART.join(what), problem)
        if problem is not None:
            raise problem
        with dispatch.own_casts():
            return dispatch.run_call(bucket, sizes, inputs, setting)
