"""A compiled model: an `nn.Module` that runs the variant of each call's shape."""

from __future__ import annotations

import logging
import reprlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn, SupportsIndex, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dcpc.buckets import BATCH, Bucket, Buckets, path_of
from dcpc.codegen import delivering, wire_log
from dcpc.compiled.agreed_state import AgreedState
from dcpc.compiled.dispatch import Dispatch
from dcpc.compiled.editions import Edition, Editions, Prepare
from dcpc.compiled.evaluation import filled_up, in_eval, length_edition, refuse_arguments
from dcpc.compiled.materialize import Init, made_real, on_meta
from dcpc.compiled.outputs import WithOutputs
from dcpc.compiled.seeds import Seeds
from dcpc.compiled.tighter import TighterPlans
from dcpc.errors import CheckpointError, DataError, DcpcError, DispatchError
from dcpc.ir import BucketPlan, Packable, Profile, Program, ValueRange
from dcpc.passes.masks.packable import packable
from dcpc.plan.following import Followed
from dcpc.plan.planning import Planned
from dcpc.plan.runnable import Runnable
from dcpc.runtime.checkpoint.checkpoints import (
    Checkpoint,
    Checkpoints,
    Parts,
    Saving,
    Stateful,
)
from dcpc.runtime.data.arguments import check_choice, check_step
from dcpc.runtime.data.steps import Step
from dcpc.runtime.groups.agreement import PART, agree
from dcpc.runtime.groups.groups import Groups
from dcpc.runtime.parameters.modes import shared_out, store_of
from dcpc.runtime.parameters.reduction import COMM_BUCKET_BYTES
from dcpc.runtime.parameters.store import WholeStore
from dcpc.runtime.parameters.unmade import UnmadeStore
from dcpc.runtime.planner.speeds import LearnedSpeeds, speeds_line
from dcpc.runtime.step.stats import Stats, log_step
from dcpc.runtime.step.step import (
    StepResult,
    check_norm,
    clip_gradients,
    reduce_gradients,
    train_step,
)
from dcpc.symbolic_profile import Prediction
from dcpc.verify import Verifier

LOG = logging.getLogger("dcpc")


