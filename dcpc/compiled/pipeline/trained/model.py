"""What `dcpc.compile(pipeline=)` returns: a compiled model of which each rank runs a stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from dcpc.buckets import Bucket
from dcpc.compiled.editions import ModuleModes
from dcpc.compiled.evaluation import in_eval, refuse_arguments
from dcpc.compiled.model import CompiledModel
from dcpc.compiled.pipeline.trained.cutting import CutModel
from dcpc.compiled.pipeline.trained.ownership import StageStore
from dcpc.compiled.pipeline.trained.report import stages_report
from dcpc.errors import DataError, DcpcError, DispatchError, GroupError, explaining
from dcpc.ir import Profile
from dcpc.ops.random import DRAWS
from dcpc.plan.choose import TriedRow
from dcpc.runtime.checkpoint.parts import Parts, Stateful
from dcpc.runtime.data.arguments import check_choice, check_step
from dcpc.runtime.data.steps import Step
from dcpc.runtime.groups.agreement import PART, agree
from dcpc.runtime.groups.same_state import share_of
from dcpc.runtime.pipeline.forward import loss_of
from dcpc.runtime.pipeline.grid import PipelineGrid
from dcpc.runtime.planner.protocol import BatchPlanner
from dcpc.runtime.step.gradients import check_norm
from dcpc.runtime.step.pipelined import OwnStage, clip_stages, pipelined_step
from dcpc.runtime.step.result import StepResult
from dcpc.runtime.step.stats import Stats
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
        self._store = self._stages
        self._editions.first.followed.materialized(self.model)
        # What a loader reads of a row, it has; what follows running out of memory does not come.
        self.tables = cast(dict[Bucket, tuple[TriedRow, ...]], cut.planner.tables)
        grid = PipelineGrid.make(self.groups, cut.layout, own.learning)
        self.groups.watch.follow(grid)
        self._dispatch.bind_blocks()  # the ranks of a stage have a group now
        rows = [stage.in_lane(grid.lane) for stage in cut.planner.cost.rows[own.index]]
        self._own = OwnStage(grid, rows, {})
        dtype = next((p.dtype for p in self.model.parameters()), None)
        empty = torch.empty(0, 0, dtype=dtype, device=self.groups.device)
        self._untrained = [nn.Parameter(empty)]  # in a list: it is not in the model's state
        self._shared = 0  # place of the first tensor that the next step compares

    @property
    def batch_planner(self) -> BatchPlanner:
        """What plans the batches of a loader."""
        return self._cut.planner

    @property
    def stage(self) -> int:
        """Number of this rank's stage."""
        return self._own.grid.stage

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields the parameters of this rank's stage, under the names that the model has."""
        for name, p in self.model.named_parameters(prefix, True, remove_duplicate):
            if not p.is_meta:
                yield name, p

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Yields the parameters of this rank's stage, for its optimizer.

        Of a stage that trains none also one without elements, which no step changes: optimizers
        refuse an empty list, and the other ranks would wait for this one.
        """
        own = [p for _, p in self.named_parameters("", recurse)]
        yield from own
        if not any(p.requires_grad for p in own):
            yield from self._untrained

    @explaining("train_step")
    def train_step(
        self,
        step: Step,
        *,
        clip: float | None = None,
        nonfinite: str = "raise",
        outputs: bool | str = False,
    ) -> StepResult:
        """Runs a planned step on all stages and sums the gradients over the pipelines.

        Afterwards this rank has the gradient of the whole global batch for each parameter of its
        stage. Collective over all ranks.

        Args:
            step: from `dcpc.DataLoader`.
            clip: largest norm of the whole model's gradient, all stages together.
            nonfinite: as for every compiled model.
            outputs: False; what forward returns besides its loss does not come back.

        Raises:
            DataError: an argument or a sample is wrong on some rank, or the loss is not finite.
            DispatchError: the model changed since it was compiled.
            GroupError: the ranks are not in the same step, or one did not arrive.
            PlanError: a schedule does not end.
        """
        check_step(step)
        problem = step.problem
        try:
            check_choice("nonfinite", nonfinite, ("raise", "skip"))
            if outputs is not False:
                raise DataError(
                    f"train_step: got outputs={outputs!r}; expected False: the last stage makes "
                    "the loss alone; leave outputs= out, or compile without pipeline="
                )
            if clip is not None:
                check_norm(clip)
        except DcpcError as error:
            problem = error
        seeds = {
            mb.number: self._seeds.of_micro_batch(step.epoch, step.index, mb.number)
            for mb in step.micro_batches
        }
        what = f"train_step, step {step.index} of epoch {step.epoch}"
        with self.groups.watch.section(what), self._dispatch.own_casts():
            apart = self._trained_apart()  # all ranks take part, whatever is wrong here
            problem = problem or self._step_edition("")[1] or apart
            result = pipelined_step(
                self._now(), step, seeds, clip=clip, nonfinite=nonfinite, problem=problem
            )
        self._stepped(step, result)
        return result

    def _now(self) -> OwnStage:
        """Returns what this rank runs, with the model's parameters as they are now."""
        return replace(self._own, parameters=self._stages.named(self.model))

    def _trained_apart(self) -> GroupError | None:
        """Returns which ranks of a stage have other values of its parameters than the first.

        Collective over all ranks; compares a share of them, another one each time.
        """
        grid, groups = self._own.grid, self.groups
        share, self._shared = share_of(self._stages.named(self.model), self._shared)
        told: list[str] = [share] * groups.world
        if groups.world > 1:
            dist.all_gather_object(told, share, group=groups.control(groups.world))
        stages = [grid.layout.stage(rank) for rank in range(groups.world)]
        firsts = [grid.layout.rank(0, stage) for stage in stages]
        apart = [r for r, first in enumerate(firsts) if told[r] != told[first]]
        if not apart:
            return None
        rank, first = apart[0], firsts[apart[0]]
        return GroupError(
            f"stage {stages[rank]}: got other values of its parameters on rank {rank} than "
            f"on rank {first} ({told[rank]}, {told[first]}); expected "
            "the same in every pipeline; give each rank's optimizer the same arguments, and load "
            "the same state"
        )

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Scales a gradient of the whole model longer than `max_norm` down to it; collective.

        Args:
            max_norm: above 0.

        Returns:
            Its norm before, over all stages.
        """
        return clip_stages(self._now(), max_norm)

    def forward(self, *args: Tensor, outputs: bool | str | Tensor = False, **inputs: Tensor) -> Any:
        """Returns the loss of a batch, under `torch.no_grad()`; see `evaluate`.

        Raises:
            DispatchError: a gradient is asked for, or outputs.
        """
        if isinstance(outputs, Tensor):
            inputs, outputs = {**inputs, "outputs": outputs}, False
        if torch.is_grad_enabled() or outputs is not False:
            self._refuse("a call with gradients" if outputs is False else "a call with outputs=")
        return self._loss("call", lambda: self._dispatch.named(self.model, args, inputs))

    def evaluate(
        self,
        batch: Mapping[str, Tensor],
        *,
        between: str | None = None,
        pad: Mapping[str, int | float] | None = None,
        outputs: bool | str = False,
    ) -> Any:
        """Returns the loss of a batch in eval() and under no_grad; the model's mode stays.

        Collective over the ranks of a pipeline, which pass the same batch; pipelines may pass
        different ones. The stages are those of training.

        Args:
            batch: inputs by name, of a bucket's lengths.
            between: None: lengths between buckets are refused.
            pad: None.
            outputs: False.

        Raises:
            DispatchError: names, dtypes or shapes match no bucket; or the model has other graphs in
                eval(), as with dropout, or another argument is given.
            GroupError: ranks of a pipeline passed different batches, or one did not arrive.
        """
        if outputs is not False or between is not None or pad is not None:
            self._refuse("evaluate with between=, pad= or outputs=")
        refuse_arguments(batch, None, None, self.buckets, False)
        with in_eval(self.model):
            return self._loss("evaluate", lambda: dict(batch))

    @torch.no_grad()
    def _loss(self, what: str, named: Callable[[], dict[str, Tensor]]) -> Tensor:
        """Returns the loss of a batch that all ranks of this pipeline have, once they agree."""
        groups, layout = self.groups, self._cut.layout
        inputs, sizes, text = dict[str, Tensor](), dict[str, int](), ""
        problem: DcpcError | None = None
        self._calls += 1
        with groups.watch.section(what), self._dispatch.own_casts():
            try:
                inputs = named()
                bucket, sizes = self._dispatch.match(inputs)
                problem = self._dispatch.input_problem(bucket, inputs)
                first = self._editions.first
                text = PART.join(first.call_text(self._calls, bucket, sizes, inputs))
                if not self._editions.alike():
                    self._refuse(f"{what} in {ModuleModes.of(self.model)}, where its graphs differ")
            except DcpcError as error:
                problem = problem or error
            agree(groups, layout.ranks, what, text, problem)
            drawn = first.planned.by_bucket[bucket].traced.program.gm.graph.nodes
            draws = any(n.target in DRAWS for n in drawn)
            seed = self._seeds.of_call(layout.ranks) if draws else 0
            (stage, *_), grid = self._own.settings, self._own.grid
            made = self._cut.plan.stages[-1].at(sizes).sent(sizes)[0]
            return loss_of(stage.at(sizes), inputs, sizes, seed, grid, made)

    def _parts(
        self, optimizer: Optimizer | None, loader: Stateful | None, scheduler: Stateful | None
    ) -> Parts:
        """Returns what a checkpoint has: the whole model, and each stage's optimizer state."""
        return replace(super()._parts(optimizer, loader, scheduler), partial=True)

    # --------------------------------------------------------------------------- looking in

    def report(self) -> str:
        """Returns the stages: what each has, takes and needs, at every bucket."""
        text = stages_report(self._cut, self._own.grid.replicas)
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
            f"{self.groups.rank} has stage {self.stage} of {self._own.grid.stages}; expected "
            "train_step(step) or evaluate(batch), which run all stages; for anything else load "
            "compiled.state_dict() into the plain model, or compile it without pipeline="
        )
