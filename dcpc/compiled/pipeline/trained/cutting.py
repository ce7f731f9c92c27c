"""Cuts a planned model into stages, and makes the planner of their batches."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import nn

from dcpc.buckets import Buckets
from dcpc.compiled.pipeline.cut import StagePlan, plan_stages
from dcpc.compiled.pipeline.stage_costs import MixedBucket, StageDevice
from dcpc.compiled.pipeline.trained.planner import PipelinePlanner, at_batch
from dcpc.plan.planning import Planned
from dcpc.runtime.pipeline.layout import PipelineLayout
from dcpc.runtime.planner.speeds import Speeds


@dataclass(frozen=True)
class CutModel:
    """A model cut into stages.

    Attributes:
        plan: stages, with the cut and its costs.
        layout: stage of each rank of a pipeline.
        planner: planner of global batches.
        shares_rows: whether ranks with the same parameters share out the optimizer's rows.
    """

    plan: StagePlan
    layout: PipelineLayout
    planner: PipelinePlanner
    shares_rows: bool = False

    def text(self) -> str:
        """Returns the decisions as text, equal on ranks that decided alike."""
        order, sp = self.layout.order, self.layout.sp
        return f"stages at {self.plan.borders}, on {order} of {sp}"


def cut_model(
    model: nn.Module,
    buckets: Buckets,
    planned: Planned,
    stages: int,
    world: int,
    sp: int = 1,
    speeds: Speeds = (),
    parameters: str = "whole",
) -> CutModel:
    """Returns the model cut for the mixture of all buckets, each as likely as any other.

    Args:
        model: model of the user.
        buckets: buckets that it is compiled for.
        planned: plan for one rank, with the memory of a rank.
        stages: number of stages of a pipeline.
        world: number of ranks, a multiple of stages * sp: pipelines share the samples.
        sp: number of ranks that run a stage together.
        speeds: speed of each rank beside the fastest one; none: they are equally fast. There is
            one cut for all pipelines: a place in them is as fast as its slowest rank.
        parameters: "whole", or "step": ranks that have the same parameters share out the
            optimizer's rows.

    Raises:
        PlanError: it cannot be cut so, or a bucket fits on no stage.
    """
    places = PipelineLayout.of(stages, sp)
    every = [[speeds[r] for r in range(world) if places.stage(r) == p] for p in range(stages)
             ] if speeds else [[1.0]] * stages  # fmt: skip
    optimizer, shares_rows = planned.request.optimizer, parameters == "step"
    memory = replace(optimizer, owners=world // stages if shares_rows else 1)
    devices = [StageDevice(min(each), planned.memory_bytes, memory) for each in every]
    traces, buckets = planned.traces, buckets.with_static(planned.static)
    share = 1.0 / len(buckets)
    mixture = [
        MixedBucket(at_batch(b, 1), share, traces.index(planned.by_bucket[b])) for b in buckets
    ]
    plan = plan_stages(traces, model, mixture, devices, all_devices=True, sp=sp)
    layout = PipelineLayout(plan.devices, sp)
    own = [devices[place] for place in layout.order]
    recompute = planned.request.recompute_mode
    pipelines = world // layout.ranks
    planner = PipelinePlanner.of(plan.stages, own, buckets, layout, pipelines, recompute)
    return CutModel(plan, layout, planner, shares_rows)
