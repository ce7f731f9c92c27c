"""This rank's stage of every program of a model: of evaluation, with outputs, without padding.

the programs that were cut        their own stages
any other program of the model    cut between the same parameters, as a rank has those of its
stage alone
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from dcpc.buckets import BATCH, Bucket, Fixed, Sizes, held_by
from dcpc.codegen.lower.unpad_rewriting import rows_name
from dcpc.compiled.pipeline.borders import borders_like, homes_of
from dcpc.compiled.pipeline.chain import chain_of
from dcpc.compiled.pipeline.stages import ProgramStage, stages_of
from dcpc.compiled.pipeline.trained.cutting import CutModel
from dcpc.compiled.pipeline.trained.planner import recomputed
from dcpc.compiled.unpadding.unpadding import Unpadding, fewest_steps
from dcpc.errors import PlanError
from dcpc.plan.runnable import Runnable
from dcpc.plan.traced import Traced


@dataclass(frozen=True, slots=True)
class StageOfProgram:
    """A program of the model on this rank."""

    own: ProgramStage
    last: ProgramStage


@dataclass(frozen=True)
class OwnStages:
    """Cuts programs of a model where it was cut.

    Attributes:
        model: model of the user.
        cut: stages of the model.
        traces: traces whose programs were cut.
        recompute: mode of recompute, "auto", "none" or "all".
        index: number of this rank's stage.
        lane: place of this rank among those of its stage.
    """

    model: nn.Module
    cut: CutModel
    traces: tuple[Traced, ...]
    recompute: str
    index: int
    lane: int
    _known: dict[int, tuple[Traced, StageOfProgram]] = field(default_factory=dict, repr=False)

    def of(self, traced: Traced) -> StageOfProgram:
        """Returns the stages of a program.

        Raises:
            PlanError: it cannot be cut between the same parameters.
        """
        if id(traced) not in self._known:
            self._known[id(traced)] = traced, self._made(traced)
        return self._known[id(traced)][1]

    def number_of(self, traced: Traced) -> int | None:
        """Returns the place of a program among those that were cut; None: it is another."""
        return next((n for n, one in enumerate(self.traces) if one is traced), None)

    def _made(self, traced: Traced) -> StageOfProgram:
        plan = self.cut.plan
        number = self.number_of(traced)
        if number is None:
            stages = self._like(traced)
        else:
            stages = tuple(stage.by_trace[number] for stage in plan.stages)
        return StageOfProgram(stages[self.index].in_lane(self.lane), stages[-1])

    def _like(self, traced: Traced) -> tuple[ProgramStage, ...]:
        program, hints = traced.program, traced.program.hints
        like = [n for n, one in enumerate(self.traces) if one.program.fixed == program.fixed] or [0]
        number = like[0]
        first, own = self.traces[number], self.cut.plan.chains[number]
        at = [border[number] for border in self.cut.plan.borders]
        dims = program.dims({BATCH: 1, **(traced.reference or hints)})
        chain = chain_of(program, dims)
        found = borders_like(at, (first, own), (traced, chain), dims)
        both = [*zip(at, found, strict=True)]
        homes = homes_of((first, traced), (own, chain), both)[1]
        stages = stages_of(traced, self.model, chain, found, self.cut.layout.sp, homes)
        for stage, held in zip(stages, self.cut.plan.stages, strict=True):
            missing = {*stage.parameters} - {*held.parameters}
            if missing:
                raise PlanError(
                    f"stage {stage.index}: got a program that reads {min(missing)} there; expected "
                    "the parameters that the stage has; take another number of stages"
                )
        return stages


@dataclass(frozen=True)
class OwnSetting:
    """This rank's stage with one setting of recompute, for the programs of an edition.

    It is a `runtime.pipeline.stage.StageSetting`.

    Attributes:
        stages: stages of the model's programs.
        programs: dims that a trace has as numbers -> its runnable, and its calls without padding.
        buckets: buckets of the edition.
        number: place of the setting among those that a schedule names.
    """

    stages: OwnStages
    programs: Mapping[Fixed, tuple[Runnable, Unpadding | None]]
    buckets: Sequence[Bucket]
    number: int

    def at(self, sizes: Sizes) -> ProgramStage:
        """Returns the stage that runs a micro-batch of these sizes."""
        named = {n: size for n, size in sizes.items() if not n.startswith(rows_name(0))}
        runnable, unpadding = held_by(self.programs, named)
        padded = self._with_padding(runnable)
        sides = len(sizes) - len(named)
        if not sides:
            return padded
        assert unpadding is not None, "it has found the rows"
        whole = unpadding.sides[sides - 1].runnable.traced
        own = self.stages.of(whole).own.placed_at({BATCH: 1, **(whole.reference or {})})
        most_bytes = padded.predict(named).peak_bytes
        every = own.study(sizes).steps
        fits = fewest_steps(
            every, lambda k: own.recomputing(k).predict(sizes).peak_bytes, most_bytes
        )
        return own.recomputing(every if fits is None else fits)

    def _with_padding(self, runnable: Runnable) -> ProgramStage:
        traced, stages = runnable.traced, self.stages
        number = stages.number_of(traced)
        if number is not None:
            row = stages.cut.planner.cost.rows[stages.index][self.number]
            return row.by_trace[number].in_lane(stages.lane)
        alike = [b for b in self.buckets if held_by(self.programs, b.sizes)[0] is runnable]
        own = stages.of(traced).own.within(alike)
        largest = {BATCH: 1, **(traced.reference or traced.program.hints)}
        settings = recomputed(own, own.study(largest).steps, self.stages.recompute)
        return settings[self.number]
