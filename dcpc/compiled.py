"""A compiled model: an `nn.Module` that runs the variant of each call's shape."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dcpc.buckets import BATCH, Bucket, Buckets
from dcpc.codegen import bind_group, wire_log
from dcpc.errors import BucketError, DispatchError
from dcpc.ir import BucketPlan, Placement, Profile, Program
from dcpc.passes.choose import Row
from dcpc.runtime.agreement import agree
from dcpc.runtime.groups import Groups
from dcpc.runtime.loader import Step
from dcpc.runtime.step import StepResult, reduce_gradients, train_step
from dcpc.source import variant_source
from dcpc.symbolic_profile import ReportRow, render_report
from dcpc.variants import Prediction, Variants, group_name


@dataclass(slots=True)
class Stats:
    """What has run so far on this rank.

    Attributes:
        calls: bucket -> forward calls.
        samples: bucket -> samples.
        steps: train steps.
        variants: variants compiled.
        wire_bytes: sent in the variants' collectives.
        predicted_imbalance: mean idle share the plans of the steps predicted, 0 to 1.
        measured_imbalance: mean idle share measured in the steps, 0 to 1.
    """

    calls: dict[Bucket, int] = field(default_factory=dict)
    samples: dict[Bucket, int] = field(default_factory=dict)
    steps: int = 0
    variants: int = 0
    wire_bytes: int = 0
    predicted_imbalance: float = 0.0
    measured_imbalance: float = 0.0


class CompiledModel(nn.Module):
    """A model compiled for shape buckets; made by `dcpc.compile`.

    Shares the user's parameters: `parameters()` and `state_dict()` are the model's own.
    """

    def __init__(
        self,
        model: nn.Module,
        buckets: Buckets,
        program: Program,
        variants: Variants,
        plans: Mapping[Bucket, BucketPlan],
        tables: Mapping[Bucket, tuple[Row, ...]],
        groups: Groups,
        memory_bytes: int,
    ) -> None:
        """Wraps what `dcpc.compile` made; users call that."""
        super().__init__()
        self.model = model
        self.buckets = buckets
        self.program = program
        self.variants = variants
        self.plans = dict(plans)
        self.tables = dict(tables)
        self.groups = groups
        self.memory_bytes = memory_bytes
        self.training = model.training
        self._traced_training = model.training
        self._stats = Stats()
        self._calls = 0
        for sp in groups.degrees:
            pg = groups.of(sp)
            if pg is not None:
                bind_group(group_name(sp), pg)

    def forward(self, *args: Tensor, **inputs: Tensor) -> Tensor:
        """Returns the model's loss, computed by the variant of these inputs' shape.

        With sp > 1 all ranks of the SP group pass the same inputs and get the same loss; each one's
        `backward` adds its share of the gradient, which `reduce_gradients` sums.

        Args:
            args: inputs by position, in the order of the buckets' specs.
            inputs: inputs by name.

        Raises:
            DispatchError: names, dtypes or shapes match no bucket.
            GroupError: ranks of the SP group passed different shapes.
        """
        inputs = self._named(args, inputs)
        bucket, sizes = self._match(inputs)
        sp = self.plans[bucket].sp
        if sp > 1:
            self._calls += 1
            what = f"{bucket} with batch {sizes.get(BATCH, 1)}, call {self._calls}, {self.plans[bucket]}"
            agree(self.groups, sp, "bucket", what)
        return self._run(bucket, sizes, inputs)

    def train_step(self, step: Step) -> StepResult:
        """Runs all micro-batches of a planned step and sums the gradients over the ranks.

        The gradient is that of the weighted mean loss of the whole global batch, as one device would
        compute it. Collective over all ranks.

        Args:
            step: from `dcpc.DataLoader`.

        Returns:
            The global loss, and measured seconds and imbalance.
        """

        def call(sp: int, inputs: Mapping[str, Tensor]) -> Tensor:
            bucket, sizes = self._match(inputs)
            assert sp == self.plans[bucket].sp, f"step planned for sp {sp}, bucket {bucket} is not"
            return self._run(bucket, sizes, inputs)

        result = train_step(call, step, self.model.parameters(), self.groups)
        stats = self._stats
        stats.steps += 1
        stats.predicted_imbalance += (step.plan.imbalance - stats.predicted_imbalance) / stats.steps
        stats.measured_imbalance += (result.imbalance - stats.measured_imbalance) / stats.steps
        return result

    def reduce_gradients(self) -> None:
        """Sums every parameter's gradient over all ranks; alone: nothing. Once per optimizer step."""
        reduce_gradients(self.model.parameters(), self.groups)

    # ---------------------------------------------------------------------------------- looking in

    def report(self) -> str:
        """Returns the plan of each bucket, its predicted costs as formulas of the dims, and why."""
        rows = []
        for bucket, plan in self.plans.items():
            sizes = {**bucket.sizes, BATCH: plan.micro_batch}
            placement = self.variants.placement(sizes, plan.sp)
            profile = self.variants.profile(placement, plan.recompute)
            rows.append(ReportRow(plan, profile, self.variants.local_sizes(placement, sizes)))
        return render_report(rows)

    def source(self, bucket: Bucket | Mapping[str, int]) -> str:
        """Returns the forward and backward that run for a bucket as Python a person can read."""
        bucket = self._bucket(bucket)
        plan = self.plans[bucket]
        placement = self._planned_placement(bucket)
        parts = self.variants.partition(placement, plan.recompute)
        return variant_source(parts, plan, placement)

    def profile(self, bucket: Bucket | Mapping[str, int]) -> Profile:
        """Returns a bucket's costs as expressions of the dims."""
        bucket = self._bucket(bucket)
        return self.variants.profile(self._planned_placement(bucket), self.plans[bucket].recompute)

    def predict(self, bucket: Bucket | Mapping[str, int], batch: int | None = None) -> Prediction:
        """Returns a bucket's predicted costs on the fullest rank.

        Args:
            bucket: which one.
            batch: samples in the micro-batch; default: the planned ones.
        """
        bucket = self._bucket(bucket)
        plan = self.plans[bucket]
        sizes = {**bucket.sizes, BATCH: batch or plan.micro_batch}
        return self.variants.predict(self._placement(bucket, sizes), plan.recompute, sizes)

    def stats(self) -> Stats:
        """Returns counts of what has run on this rank."""
        self._stats.variants = self.variants.compiled_count
        self._stats.wire_bytes = wire_log.total_bytes()
        return self._stats

    # ------------------------------------------------------------------------- the model's own state

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the model's own state, as without dcpc."""
        return self.model.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Loads the model's own state, as without dcpc."""
        return self.model.load_state_dict(*args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields the model's parameters under their own names."""
        return self.model.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """Yields the model's buffers under their own names."""
        return self.model.named_buffers(*args, **kwargs)

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
            raise DispatchError(f"got input {twice[0]} twice; expected it once; pass it by name only")
        return {**dict(zip(names, args, strict=False)), **inputs}

    def _match(self, inputs: Mapping[str, Tensor]) -> tuple[Bucket, dict[str, int]]:
        for name, value in inputs.items():
            if not isinstance(value, Tensor):
                raise DispatchError(
                    f"input {name}: got {type(value).__name__}; expected a tensor; wrap it in "
                    "torch.tensor"
                )
        shapes = {n: tuple(t.shape) for n, t in inputs.items()}
        return self.buckets.match(shapes, {n: t.dtype for n, t in inputs.items()})

    def _run(self, bucket: Bucket, sizes: Mapping[str, int], inputs: Mapping[str, Tensor]) -> Tensor:
        self._check_mode()
        plan = self.plans[bucket]
        placement = self._placement(bucket, sizes)
        rank = self.groups.rank % plan.sp
        variant, integers = self.variants.variant(placement, plan.recompute, sizes, rank)
        held = tensors_of(self.program, self.model)
        named = {**held, **{p: inputs[n] for p, n in self.program.inputs.items()}}
        self._stats.calls[bucket] = self._stats.calls.get(bucket, 0) + 1
        samples = self._stats.samples.get(bucket, 0)
        self._stats.samples[bucket] = samples + sizes.get(BATCH, 1)
        return variant([named[p] for p in variant.placeholders], integers)

    def _check_mode(self) -> None:
        if self.model.training != self._traced_training and self.program.depends_on_mode:
            modes = ("eval()", "train()")
            raise DispatchError(
                f"the model was compiled in {modes[self._traced_training]} and is now in "
                f"{modes[self.model.training]}, which its dropout or norms depend on; compile it once "
                "for each mode"
            )

    def train(self, mode: bool = True) -> CompiledModel:
        """Sets the model's mode, as without dcpc."""
        self.model.train(mode)
        self.training = mode
        return self

    def _planned_placement(self, bucket: Bucket) -> Placement:
        plan = self.plans[bucket]
        return self.variants.placement({**bucket.sizes, BATCH: plan.micro_batch}, plan.sp)

    def _placement(self, bucket: Bucket, sizes: Mapping[str, int]) -> Placement:
        """The planned placement; another one where it would leave ranks without samples."""
        planned = self._planned_placement(bucket)
        if self.variants.sharded_batch_is_idle(planned, sizes):
            return self.variants.placement(sizes, planned.sp)
        return planned

    def _bucket(self, bucket: Bucket | Mapping[str, int]) -> Bucket:
        if isinstance(bucket, Bucket) and bucket in self.plans:
            return bucket
        wanted = bucket.sizes if isinstance(bucket, Bucket) else dict(bucket)
        key = tuple(sorted((n, s) for n, s in wanted.items() if n != BATCH))
        for known in self.plans:
            if known.shape_key == key:
                return known
        raise BucketError(
            f"got bucket {wanted}; expected one of {', '.join(map(str, list(self.plans)[:8]))}; pass one "
            "of compiled.buckets"
        )


def tensors_of(program: Program, model: nn.Module) -> dict[str, Tensor]:
    """Returns placeholder name -> the model's tensor, or the constant of the trace.

    Raises:
        DispatchError: the model lost a parameter since it was compiled.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    held: dict[str, Tensor] = dict(program.constants)
    for names, source in ((program.parameters, parameters), (program.buffers, buffers)):
        for placeholder, name in names.items():
            if name not in source:
                raise DispatchError(
                    f"the model has no parameter or buffer '{name}' any more; expected the module that "
                    "was compiled; compile it again after changing its structure"
                )
            held[placeholder] = source[name]
    return held


