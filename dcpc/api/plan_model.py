"""`plan`: the phases as far as they go without running anything."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from dcpc.api.requests import rank_memory_bytes, target_of
from dcpc.api.search import Traces, search
from dcpc.buckets import Buckets
from dcpc.compiled.pipeline import CutModel, cut_model, refuse_beside_stages, stage_degree
from dcpc.errors import explaining
from dcpc.plan.options import MOST_COMMUNICATORS, PlanOptions, taking
from dcpc.plan.planning import Planned
from dcpc.runtime.planner.speeds import Speeds


def cut_with(
    model: nn.Module, buckets: Buckets, options: PlanOptions, stages: int, speeds: Speeds = ()
) -> CutModel:
    """Returns the stages that `compile(pipeline=)` would cut a model into, and their planner.

    Args:
        model: model as for `plan`.
        buckets: buckets as for `plan`.
        options: options of `plan`; its ranks are all those of all pipelines.
        stages: number of stages of a pipeline.
        speeds: speed of each rank, as for `cut_model`.

    Raises:
        DcpcError: as from `compile`.
    """
    refuse_beside_stages(options, stages, options.world)
    single = plan_with(model, buckets, of_one_rank(options), partly=True)
    sp = stage_degree(options, stages)
    return cut_model(model, buckets, single, stages, options.world, sp, speeds, options.parameters)


def of_one_rank(options: PlanOptions) -> PlanOptions:
    """Returns the options for a model before it is cut into stages: those of one rank alone."""
    # Its wires, sums and groups of ranks are as many as a rank may have.
    among = MOST_COMMUNICATORS if options.world > 1 else 0
    memory = rank_memory_bytes(options.memory, target_of(options.device), options.world, among)
    # Which buckets need tiles is not known before the cut: all or none have them.
    tile = "none" if options.tile == "auto" else options.tile
    return replace(
        options, world=1, memory=memory, sp=1, parameters="whole", tile=tile, host=None, disk=None
    )


@taking(PlanOptions)
def plan(model: nn.Module, buckets: Buckets, options: PlanOptions) -> Planned:
    """Returns the plan of every bucket for `world` ranks, from one process and no process group.

    Args:
        model: model as for `compile`; its parameters' values are not read, so they may be on the
            meta device (`with torch.device("meta"): model = ...`), where they take no memory.
        buckets: buckets as for `compile`.
        options: each field of `PlanOptions` by its name. With `device="auto"` a calibration must be
            of this very machine, with a named device of any that has it.

    Raises:
        TraceError: the model cannot be captured.
        PlanError: a bucket fits with no setting, or a forced value is impossible.
        ProfileError: the calibration is of another model, device, number of ranks or dtype.
    """
    with explaining("dcpc.api.plan"):
        return plan_with(model, buckets, options)


def plan_with(
    model: nn.Module,
    buckets: Buckets,
    options: PlanOptions,
    ranges: Buckets | None = None,
    *,
    partly: bool = False,
) -> Planned:
    """Returns the plan for options made before, as `plan` does.

    Args:
        model: model as for `plan`.
        buckets: buckets as for `plan`.
        options: options of `plan`.
        ranges: least and largest lengths that one trace is to serve; None: the buckets'.
        partly: whether buckets that fit with no setting are left without a plan, as
            `Planned.misfits`, and are no error.

    Raises:
        DcpcError: as from `plan`.
    """
    found = search(Traces(model, buckets, options, ranges), options, partly=partly)
    return found if partly else whole_plan(found)


def whole_plan(planned: Planned) -> Planned:
    """Returns a plan of all buckets.

    Raises:
        PlanError: a bucket fits with no setting.
    """
    for error in planned.misfits.values():
        raise error
    return planned
