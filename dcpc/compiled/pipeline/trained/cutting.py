"""From a planned model and a number of stages to the stages and what plans their batches."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from dcpc.buckets import Buckets
from dcpc.compiled.pipeline.costs import MixedBucket, StageDevice
from dcpc.compiled.pipeline.cut import StagePlan, plan_stages
from dcpc.compiled.pipeline.trained.planner import PipelinePlanner, at_batch
from dcpc.errors import PlanError
from dcpc.plan.planning import Planned


@dataclass(frozen=True)
class CutModel:
    """A model cut into stages.

    Attributes:
        plan: the stages, where the cut is, and what it costs.
        planner: of global batches.
    """

    plan: StagePlan
    planner: PipelinePlanner

    def text(self) -> str:
        """Returns the decisions as text, equal on ranks that decided alike."""
        return f"stages at {self.plan.cut.borders} of {len(self.plan.stages)}"


def cut_model(
    model: nn.Module, buckets: Buckets, planned: Planned, stages: int, pipelines: int
) -> CutModel:
    """Returns the model cut for the mixture of all buckets, each as likely as any other.

    Args:
        model: the user's.
        buckets: it is compiled for.
        planned: for one rank, with the memory of a rank.
        stages: of a pipeline.
        pipelines: that share the samples.

    Raises:
        PlanError: it cannot be cut so, or a bucket fits on no stage.
    """
    if len(planned.traces) > 1:
        raise PlanError(
            f"pipeline={stages}: got buckets that need {len(planned.traces)} traces, as a dim is 1 "
            "in some of them; expected buckets of one trace; leave these buckets out, or compile "
            "without pipeline="
        )
    devices = [StageDevice(memory_bytes=planned.memory_bytes)] * stages
    share = 1.0 / len(buckets)
    mixture = [MixedBucket(at_batch(b, 1), share) for b in buckets]
    plan = plan_stages(planned.runnable, model, mixture, devices, all_devices=True)
    recompute = planned.request.recompute_mode
    planner = PipelinePlanner.of(plan.stages, devices, buckets, pipelines, recompute)
    return CutModel(plan, planner)