class CompiledModel(nn.Module):
    """A model compiled for shape buckets; made by `dcpc.compile`.

    Shares the user's parameters: `parameters()` and `state_dict()` are the model's own, or, where
    ranks share them out, a `DTensor` for each, whose local part are the rows of this rank.
    """

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
        self.memory_bytes = planned.memory_bytes
        self.training = model.training
        self._store: WholeStore = UnmadeStore(groups)
        mode = planned.request.parameters
        if not on_meta(model) or shared_out(model):
            self._store = store_of(mode, model.parameters(), groups)
            self._store.install(model)
        self.comm_bucket_bytes = COMM_BUCKET_BYTES  # gradients that are sent at once
        self._learned = learned

        self._seeds = Seeds(base_seed, groups.rank, groups.world)
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
        self._calls = 0

    def forward(self, *args: Tensor, **inputs: Tensor) -> Tensor:
        """Returns the model's loss, computed by the variant of these inputs' shape.

        With sp > 1 all ranks of the SP group pass the same inputs and get the same loss; each one's
        `backward` adds its share of the gradient, which `reduce_gradients` sums. With
        `parameters="rounds"` all ranks call at once, each group with inputs of its own.

        Args:
            args: inputs by position, in the order of the buckets' specs.
            inputs: inputs by name.

        Raises:
            DispatchError: names, dtypes or shapes match no bucket, the model changed since it
                was compiled or was not materialized, or a gradient is asked for and ranks share
                out the parameters.
            GroupError: ranks of the SP group passed different shapes, or different values of
                inputs that are no floats.
        """
        self._store.check_ready("a call")
        if torch.is_grad_enabled():
            self._refuse_by_hand("a call with gradients")
        return self._call(*self._editions.now(), self._dispatch.named(args, inputs))[0]

    def evaluate(
        self,
        batch: Mapping[str, Tensor],
        *,
        between: str | None = None,
        pad: Mapping[str, int | float] | None = None,
        outputs: bool = False,
    ) -> Any:
        """Returns the loss of a batch in eval() and under no_grad; the model's mode stays.

        The first call captures and plans the model in eval(), where its graphs are others there.
        Ranks call it as they call the model: those of an SP group with the same batch.

        Args:
            batch: inputs by name.
            between: what is done with lengths between the buckets: "pad": they are filled up to
                the smallest bucket that holds them; "compile": they run as they are, captured and
                planned when they first come; None: they are refused.
            pad: input name -> what fills it up at its end, as for `dcpc.DataLoader`.
            outputs: whether what forward returns comes back, too: then `(loss, outputs)`, each
                tensor whole on every rank of an SP group.

        Raises:
            DispatchError: names, dtypes or shapes match no bucket, no bucket is as long, an input
                has no value in `pad`, or padding changes the loss.
            TraceError: forward returns something else than tensors and numbers.
            GroupError: as for a call.
        """
        refuse_arguments(batch, between, pad, self.buckets, outputs)
        self._store.check_ready("evaluate")
        inputs = dict(batch)
        with in_eval(self.model), torch.no_grad():
            edition, problem = self._editions.now()
            if problem is not None and (outputs or between is not None):
                raise problem
            if outputs:
                edition = self._editions.with_outputs(edition)
            if between == "pad":
                inputs = filled_up(edition, inputs, pad or {})
            elif between == "compile":
                edition = length_edition(self._editions, edition, inputs)
            found = self._call(edition, problem, inputs)
            made = edition.planned.loss
            return made.restored(found) if isinstance(made, WithOutputs) else found[0]

    def _call(
        self, edition: Edition, problem: DcpcError | None, inputs: dict[str, Tensor]
    ) -> tuple[Tensor, ...]:
        """Returns what an edition makes of inputs, once ranks that meet agree on all of it."""
        with self.groups.watch.naming():
            return self._run_call(edition, problem, inputs)

    def _run_call(
        self, edition: Edition, problem: DcpcError | None, inputs: dict[str, Tensor]
    ) -> tuple[Tensor, ...]:
        dispatch = edition.dispatch
        bucket, sizes = dispatch.match(inputs)
        self._calls += 1
        problem = problem or dispatch.input_problem(bucket, inputs)
        if self._store.in_rounds:  # all ranks gather parameters together, whatever each runs
            problem = problem or self._store.follow(self.model.parameters())
            text = PART.join([f"number {self._calls}", edition.text])
            agree(self.groups, self.groups.world, "call of every rank", text, problem)
        setting = dispatch.setting(bucket)
        if setting.sp > 1:
            what = edition.call_text(self._calls, bucket, sizes, inputs)
            agree(self.groups, setting.sp, "bucket", PART.join(what), problem)
        if problem is not None:
            raise problem
        with dispatch.own_casts():
            return dispatch.run_call(bucket, sizes, inputs, setting)

    def train_step(
        self, step: Step, *, clip: float | None = None, nonfinite: str = "raise"
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

        Returns:
            The global loss, and measured seconds and imbalance.

        Raises:
            DataError: an argument or a sample is wrong on some rank, or the loss is not finite.
            DispatchError: the model changed since it was compiled.
            GroupError: the ranks are not in the same step, or one did not arrive.
            PlanError: a rank ran out of memory, and nothing smaller is left to try.
        """
        refused = _refused(step, clip, nonfinite)
        if refused is not None:
            self._agreed.of_step(None)  # its turn is over on this rank, too
            agree(self.groups, self.groups.world, "step", "", refused)
        dispatch = self._dispatch
        self._store.check_ready("a train step")
        edition, problem = self._editions.now()
        if edition.dispatch is not dispatch:
            first = self._editions.first.modes
            problem = problem or DispatchError(
                f"train_step: got the model in {edition.modes}; expected {first}, in which it was "
                "compiled: steps are planned for the graphs of that mode, and those of this one "
                "are others; call compiled.train() before a step, or compile the model in the mode "
                "in which it is trained"
            )
        problem = problem or self._store.follow(self.model.parameters())
        state, check = self._agreed.of_step(problem)

        def attempt(step: Step) -> StepResult:
            return train_step(
                lambda mb, inputs: dispatch.run_micro_batch(step, mb, inputs),
                step,
                self._store,
                self.groups,
                prepare=dispatch.prepare,
                delivering=delivering,
                in_rounds=dispatch if self._store.in_rounds else None,
                clip=clip,
                nonfinite=nonfinite,
                comm_bucket_bytes=self.comm_bucket_bytes,
                state=state,
                check=check,
                every=self._learned.learns,
            )

        what = f"train_step, step {step.index} of epoch {step.epoch}"
        try:
            with self.groups.watch.section(what), dispatch.own_casts():
                step, result = self._tighter.run(step, attempt)
        finally:
            dispatch.bind_blocks()
            dispatch.begin(())
        dispatch.stats.stepped(step, result)
        if self._learned.observe(step.plan, result.every_s) and self.groups.rank == 0:
            LOG.warning("%s", speeds_line(self.speeds, self._learned.changes))
        if self.groups.rank == 0:
            for log in self._loggers:
                log(step, result)
        return result

    def materialize(self, init: Init = None) -> None:
        """Gives a model that was compiled on the meta device memory and values.

        `dcpc.materialize` says how. Collective over all ranks.
        """
        if not isinstance(self._store, UnmadeStore):
            raise DispatchError(
                "dcpc.materialize: got a compiled model that has its memory; expected one whose "
                "model was on the meta device at compile, once; leave the call out, or load other "
                "values with compiled.load_state_dict"
            )
        followed = self._editions.first.followed
        problem = followed.problem(self.model)
        if problem is not None:
            raise problem
        with self.groups.watch.section("materialize"):
            self._make_real(init, followed)

    def _make_real(self, init: Init, followed: Followed) -> None:
        self._store = made_real(self.model, self.planned.request.parameters, self.groups, init)
        self._dispatch.store = self._store
        self._dispatch.bind_blocks()
        followed.materialized(self.model)
        if init == "empty":  # what is compared with the model waits for values
            return
        found = self.verifier.postponed_problem()
        agree(self.groups, self.groups.world, "verification", str(found or ""))
        if found is not None:
            raise found

    def save(
        self,
        folder: str | Path,
        step: int,
        *,
        optimizer: Optimizer | None = None,
        loader: Stateful | None = None,
        scheduler: Stateful | None = None,
        extra: Any = None,
        keep: int = 3,
        wait: bool = False,
    ) -> Saving:
        """Saves what training goes on from, as `folder/step-...`, while training goes on.

        All of it is copied to the CPU, then a thread writes it. A folder has its name once it is
        whole, so a crash leaves those before it. Collective over all ranks, which see one folder.

        Args:
            folder: of all checkpoints.
            step: number of this one; `load` takes the largest.
            optimizer: of `parameters()`.
            loader: its `state_dict()` is the same on every rank, as that of `dcpc.DataLoader` is.
            scheduler: as the loader.
            extra: plain values and tensors of your own; rank 0's are kept.
            keep: whole checkpoints that stay, this one included.
            wait: return once it is whole.

        Returns:
            What writes it, with `wait()`. The process waits for it at its end.

        Raises:
            CheckpointError: it cannot be written, or the one before could not be; or a state has
                values that are no plain ones.
            GroupError: ranks save different steps, or one could not.
        """
        path = path_of(folder, CheckpointError, "save")
        with self.groups.watch.section(f"save, step {step}"):
            parts = self._parts(optimizer, loader, scheduler)
            return self._checkpoints.save(path, step, parts, extra, keep=keep, wait=wait)

    def load(
        self,
        folder: str | Path,
        *,
        optimizer: Optimizer | None = None,
        loader: Stateful | None = None,
        scheduler: Stateful | None = None,
    ) -> Checkpoint:
        """Goes on from the newest checkpoint that is whole; a damaged one is named in a warning.

        At any world size and in any mode of parameters. Without a checkpoint it changes nothing,
        so that one script starts and goes on. Reads no pickle. Collective over all ranks.

        Args:
            folder: as in `save`.
            optimizer: made as the one that was saved; its state is replaced.
            loader: goes on after the last step that was yielded before.
            scheduler: goes on as it was.

        Returns:
            Its step (0: there is none), `extra` and folder.

        Raises:
            CheckpointError: it is of another model or optimizer, or lacks a part, or all
                checkpoints are damaged.
            DataError: the loader's data or order are others.
        """
        path = path_of(folder, CheckpointError, "load")
        with self.groups.watch.section("load"):
            return self._checkpoints.load(path, self._parts(optimizer, loader, scheduler))

    def _parts(
        self, optimizer: Optimizer | None, loader: Stateful | None, scheduler: Stateful | None
    ) -> Parts:
        if optimizer is not None and not isinstance(optimizer, Optimizer):
            raise CheckpointError(
                f"optimizer=: got {type(optimizer).__name__}; expected a torch.optim.Optimizer of "
                "compiled.parameters(); pass it, or leave it out"
            )
        for name, part in (("loader", loader), ("scheduler", scheduler)):
            if part is not None and not isinstance(part, Stateful):
                raise CheckpointError(
                    f"{name}=: got {type(part).__name__}; expected an object with state_dict() and "
                    "load_state_dict(); pass one, or leave it out"
                )
        mode = self._store.mode
        return Parts(self, self._seeds, mode, optimizer, loader, scheduler)

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
        self._store.check_ready("reduce_gradients")
        self._refuse_by_hand("reduce_gradients")
        state, check = self._agreed.of_step(None)
        with self.groups.watch.section("reduce_gradients"):
            reduce_gradients(self.model.parameters(), self.groups, state=state, check=check)

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

    # ---------------------------------------------------------------------------------- looking in

    def report(self) -> str:
        """Returns the plan of each bucket, its predicted costs as formulas of the dims, and why.

        At the end it says what was compared with the model itself, and where.
        """
        later = {e.verifier: e for e in reversed(self._editions.made_later)}
        more = [e for v, e in reversed(later.items()) if v is not self.verifier]
        text = f"{self.planned.report()}\n{self.verifier.report()}"
        text += self._tighter.report() + self._dispatch.unpadding_line()
        if self._learned.learns or self.speeds:
            text += speeds_line(self.speeds, self._learned.changes) + "\n"
        return text + "".join(f"{e}: {e.verifier.report()}" for e in more)

    def source(self, bucket: Bucket | Mapping[str, int]) -> str:
        """Returns the forward and backward that run for a bucket as Python a person can read."""
        return self.planned.source(self._bucket(bucket))

    def profile(self, bucket: Bucket | Mapping[str, int]) -> Profile:
        """Returns a bucket's costs as expressions of the dims."""
        return self.planned.profile(self._bucket(bucket))

    def predict(self, bucket: Bucket | Mapping[str, int], batch: int | None = None) -> Prediction:
        """Returns a bucket's predicted costs on the fullest rank.

        Args:
            bucket: which one; a batch among its sizes is as `batch`.
            batch: samples in the micro-batch; default: the planned ones.

        Raises:
            DispatchError: there is no such bucket, or `batch` is no number of samples.
        """
        if batch is None and isinstance(bucket, Mapping):
            batch = bucket.get(BATCH)
        bucket = self._bucket(bucket)
        whole = isinstance(batch, int) and not isinstance(batch, bool)
        if batch is not None and (not whole or batch < 1):
            raise DispatchError(
                f"predict: got batch={batch!r}; expected an integer >= 1, samples of a "
                "micro-batch; correct it, or leave it out for the planned ones"
            )
        plan = self.plans[bucket]
        sizes = {**bucket.sizes, BATCH: batch or plan.micro_batch}
        placement = self._dispatch.placement(bucket, sizes, self._dispatch.setting(bucket))
        priced = self.planned.by_bucket[bucket].priced
        return priced.at(placement).predict(plan.menu_step, sizes)

    @property
    def packable(self) -> Packable:
        """Whether a row may hold several sequences, for `DataLoader(packing=)`; else why not."""
        # Rows of one token have nothing to pack, and their trace may have no attention.
        longer = [b for b in self.buckets if any(n > 1 for _, n in b.shape_key)]
        used = {id(v): v for v in (self.planned.by_bucket[b] for b in longer or self.buckets)}
        traces = [v.traced for v in used.values()]
        found = [packable(t.program, t.sharding.rules) for t in traces]
        return next((p for p in found if p.reason), found[0])

    @property
    def value_ranges(self) -> Mapping[Bucket, Mapping[str, tuple[ValueRange, ...]]]:
        """What the model's ops need of integer inputs, by bucket and input."""
        return self._dispatch.value_ranges

    def division_problems(
        self, weigh: Callable[[Mapping[str, Tensor]], float] | None, pad: Mapping[str, int | float]
    ) -> tuple[str, ...]:
        """Returns why a step's loss hangs on its micro-batches, or on padding; see `verify/`.

        Args:
            weigh: of a micro-batch's inputs; None: its samples.
            pad: input name -> what fills it up at its end.
        """
        return self.verifier.division_problems(weigh, pad)

    @property
    def in_rounds(self) -> bool:
        """Whether all ranks wait for each other after each micro-batch of a step."""
        return self.planned.in_rounds

    @property
    def node_ranks(self) -> int:
        """Ranks of a node of the device that was planned for."""
        return self.planned.device.node_ranks

    @property
    def replans(self) -> int:
        """How often rows of the tables were replaced by others."""
        return self._tighter.changes

    @property
    def speeds(self) -> tuple[float, ...]:
        """How fast ranks are beside the fastest one, as plans are made now; nothing: all alike."""
        return self._learned.speeds

    @property
    def program(self) -> Program:
        """The traced model; only where all buckets share one trace."""
        return self.planned.program

    @property
    def runnable(self) -> Runnable:
        """Graphs, placements and prices; only where all buckets share one trace."""
        return self.planned.runnable

    def stats(self) -> Stats:
        """Returns counts of what has run on this rank."""
        stats = self._dispatch.stats
        every = [self._editions.first, *self._editions.made_later]
        traces = {id(v): v for e in every for v in e.planned.traces}
        stats.variants = sum(v.compiled_count for v in traces.values())
        stats.wire_bytes = wire_log.total_bytes()
        stats.out_of_memory = dict(self._tighter.counts)
        stats.budgets = dict(self._tighter.budgets)
        stats.speeds, stats.speed_changes = self.speeds, self._learned.changes
        return stats

    # ----------------------------------------------------------------------- the model's own state

    @property
    def module(self) -> nn.Module:
        """The user's own module, for all that is no compiled call: `compiled.module.generate()`."""
        return self.model

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the model's own state, as without dcpc; with `DTensor`s where ranks share it."""
        return self._store.state_dict(self.model, *args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Loads the model's own state, as without dcpc; every rank loads the same.

        The next step compares what the ranks have loaded. Where ranks share out the parameters it
        is collective over all ranks, and takes `DTensor`s as well as whole tensors.
        """
        values = self._store.load(state_dict, self.model)
        loaded = self.model.load_state_dict(values, *args, **kwargs)
        self._store.loaded()
        self._agreed.loaded()
        return loaded

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields the parameters under their own names; `DTensor`s where ranks share them.

        They are the compiled model's own, whatever `recurse` says: it has no children, so that
        torch.distributed.checkpoint finds each once.
        """
        for name, p in self.model.named_parameters(prefix, True, remove_duplicate):
            yield name, self._store.shard(p)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Yields the model's buffers under their own names, as `named_parameters` does."""
        return self.model.named_buffers(prefix, True, remove_duplicate)

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """Yields nothing: see `named_parameters`."""
        return iter(())

    def children(self) -> Iterator[nn.Module]:
        """Yields the model, as `to` and `apply` want it."""
        return iter((self.model,))

    def __getattr__(self, name: str) -> Any:
        """Returns what the model has under a name that the compiled model has not."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "model":  # it is not there yet
                raise
            return getattr(self.model, name)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Refuses copies and pickles: process groups and compiled graphs have none."""
        raise DispatchError(
            "got a copy or a pickle of a compiled model; expected it to stay where it was made: it "
            "holds process groups and compiled graphs; copy.deepcopy(compiled.model), or save "
            "compiled.state_dict()"
        )

    def train(self, mode: bool = True) -> CompiledModel:
        """Sets the model's mode, as without dcpc."""
        self.model.train(mode)
        self.training = mode
        return self

    def _refuse_by_hand(self, what: str) -> None:
        mode = self.planned.request.parameters
        if mode != "whole" and self.groups.world > 1:
            raise DispatchError(
                f"parameters='{mode}': got {what}; expected train_step: no rank keeps a whole "
                "gradient, so it is summed while a step runs; call the model under "
                "torch.no_grad() to evaluate, or compile it with parameters='whole'"
            )

    def _bucket(self, bucket: Bucket | Mapping[str, int]) -> Bucket:
        return self.planned.find(bucket.sizes if isinstance(bucket, Bucket) else bucket)


def _refused(step: Step, clip: float | None, nonfinite: str) -> DcpcError | None:
    """Returns what is wrong with this rank's step, or with the arguments of it."""
    try:
        check_step(step)
        if clip is not None:
            check_norm(clip)
        check_choice("nonfinite", nonfinite, ("raise", "skip"))
    except DataError as error:
        return error
    return step.problem
