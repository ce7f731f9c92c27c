"""Runs calls and steps of a model in stages: this rank its stage of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NoReturn, cast

from torch import Tensor

from dcpc.buckets import BATCH, Bucket, Sizes
from dcpc.codegen.lower.output_pieces import OutputPiece
from dcpc.codegen.lower.unpad_rewriting import rows_name
from dcpc.compiled.editions import Edition
from dcpc.compiled.model.core import ModelCore
from dcpc.compiled.model.insight import ModelInsight
from dcpc.compiled.model.running import StepOfEdition
from dcpc.compiled.outputs.step_run import StepOutputs
from dcpc.compiled.outputs.wanted import WithOutputs
from dcpc.compiled.pipeline.trained.cutting import CutModel
from dcpc.compiled.pipeline.trained.own_stages import OwnSetting, OwnStages
from dcpc.compiled.pipeline.trained.ownership import AgreedStages, StageStore
from dcpc.compiled.pipeline.trained.stages_report import stages_report
from dcpc.compiled.unpadding.sides import CallSetting
from dcpc.errors import DcpcError, DispatchError
from dcpc.ir import Program
from dcpc.ops.random import DRAWS
from dcpc.plan.choose import TriedRow
from dcpc.runtime.data.steps import MicroBatch, Step
from dcpc.runtime.groups.agreement import PART, agree
from dcpc.runtime.pipeline.forward import returned_by
from dcpc.runtime.pipeline.grid import PipelineGrid
from dcpc.runtime.pipeline.stage import Shaped
from dcpc.runtime.step.execution import StepState
from dcpc.runtime.step.in_stages import Inputs, InStages
from dcpc.runtime.step.stats import Stats


class ModelInStages:
    """Runs this rank's stage of each call and micro-batch; it is a `ModelExecution`.

    Made once after compile: it leaves other stages to other ranks. Collective over all ranks.

    Args:
        core: state that all parts of the model share.
        cut: stages of the model, and the planner of their batches.

    Attributes:
        planner: planner of a loader's batches.
        grid: place of this rank among the stages and pipelines.
    """

    def __init__(self, core: ModelCore, cut: CutModel) -> None:
        model, groups = core.model, core.groups
        stage = cut.plan.stages[cut.layout.stage(groups.rank)]
        core.store = self.store = store = StageStore(model, cut.plan.stages, groups, cut.layout)
        core.editions.partly = True
        core.editions.first.followed.materialized(model)
        # What a loader reads of a row, it has; what follows running out of memory does not come.
        core.tables = cast(dict[Bucket, tuple[TriedRow, ...]], cut.planner.tables)
        grid = PipelineGrid.make(groups, cut.layout, stage.learning)
        groups.watch.follow(grid)
        if cut.shares_rows:
            store.share_out(model, grid)
        core.dispatch.bind_blocks()  # the ranks of a stage have a group now
        core.agreed = AgreedStages(lambda: store.named(model), grid)
        traces = tuple(v.traced for v in core.planned.traces)
        mode = core.planned.request.recompute_mode
        self.own = OwnStages(model, cut, traces, mode, stage.index, grid.lane)
        self.core, self.cut, self.grid, self.planner = core, cut, grid, cut.planner

    def waiting(self, what: str) -> AbstractContextManager[object]:
        """Returns a context in which the ranks of a pipeline wait for each other."""
        return self.core.groups.watch.section(what)

    def refuse_by_hand(self, what: str) -> NoReturn:
        """Refuses a call of this name, which a rank with one stage cannot make."""
        raise DispatchError(
            f"{what}: got a model that was compiled with pipeline=, of which rank "
            f"{self.core.groups.rank} has stage {self.grid.stage} of {self.grid.stages}; expected "
            "train_step(step) or evaluate(batch), which run all stages; for anything else load "
            "compiled.state_dict() into the plain model, or compile it without pipeline="
        )

    def call(
        self, edition: Edition, problem: DcpcError | None, inputs: dict[str, Tensor]
    ) -> tuple[Any, ...]:
        """Returns forward's outputs for a batch that all ranks of this pipeline have."""
        layout, text = self.grid.layout, ""
        sizes: Mapping[str, int] = {}
        self.core.calls += 1
        try:
            bucket, sizes = edition.dispatch.match(inputs)
            problem = problem or edition.dispatch.input_problem(bucket, inputs)
            text = PART.join(edition.call_text(self.core.calls, bucket, sizes, inputs))
        except DcpcError as error:
            problem = problem or error
        agree(self.core.groups, layout.ranks, "call", text, problem)
        traced = edition.planned.by_bucket[bucket].traced
        draws = any(n.target in DRAWS for n in traced.program.gm.graph.nodes)
        seed = self.core.seeds.of_call(layout.ranks) if draws else 0
        given, lengths = self._without_padding(edition, bucket, inputs, sizes)
        stage = self._running(edition).settings[0].at(lengths)
        shapes = self.own.of(traced).last.sent(sizes)
        with edition.dispatch.own_casts():
            found = returned_by(stage, given, lengths, seed, self.grid, shapes)
        return _pieces(traced.program, found)

    def of_step(self, step: Step, edition: Edition, state: StepState) -> StepOfEdition:
        """Returns the execution of a step on all stages; it sums gradients over the pipelines."""
        made, execution = edition.planned.loss, self._running(edition)
        if not isinstance(made, WithOutputs):
            return execution, state, None
        outputs, by_bucket = StepOutputs(made), edition.planned.by_bucket

        def shapes(mb: MicroBatch, sizes: Sizes) -> Sequence[Shaped]:
            return self.own.of(by_bucket[mb.bucket].traced).last.sent(sizes)

        def take(mb: MicroBatch, tensors: Sequence[Tensor]) -> None:
            outputs.keep(mb, _pieces(by_bucket[mb.bucket].traced.program, tensors))

        execution.shapes, execution.take = shapes, take
        return execution, state, outputs

    def clip(self, max_norm: float) -> float:
        """Scales a gradient of the whole model down to a largest norm; returns it; collective."""
        return self._running(self.core.editions.first).clip(max_norm)

    def _running(self, edition: Edition) -> InStages:
        """Returns the execution of this rank's stage of an edition, with its parameters now."""
        dispatch, by_bucket = edition.dispatch, edition.planned.by_bucket
        programs = {
            v.traced.program.fixed: (v, dispatch.unpadding(b)) for b, v in by_bucket.items()
        }
        count = self.cut.planner.cost.settings
        settings = [OwnSetting(self.own, programs, [*by_bucket], number) for number in range(count)]

        named, store, seed = self.store.named(self.core.model), self.store, self.core.seeds
        given = partial(self._without_padding, edition)
        summed = partial(store.sum_gradients, self.core.model, self.grid)
        return InStages(self.grid, settings, named, store, summed, given, seed.of_micro_batch)

    def _without_padding(
        self, edition: Edition, bucket: Bucket, inputs: Inputs, sizes: Sizes
    ) -> tuple[Inputs, Sizes]:
        """Returns inputs and lengths of a micro-batch, without its padding where that is run."""
        unpadding = edition.dispatch.unpadding(bucket)
        if unpadding is None:
            return inputs, sizes
        program = edition.planned.by_bucket[bucket].traced.program
        given = {p: inputs[n].contiguous() for p, n in program.inputs.items()}
        how = CallSetting(self.grid.layout.sp, 0, self.grid.lane, {**bucket.sizes, BATCH: 1})
        rows = unpadding.rows(sizes, given, how)
        if rows is None:
            return inputs, sizes
        unpadding.compare(sizes, given, rows, how)
        self.core.dispatch.stats.unpadded += 1
        indices = {name: x for side in rows.sides for name, x in side.indices.items()}
        counts = {rows_name(i): side.count for i, side in enumerate(rows.sides)}
        return {**inputs, **indices}, {**sizes, **counts}


