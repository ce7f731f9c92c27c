"""What `dcpc.compile(pipeline=)` returns: a compiled model of which each rank runs a stage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dcpc.buckets import BATCH, Bucket, Sizes, ones_of
from dcpc.codegen.lower.output_pieces import OutputPiece
from dcpc.codegen.lower.unpad import rows_name
from dcpc.compiled.editions import Edition
from dcpc.compiled.model import CompiledModel
from dcpc.compiled.outputs.wanted import WithOutputs
from dcpc.compiled.pipeline.trained.cutting import CutModel
from dcpc.compiled.pipeline.trained.own_stages import OwnSetting, OwnStages, StepOutputs
from dcpc.compiled.pipeline.trained.ownership import AgreedStages, StageStore
from dcpc.compiled.pipeline.trained.report import stages_report
from dcpc.compiled.unpadding.sides import CallSetting
from dcpc.errors import DcpcError, DispatchError
from dcpc.ir import Profile
from dcpc.ops.random import DRAWS
from dcpc.plan.choose import TriedRow
from dcpc.runtime.checkpoint.parts import Parts, Stateful
from dcpc.runtime.data.steps import Step
from dcpc.runtime.groups.agreement import PART, agree
from dcpc.runtime.pipeline.forward import returned_by
from dcpc.runtime.pipeline.grid import PipelineGrid
from dcpc.runtime.planner.protocol import BatchPlanner
from dcpc.runtime.step.execution import StepState
from dcpc.runtime.step.in_stages import Inputs, InStages
from dcpc.runtime.step.result import StepResult
from dcpc.runtime.step.stats import Stats
from dcpc.runtime.step.step import train_step
from dcpc.symbolic_profile import Prediction


class PipelinedModel(CompiledModel):
    """A model in stages: pipelines x stages x sp ranks, each with the parameters of its stage.

    `parameters()` are those of this rank's stage; what an optimizer has of others it leaves alone,
    as their gradient is None. A parameter that several stages read (tied embeddings) is on each of
    their ranks, with the same gradient: optimizers alike keep it alike. `state_dict()` is whole.
    """

    def in_stages(self, cut: CutModel) -> None:
        """Leaves other stages to other ranks; collective over all ranks, once after compile.

        Args:
            cut: the model's stages, and what plans batches for them.
        """
        self._cut = cut
        own = cut.plan.stages[cut.layout.stage(self.groups.rank)]
        self._stages = StageStore(self.model, cut.plan.stages, self.groups, cut.layout)
        self._store, self._editions.partly = self._stages, True
        self._editions.first.followed.materialized(self.model)
        # What a loader reads of a row, it has; what follows running out of memory does not come.
        self.tables = cast(dict[Bucket, tuple[TriedRow, ...]], cut.planner.tables)
        grid = PipelineGrid.make(self.groups, cut.layout, own.learning)
        self.groups.watch.follow(grid)
        if cut.shares_rows:
            self._stages.share_out(self.model, grid)
        self._dispatch.bind_blocks()  # the ranks of a stage have a group now
        self._grid, traces = grid, tuple(v.traced for v in self.planned.traces)
        mode = self.planned.request.recompute_mode
        self._own = OwnStages(self.model, cut, traces, mode, own.index, grid.lane)
        dtype = next((p.dtype for p in self.model.parameters()), None)
        empty = torch.empty(0, 0, dtype=dtype, device=self.groups.device)
        # In a list, so not in the model's state, and by a name that no parameter of a model has.
        self._untrained = [(f"(stage {own.index} trains none)", nn.Parameter(empty))]
        self._agreed = AgreedStages(lambda: self._stages.named(self.model), grid)

    @property
    def batch_planner(self) -> BatchPlanner:
        """What plans the batches of a loader."""
        return self._cut.planner

    @property
    def stage(self) -> int:
        """Number of this rank's stage."""
        return self._grid.stage

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields the parameters of this rank's stage, under the names that the model has.

        Of a stage that trains none also one without elements, which no step changes: optimizers
        refuse an empty list, and the other ranks would wait for this one.
        """
        own = self.model.named_parameters(prefix, True, remove_duplicate)
        mine = [(name, self._store.shard(p)) for name, p in own if not p.is_meta]
        yield from mine
        if not any(p.requires_grad for _, p in mine):
            yield from self._untrained

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Yields the parameters of this rank's stage, for its optimizer: `named_parameters`."""
        for _, p in self.named_parameters("", recurse):
            yield p

    def _attempt(
        self, step: Step, edition: Edition, state: StepState, **options: Any
    ) -> StepResult:
        """Returns what comes of a step on all stages, the gradients summed over the pipelines."""
        made = edition.planned.loss
        outputs = StepOutputs(edition, made, self._own) if isinstance(made, WithOutputs) else None
        execution = replace(self._running(edition), returned=outputs)
        result = train_step(execution, step, state=state, **options)
        return result if outputs is None else replace(result, outputs=outputs.of(step))

    def _running(self, edition: Edition) -> InStages:
        """Returns what this rank runs of an edition, with the model's parameters as they are."""
        dispatch, by_bucket = edition.dispatch, edition.planned.by_bucket
        programs = {ones_of(b.sizes): (v, dispatch.unpadding(b)) for b, v in by_bucket.items()}
        count = self._cut.planner.cost.settings
        settings = [OwnSetting(self._own, programs, number) for number in range(count)]

        def given(bucket: Bucket, inputs: Inputs, sizes: Sizes) -> tuple[Inputs, Sizes]:
            return self._without_padding(edition, bucket, inputs, sizes)

        def summed() -> int:
            return self._stages.sum_gradients(self.model, self._grid)

        named, store = self._stages.named(self.model), self._stages
        seed = self._seeds.of_micro_batch
        return InStages(self._grid, settings, named, store, summed, given, seed)

    def _without_padding(
        self, edition: Edition, bucket: Bucket, inputs: Inputs, sizes: Sizes
    ) -> tuple[Inputs, Sizes]:
        """Returns inputs and lengths of a micro-batch, without its padding where that is run."""
        unpadding = edition.dispatch.unpadding(bucket)
        if unpadding is None:
            return inputs, sizes
        program = edition.planned.by_bucket[bucket].traced.program
        given = {p: inputs[n].contiguous() for p, n in program.inputs.items()}
        how = CallSetting(self._grid.layout.sp, 0, self._grid.lane, {**bucket.sizes, BATCH: 1})
        rows = unpadding.rows(sizes, given, how)
        if rows is None:
            return inputs, sizes
        unpadding.compare(sizes, given, rows, how)
        self._dispatch.stats.unpadded += 1
        indices = {name: x for side in rows.sides for name, x in side.indices.items()}
        counts = {rows_name(i): side.count for i, side in enumerate(rows.sides)}
        return {**inputs, **indices}, {**sizes, **counts}

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Scales a gradient of the whole model longer than `max_norm` down to it; collective.

        Args:
            max_norm: above 0.

        Returns:
            Its norm before, over all stages.
        """
        return self._running(self._editions.first).clip(max_norm)

    def forward(self, *args: Tensor, outputs: bool | str | Tensor = False, **inputs: Tensor) -> Any:
        """Returns the loss of a batch, under `torch.no_grad()`; see `evaluate`.

        Raises:
            DispatchError: a gradient is asked for.
        """
        if torch.is_grad_enabled():
            self._refuse("a call with gradients")
        with self.groups.watch.section("call"):
            return super().forward(*args, outputs=outputs, **inputs)

    def evaluate(self, batch: Mapping[str, Tensor], **options: Any) -> Any:
        """Returns what `CompiledModel.evaluate` does; collective over the ranks of a pipeline.

        All of them pass the same batch; pipelines may pass different ones.
        """
        with self.groups.watch.section("evaluate"):
            return super().evaluate(batch, **options)

    def _run_call(
        self, edition: Edition, problem: DcpcError | None, inputs: dict[str, Tensor]
    ) -> tuple[Any, ...]:
        """Returns what forward returns for a batch that all ranks of this pipeline have."""
        layout, sizes, text = self._grid.layout, dict[str, int](), ""
        self._calls += 1
        try:
            bucket, sizes = edition.dispatch.match(inputs)
            problem = problem or edition.dispatch.input_problem(bucket, inputs)
            text = PART.join(edition.call_text(self._calls, bucket, sizes, inputs))
        except DcpcError as error:
            problem = problem or error
        agree(self.groups, layout.ranks, "call", text, problem)
        traced = edition.planned.by_bucket[bucket].traced
        draws = any(n.target in DRAWS for n in traced.program.gm.graph.nodes)
        seed = self._seeds.of_call(layout.ranks) if draws else 0
        given, lengths = self._without_padding(edition, bucket, inputs, sizes)
        stage = self._running(edition).settings[0].at(lengths)
        shapes = self._own.of(traced).last.sent(sizes)
        with edition.dispatch.own_casts():
            found = returned_by(stage, given, lengths, seed, self._grid, shapes)
        pieces = traced.program.pieces  # of one rank: stages hand on whole values
        return (found[0], *(OutputPiece(x) if pieces else x for x in found[1:]))

    def _parts(
        self, optimizer: Optimizer | None, loader: Stateful | None, scheduler: Stateful | None
    ) -> Parts:
        """Returns what a checkpoint has: the whole model, and each stage's optimizer state."""
        return replace(super()._parts(optimizer, loader, scheduler), partial=True)

    # --------------------------------------------------------------------------- looking in

    def report(self) -> str:
        """Returns the stages: what each has, takes and needs, at every bucket."""
        text = stages_report(self._cut, self._grid.replicas)
        text += f"{self.staging}\n" * bool(self.staging)
        return f"{text}\n{self.verifier.report()}"

    def stats(self) -> Stats:
        """Returns counts of what has run on this rank."""
        found = super().stats()
        stage = self._cut.plan.stages[self.stage]
        found.variants += sum(each.runnable.compiled_count for each in stage.by_trace)
        return found

    # ------------------------------------------------------- what a rank with a stage cannot do

    def reduce_gradients(self) -> None:
        """Refuses it: `train_step` sums gradients."""
        self._refuse("reduce_gradients")

    def source(self, bucket: Bucket | Mapping[str, int]) -> str:
        """Refuses it: what is planned of the whole model does not run."""
        self._refuse("source")

    def profile(self, bucket: Bucket | Mapping[str, int]) -> Profile:
        """Refuses it: what is planned of the whole model does not run."""
        self._refuse("profile")

    def predict(self, bucket: Bucket | Mapping[str, int], batch: int | None = None) -> Prediction:
        """Refuses it: what is planned of the whole model does not run."""
        self._refuse("predict")

    def _refuse(self, what: str) -> NoReturn:
        raise DispatchError(
            f"{what}: got a model that was compiled with pipeline=, of which rank "
            f"{self.groups.rank} has stage {self.stage} of {self._grid.stages}; expected "
            "train_step(step) or evaluate(batch), which run all stages; for anything else load "
            "compiled.state_dict() into the plain model, or compile it without pipeline="
        )
