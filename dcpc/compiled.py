"""A compiled model: an `nn.Module` that runs the variant of each call's shape."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from dcpc.buckets import BATCH, Bucket, Buckets
from dcpc.codegen import Variant, bind_group, delivering, wire_log
from dcpc.errors import DispatchError
from dcpc.ir import Packable, Placement, Profile, Program
from dcpc.ops.random import mix
from dcpc.passes.masks.packable import packable
from dcpc.plan.following import Followed, state_tensors
from dcpc.plan.planning import Planned
from dcpc.plan.runnable import Runnable
from dcpc.plan.traced import group_name
from dcpc.runtime.data.steps import MicroBatch, Step
from dcpc.runtime.groups.agreement import agree
from dcpc.runtime.groups.groups import Groups
from dcpc.runtime.groups.same_state import checksum, refuse_different, share_of
from dcpc.runtime.planner.plans import Setting
from dcpc.runtime.step.reduction import COMM_BUCKET_BYTES
from dcpc.runtime.step.stats import Stats, log_step
from dcpc.runtime.step.step import StepResult, clip_gradients, reduce_gradients, train_step
from dcpc.symbolic_profile import Prediction
from dcpc.trace import autocast_dtype, casting
from dcpc.verify import Verifier

# Keeps the random numbers of train steps apart from those of calls, which count up from 1.
_STEPS = 1 << 40


class CompiledModel(nn.Module):
    """A model compiled for shape buckets; made by `dcpc.compile`.

    Shares the user's parameters: `parameters()` and `state_dict()` are the model's own.
    """

    def __init__(
        self,
        model: nn.Module,
        buckets: Buckets,
        planned: Planned,
        groups: Groups,
        base_seed: int,
        verifier: Verifier,
    ) -> None:
        """Wraps what `dcpc.compile` made; users call that."""
        super().__init__()
        self.model = model
        self.buckets = buckets
        self.planned = planned
        self.verifier = verifier
        self.plans = planned.plans  # one object: what dispatch and reports read is the same
        self.tables = dict(planned.tables)
        self.groups = groups
        self.memory_bytes = planned.memory_bytes
        self.training = model.training
        self._followed = Followed(model, buckets, planned)
        self.comm_bucket_bytes = COMM_BUCKET_BYTES  # gradients that are sent at once
        self._stats = Stats()
        self._loggers: list[Callable[[Step, StepResult], None]] = [log_step]
        self._calls = 0
        self._loads = self._compared_loads = 0
        self._next_shared = 0  # place of the first tensor that the next step compares
        self._base_seed = base_seed
        self._draws: dict[int, int] = {}
        self._dispatch: dict[tuple[Bucket, int, Setting, int], tuple[Variant, tuple[int, ...]]] = {}
        self._bind_blocks()

    def forward(self, *args: Tensor, **inputs: Tensor) -> Tensor:
        """Returns the model's loss, computed by the variant of these inputs' shape.

        With sp > 1 all ranks of the SP group pass the same inputs and get the same loss; each one's
        `backward` adds its share of the gradient, which `reduce_gradients` sums.

        Args:
            args: inputs by position, in the order of the buckets' specs.
            inputs: inputs by name.

        Raises:
            DispatchError: names, dtypes or shapes match no bucket, or the model changed since it
                was compiled.
            GroupError: ranks of the SP group passed different shapes, or different values of
                inputs that are no floats.
        """
        inputs = self._named(args, inputs)
        bucket, sizes = self._match(inputs)
        problem = self._followed.problem(self.model)
        setting = self._setting(bucket)
        if setting.sp > 1:
            self._calls += 1
            batch = sizes.get(BATCH, 1)
            what = f"{bucket} with batch {batch}, call {self._calls}, {self.plans[bucket]}"
            # Floats may differ in their last bits, as where each rank ran an encoder before.
            whole = {n: checksum(x) for n, x in inputs.items() if not x.is_floating_point()}
            what += f", checksums of inputs {sorted(whole.items())}"
            what += "" if problem is None else f", {problem}"
            agree(self.groups, setting.sp, "bucket", what)
        if problem is not None:
            raise problem
        with self._own_casts():
            return self._run(bucket, sizes, inputs, setting, self.groups.rank % setting.sp)

    def train_step(self, step: Step, *, clip: float | None = None) -> StepResult:
        """Runs all micro-batches of a planned step and sums the gradients over the ranks.

        The gradient is that of the weighted mean loss of the whole global batch, as one device
        would compute it. Collective over all ranks.

        Args:
            step: from `dcpc.DataLoader`.
            clip: largest norm of the whole batch's gradient; a longer one is scaled down to it.

        Returns:
            The global loss, and measured seconds and imbalance.
        """

        def prepare(mb: MicroBatch) -> None:
            bucket, sizes = self._match(mb.inputs)
            setting = Setting(mb.sp, mb.micro_batch, mb.menu_step)
            self._variant(bucket, sizes, setting, mb.ranks.index(self.groups.rank))

        def call(mb: MicroBatch, inputs: Mapping[str, Tensor]) -> Tensor:
            bucket, sizes = self._match(inputs)
            setting = Setting(mb.sp, mb.micro_batch, mb.menu_step)
            pg = self.groups.over(mb.ranks)
            if pg is not None:
                # Backward follows before the next micro-batch binds the name to its own group.
                bind_group(group_name(mb.sp), pg)
            seed = mix(self._base_seed, _STEPS, step.epoch, step.index, mb.number) >> 1
            return self._run(
                bucket, sizes, inputs, setting, mb.ranks.index(self.groups.rank), seed
            )

        state, check = self._state_of_step(self._followed.problem(self.model))
        try:
            with self._own_casts():
                result = train_step(
                    call,
                    step,
                    self.model.parameters(),
                    self.groups,
                    prepare=prepare,
                    delivering=delivering,
                    clip=clip,
                    comm_bucket_bytes=self.comm_bucket_bytes,
                    state=state,
                    check=check,
                )
        finally:
            self._bind_blocks()
        self._stats.stepped(step, result)
        if self.groups.rank == 0:
            for log in self._loggers:
                log(step, result)
        return result

    def log_to(self, logger: Callable[[Step, StepResult], None]) -> None:
        """Has rank 0 call this after each train step, e.g. a `dcpc.TensorBoardLogger`."""
        self._loggers.append(logger)

    def reduce_gradients(self) -> None:
        """Sums every parameter's gradient over all ranks, once an optimizer step."""
        state, check = self._state_of_step(None)
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
        return clip_gradients(self.model.parameters(), max_norm)

    # ---------------------------------------------------------------------------------- looking in

    def report(self) -> str:
        """Returns the plan of each bucket, its predicted costs as formulas of the dims, and why.

        At the end it says what was compared with the model itself, and where.
        """
        return f"{self.planned.report()}\n{self.verifier.report()}"

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
        """
        if batch is None and not isinstance(bucket, Bucket):
            batch = bucket.get(BATCH)
        bucket = self._bucket(bucket)
        plan = self.plans[bucket]
        sizes = {**bucket.sizes, BATCH: batch or plan.micro_batch}
        placement = self._placement(bucket, sizes, self._setting(bucket))
        priced = self.planned.by_bucket[bucket].priced
        return priced.at(placement).predict(plan.menu_step, sizes)

    @property
    def packable(self) -> Packable:
        """Whether a row may hold several sequences, for `DataLoader(packing=)`; else why not."""
        traces = [v.traced for v in self.planned.traces]
        # A trace of rows of one token has no length: there is nothing to pack.
        longer = [t for t in traces if set(t.program.symbols) - {BATCH}] or traces
        found = [packable(t.program, t.sharding.rules) for t in longer]
        return next((p for p in found if p.reason), found[0])

    @property
    def node_ranks(self) -> int:
        """Ranks of a node of the device that was planned for."""
        return self.planned.device.node_ranks

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
        self._stats.variants = sum(v.compiled_count for v in self.planned.traces)
        self._stats.wire_bytes = wire_log.total_bytes()
        return self._stats

    # ----------------------------------------------------------------------- the model's own state

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the model's own state, as without dcpc."""
        return self.model.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Loads the model's own state, as without dcpc; every rank loads the same.

        The next step compares what the ranks have loaded.
        """
        loaded = self.model.load_state_dict(*args, **kwargs)
        self._loads += 1
        return loaded

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields the model's parameters under their own names."""
        return self.model.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """Yields the model's buffers under their own names."""
        return self.model.named_buffers(*args, **kwargs)

    def _state_of_step(
        self, problem: DispatchError | None
    ) -> tuple[str, Callable[[], None]]:
        """Returns what has to be the same on all ranks before a step, and what they do then.

        Args:
            problem: with this rank's model; raised by the second.
        """
        tensors = {} if self.groups.world == 1 else state_tensors(self.model, self.planned)
        loads, text = self._loads, str(problem)
        if problem is None:
            text = f"{loads} calls of load_state_dict"
            if loads == self._compared_loads:
                share, self._next_shared = share_of(tensors, self._next_shared)
                text = f"{text}, {share}"

        def check() -> None:
            if problem is not None:
                raise problem
            if loads != self._compared_loads:
                refuse_different(tensors, self.groups)
                self._compared_loads = loads

        return f", {text}", check

    # ------------------------------------------------------------------------------------- dispatch

    def _named(self, args: tuple[Tensor, ...], inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        names = tuple(self.buckets.inputs)
        if len(args) > len(names):
            raise DispatchError(
                f"got {len(args)} positional inputs; expected at most {len(names)} "
                f"({', '.join(names)}); pass inputs by name"
            )
        twice = [n for n in names[: len(args)] if n in inputs]
        if twice:
            raise DispatchError(
                f"got input {twice[0]} twice; expected it once; pass it by name only"
            )
        return {**dict(zip(names, args, strict=False)), **inputs}

    def _match(self, inputs: Mapping[str, Tensor]) -> tuple[Bucket, dict[str, int]]:
        for name, value in inputs.items():
            if not isinstance(value, Tensor):
                raise DispatchError(
                    f"input {name}: got {type(value).__name__}; expected a tensor; wrap it in "
                    "torch.tensor"
                )
            if value.requires_grad and torch.is_grad_enabled():
                raise DispatchError(
                    f"input {name}: got a tensor that requires grad; expected one that does not: "
                    "gradients are made for the model's parameters alone; detach it, or compile "
                    "the module that made it together with the model"
                )
        shapes = {n: tuple(t.shape) for n, t in inputs.items()}
        return self.buckets.match(shapes, {n: t.dtype for n, t in inputs.items()})

    def _run(
        self,
        bucket: Bucket,
        sizes: Mapping[str, int],
        inputs: Mapping[str, Tensor],
        setting: Setting,
        place: int,
        seed: int | None = None,
    ) -> Tensor:
        """Returns the loss of a micro-batch, run with a row of its bucket's table.

        Args:
            bucket: of the inputs.
            sizes: length of every dim, batch included.
            inputs: by name.
            setting: the row.
            place: of this rank in its group.
            seed: of the random numbers; None: that of the next call.
        """
        traced = self.planned.by_bucket[bucket].traced
        variant, integers = self._variant(bucket, sizes, setting, place)
        # The graph was traced for dense inputs; a slice or an expanded tensor has other strides.
        given = {p: inputs[n].contiguous() for p, n in traced.program.inputs.items()}
        named = {**traced.tensors(), **given}
        self._stats.called(bucket, sizes.get(BATCH, 1))
        tensors = [named[p] for p in variant.placeholders]
        if seed is None:
            seed = self._seed(variant.sp) if variant.draws else 0
        return variant(tensors, integers, seed)

    def _variant(
        self, bucket: Bucket, sizes: Mapping[str, int], setting: Setting, place: int
    ) -> tuple[Variant, tuple[int, ...]]:
        """Returns what runs these sizes with a row, compiled on first use, and its integers."""
        key = (bucket, sizes.get(BATCH, 1), setting, place)
        if key not in self._dispatch:
            runnable = self.planned.by_bucket[bucket]
            placement = self._placement(bucket, sizes, setting)
            self._dispatch[key] = runnable.variant(placement, setting.menu_step, sizes, place)
        return self._dispatch[key]

    def _seed(self, sp: int) -> int:
        """Returns the seed of the next call at a degree, the same on every rank of its group.

        The ranks of a group make the same calls at its degree, so counting them needs no message.
        """
        self._draws[sp] = self._draws.get(sp, 0) + 1
        return mix(self._base_seed, sp, self.groups.ranks(sp)[0], self._draws[sp]) >> 1

    def _own_casts(self) -> AbstractContextManager[object]:
        """Returns a context without autocast: the captured graph has the casts.

        Raises:
            DispatchError: another autocast than the captured one is around the call.
        """
        kind = self.groups.device.type
        around, captured = autocast_dtype(kind), self.planned.autocast
        if around is not None and around != captured:
            raise DispatchError(
                f"got a call under torch.autocast('{kind}', {around}); expected "
                f"{captured or 'none'}, which the model was captured under; compile it with "
                f"autocast={around}"
            )
        return casting(kind, None)

    def train(self, mode: bool = True) -> CompiledModel:
        """Sets the model's mode, as without dcpc."""
        self.model.train(mode)
        self.training = mode
        return self

    def _setting(self, bucket: Bucket) -> Setting:
        plan = self.plans[bucket]
        return Setting(plan.sp, plan.micro_batch, plan.menu_step)

    def _placement(
        self, bucket: Bucket, sizes: Mapping[str, int], setting: Setting
    ) -> Placement:
        """The row's placement; another one where it would leave ranks without samples."""
        runnable = self.planned.by_bucket[bucket]
        full = {**bucket.sizes, BATCH: setting.micro_batch}
        planned = runnable.priced.placement(full, setting.sp)
        if runnable.sharded_batch_is_idle(planned, sizes):
            return runnable.priced.placement(sizes, setting.sp)
        return planned

    def _bind_blocks(self) -> None:
        """Lets calls outside of `train_step` find the aligned blocks of ranks."""
        for sp in self.groups.degrees:
            pg = self.groups.of(sp)
            if pg is not None:
                bind_group(group_name(sp), pg)

    def _bucket(self, bucket: Bucket | Mapping[str, int]) -> Bucket:
        return self.planned.find(bucket.sizes if isinstance(bucket, Bucket) else bucket)
