"""From a global batch to a `StepPlan` of pipelines: micro-batches of one bucket each, schedules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dcpc.buckets import BATCH, Bucket, Buckets
from dcpc.compiled.pipeline.model_stage import ModelStage
from dcpc.compiled.pipeline.scheduled import ScheduledStages
from dcpc.compiled.pipeline.stage_costs import StageDevice
from dcpc.compiled.pipeline.stages import ProgramStage
from dcpc.compiled.pipeline.trained.ladder import Ladder
from dcpc.errors import PlanError
from dcpc.ir import PlanRow
from dcpc.runtime.pipeline.layout import PipelineLayout
from dcpc.runtime.pipeline.replicas import LIMIT, PlannedPipeline, plan_replicas
from dcpc.runtime.pipeline.schedule import PipelineSchedule
from dcpc.runtime.planner.own_lengths import BatchLengths
from dcpc.runtime.planner.plans import PlannedMicroBatch, StepPlan, step_plan

MOST_SAMPLES = 256  # of a micro-batch
SEARCHED = 2_000  # simulated actions for a schedule: 0.1 s of a processor


@dataclass(frozen=True)
class PipelinePlanner:
    """Plans global batches for pipelines; it is a `runtime.planner.protocol.BatchPlanner`.

    Attributes:
        cost: costs of the stages; a "length" that they are asked for is a bucket's number.
        buckets: buckets that samples are in.
        most: largest number of samples of a micro-batch, for each bucket.
        layout: stage of each rank of a pipeline.
        replicas: number of pipelines.
    """

    cost: ScheduledStages
    buckets: tuple[Bucket, ...]
    most: tuple[int, ...]
    layout: PipelineLayout
    replicas: int

    @classmethod
    def of(
        cls,
        stages: Sequence[ModelStage],
        devices: Sequence[StageDevice],
        buckets: Buckets,
        layout: PipelineLayout,
        replicas: int,
        recompute: str,
    ) -> PipelinePlanner:
        """Returns the planner of a model that was cut.

        Args:
            stages: stages of the model.
            devices: device of each stage.
            buckets: buckets that samples are in.
            layout: stage of each rank of a pipeline.
            replicas: number of pipelines.
            recompute: mode of recompute, "auto", "none" or "all".

        Raises:
            PlanError: a sample of a bucket does not fit alone.
        """
        own, traces = tuple(buckets), buckets.by_trace()
        largest = [
            max((at_batch(b, 1) for b in mine), key=lambda sizes: sum(sizes.values()))
            for mine in traces.values()
        ]
        rows = []
        for stage in stages:
            homes = zip(largest, traces.values(), strict=True)
            each = [(stage.at(sizes).within([*mine]), sizes) for sizes, mine in homes]
            settings = (
                recomputed(part, part.study(sizes).steps, recompute) for part, sizes in each
            )
            every = zip(*settings, strict=True)
            rows.append([ModelStage(dict(zip(traces, s, strict=True))) for s in every])
        most = tuple(
            (b.batch or MOST_SAMPLES) if BATCH in stages[0].at(b.sizes).part.program.symbols else 1
            for b in own
        )
        cost = ScheduledStages(rows, lambda n: own[n].sizes, devices)
        found = cls(cost, own, most, layout, replicas)
        for number, bucket in enumerate(own):
            found.check_fits(number, bucket)
        return found

    def check_fits(self, number: int, bucket: Bucket) -> None:
        """Refuses a bucket of which a stage cannot hold one sample, with all recompute."""
        for stage, room in enumerate(self.cost.memory_bytes):
            cost = self.cost.options(stage, 1, number)[-1]
            least = max(cost.forward_bytes, cost.backward_bytes)
            if least > room:
                raise PlanError(
                    f"bucket {bucket} on stage {stage} of {self.cost.stages}: got {room:.3g} bytes "
                    f"for activations, of which a sample needs {least:.3g}; expected enough for "
                    "one; take more stages, raise memory= or lower the bucket"
                )

    @property
    def tables(self) -> dict[Bucket, tuple[PlanRow, ...]]:
        """One row a bucket: all stages take a micro-batch together."""
        seconds = (slowest_s(self.cost, 1, n) for n in range(len(self.buckets)))
        rows = zip(self.buckets, self.most, seconds, strict=True)
        return {b: (PlanRow(self.layout.ranks, most, 0, s * most),) for b, most, s in rows}

    def plan(
        self,
        samples: Sequence[tuple[int, Bucket]],
        table: str,
        lengths: BatchLengths | None = None,
    ) -> StepPlan:
        """Returns the plan of a batch; a pipeline for which no sample is left runs nothing.

        Args:
            samples: id and bucket of each sample.
            table: hash of the plan table, for the plan to carry.
            lengths: lengths that samples are run at; None: at their buckets'.
        """
        ladder = Ladder.of(samples, self.buckets, lengths)
        cost = self.cost.at(ladder.sizes)
        found = self._found(ladder, cost, SEARCHED)
        stages, width = self.cost.stages, self.layout.ranks
        micro_batches, busy_s, texts = list[PlannedMicroBatch](), list[float](), list[str]()
        for replica in range(self.replicas):
            if replica >= len(found):
                texts.append(str(PipelineSchedule(((),) * stages, ((),) * stages)))
                busy_s += [0.0] * width
                continue
            one, ranks = found[replica], tuple(range(replica * width, (replica + 1) * width))
            for batch in one.batches:
                bucket, ids = samples[batch[0]][1], tuple(samples[i][0] for i in batch)
                place = max(ladder.places[i] for i in batch)
                dims = () if lengths is None else lengths.padded(bucket, ids)
                micro_batches.append(PlannedMicroBatch(
                    bucket, width, ranks, ids, slowest_s(cost, len(batch), place),
                    self.most[ladder.homes[place]], 0, (),
                    () if dims == bucket.shape_key else dims,
                ))  # fmt: skip
            schedule = one.found.schedule
            texts.append(str(schedule))
            each = [one.work.busy_s(s, schedule.settings[s]) for s in range(stages)]
            busy_s += self.layout.by_rank(each)
        slowest = max(found, key=lambda p: p.found.replay.makespan_s).found
        return replace(
            step_plan(micro_batches, width * self.replicas),
            busy_s=tuple(busy_s),
            makespan_s=slowest.replay.makespan_s,
            bound_s=slowest.bound.seconds_s,
            binds=f"pipeline of {stages} stages: {slowest.bound.binds}",
            mode="auto",
            table=table,
            pipelines=tuple(texts),
        )

    def pipelines(
        self, buckets: Sequence[Bucket], limit: int = SEARCHED
    ) -> tuple[PlannedPipeline, ...]:
        """Returns the plan of each pipeline, as many as there are samples for.

        Args:
            buckets: bucket of each sample.
            limit: number of simulated actions for the search of a schedule.
        """
        return self._found(Ladder.of([*enumerate(buckets)], self.buckets), self.cost, limit)

    def _found(
        self, ladder: Ladder, cost: ScheduledStages, limit: int
    ) -> tuple[PlannedPipeline, ...]:
        used = min(self.replicas, len(ladder.places))
        return plan_replicas(
            ladder.places, cost, used, split=True, limit=min(limit, LIMIT),
            apart=ladder.groups(self.most),
        )  # fmt: skip


def slowest_s(cost: ScheduledStages, count: int, place: int) -> float:
    """Returns the seconds of the slowest stage for a micro-batch, nothing recomputed."""
    every = (cost.options(s, count, place)[0] for s in range(cost.stages))
    return max(each.forward_s + each.backward_s for each in every)


def at_batch(bucket: Bucket, count: int) -> dict[str, int]:
    """Returns the sizes of a micro-batch: of so many samples, or those that the bucket fixes."""
    return {**bucket.sizes, BATCH: bucket.batch or count}


def recomputed(stage: ProgramStage, steps: int, recompute: str) -> list[ProgramStage]:
    """Returns a stage with each recompute that a schedule may choose, the fastest first.

    Args:
        stage: stage of the pipeline.
        steps: number of steps of its menu.
        recompute: mode of recompute, "auto", "none" or "all".
    """
    steps_of = {"none": (0,), "all": (steps,), "auto": (0, steps // 2, steps)}
    return [stage.recomputing(step) for step in steps_of[recompute]]