def _pieces(program: Program, tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    """Returns forward's outputs, as pieces where these are wanted; each rank has them whole."""
    loss, *others = tensors
    return (loss, *map(OutputPiece, others)) if program.pieces else (loss, *others)


class StagesInsight(ModelInsight):
    """Reports of a model in stages.

    Args:
        execution: execution of this rank's stage.
        staging: reason why the model runs in stages.
    """

    def __init__(self, execution: ModelInStages, staging: str) -> None:
        super().__init__(execution.core, staging)
        self._execution = execution

    def report(self, full: bool = False) -> str:
        """Returns the parameters, seconds and memory of each stage at every bucket, in full."""
        text = stages_report(self._execution.cut, self._execution.grid.replicas)
        text += "".join(f"{line}\n" for line in (*self.core.planned.notes, self.staging) if line)
        return f"{text}\n{self.core.verifier.report()}"

    def stats(self) -> Stats:
        """Returns counts and seconds of this rank's calls and steps so far."""
        found = super().stats()
        stage = self._execution.cut.plan.stages[self._execution.grid.stage]
        found.variants += sum(each.runnable.compiled_count for each in stage.by_trace)
        return found

    def _bucket(self, bucket: Bucket | Mapping[str, int], what: str) -> NoReturn:
        """Refuses reports on a bucket: the plan of the whole model is not what runs."""
        self._execution.refuse_by_hand(what)
