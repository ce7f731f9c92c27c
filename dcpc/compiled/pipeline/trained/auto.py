"""`pipeline="auto"`: prices a step without a pipeline and with each number of stages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sympy import divisors
from torch import nn

from dcpc.buckets import Bucket, Buckets
from dcpc.compiled.pipeline.trained.cutting import CutModel, cut_model
from dcpc.errors import DcpcError, PlanError
from dcpc.plan.planning import Planned
from dcpc.runtime.planner.plans import StepPlan
from dcpc.runtime.planner.speeds import Speeds
from dcpc.runtime.planner.step_planner import Allowed, plan_step
from dcpc.runtime.planner.table import make_table
from dcpc.symbolic_profile import Device, seconds_text

SAMPLES = 4  # of each rank, in the step that is priced: one bucket after the other


@dataclass(frozen=True)
class ChosenStages:
    """The chosen way to run a model on its ranks.

    Attributes:
        cut: stages of the model; None: no pipeline.
        why: line of the report with the seconds of every way.
    """

    cut: CutModel | None
    why: str


def choose_stages(
    model: nn.Module,
    buckets: Buckets,
    whole: Planned | PlanError,
    single: Planned,
    world: int,
    sp: int = 1,
    speeds: Speeds = (),
    parameters: str = "whole",
) -> ChosenStages:
    """Returns the way whose step is predicted to end first; all in a rank's memory.

    The step has `SAMPLES` samples for each rank, of one bucket after the other, and the sum of
    gradients at its end.

    Args:
        model: model of the user.
        buckets: buckets that it is compiled for.
        whole: plan without a pipeline, or the error that says why it does not fit so.
        single: plan for one rank, with the memory of one of them.
        world: number of ranks.
        sp: number of ranks that run a stage together.
        speeds: speed of each rank, as for `cut_model`.
        parameters: mode of parameters, as for `cut_model`.

    Raises:
        PlanError: it fits in no way: that of no pipeline.
    """
    own = tuple(single.by_bucket)
    samples = [(i, own[i % len(own)]) for i in range(max(SAMPLES * world, len(own)))]
    ways: dict[int, tuple[float, CutModel | None]] = {}
    misfits: dict[int, DcpcError] = {}
    if isinstance(whole, PlanError):
        misfits[1] = whole
    else:
        ways[1] = _whole_s(model, whole, samples, world), None
    for stages in divisors(world // sp)[1:]:
        try:
            cut = cut_model(model, buckets, single, stages, world, sp, speeds, parameters)
            ways[stages] = _staged_s(model, cut, samples, single.device), cut
        except PlanError as error:
            misfits[stages] = error
    if not ways:
        raise misfits[1]
    best = min(ways, key=lambda stages: ways[stages][0])
    return ChosenStages(ways[best][1], _why(best, {n: s for n, (s, _) in ways.items()}, misfits,
                                            len(samples)))  # fmt: skip


def _whole_s(
    model: nn.Module, planned: Planned, samples: list[tuple[int, Bucket]], world: int
) -> float:
    """Returns the seconds of a step of ranks that each run the whole model, alone or together."""
    table = make_table(planned.tables, world, planned.device.node_ranks)
    plan: StepPlan = plan_step(samples, table, "auto", Allowed())
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    return plan.makespan_s + planned.device.all_reduce_s(trained, world)


def _staged_s(
    model: nn.Module, cut: CutModel, samples: list[tuple[int, Bucket]], device: Device
) -> float:
    """Returns the seconds of a step in stages, with the sum of the largest stage's gradients."""
    found = cut.planner.pipelines([bucket for _, bucket in samples])
    sizes = {name: p.nbytes for name, p in model.named_parameters()}
    largest = max(sum(sizes[n] for n in stage.learning) for stage in cut.plan.stages)
    replicas, layout = cut.planner.replicas, cut.layout
    end_s = max(p.found.replay.makespan_s for p in found)
    return end_s + device.all_reduce_s(largest, replicas * layout.sp, replicas * layout.ranks)


def _why(
    best: int, seconds: Mapping[int, float], misfits: Mapping[int, DcpcError], samples: int
) -> str:
    every = [f"{_name(n)} {seconds_text(s)}" for n, s in sorted(seconds.items())]
    every += [f"{_name(n)} does not fit" for n in sorted(misfits)]
    return (
        f"pipeline='auto': {_name(best)}: a step of {samples} samples, one bucket after the other, "
        f"is predicted to take: {', '.join(every)}"
    )


def _name(stages: int) -> str:
    return "no pipeline" if stages == 1 else f"{stages} stages"
