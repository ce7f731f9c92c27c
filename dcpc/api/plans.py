"""`plan`: the phases as far as they go without running anything."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from dcpc.api.requests import device_of, rank_memory_bytes, request_of, target_of
from dcpc.buckets import Bucket, Buckets
from dcpc.codegen import Library
from dcpc.compiled import CompiledModel
from dcpc.compiled.pipeline import (
    CutModel,
    cut_model,
    refuse_beside_stages,
    stage_degree,
)
from dcpc.errors import PlanError, TraceError, explaining
from dcpc.ir import Program
from dcpc.passes.sharding.rules import warn_derived, warn_replicated
from dcpc.plan.choose import elements
from dcpc.plan.folding import gathering
from dcpc.plan.options import (
    MOST_COMMUNICATORS,
    PlanOptions,
    degrees,
    few_degrees,
    taking,
)
from dcpc.plan.placements import compute_dtype
from dcpc.plan.planning import Planned, plan_buckets
from dcpc.plan.progress import tracked
from dcpc.plan.runnable import Runnable
from dcpc.plan.traced import Traced, traced
from dcpc.runtime.planner.speeds import Speeds
from dcpc.symbolic_profile import (
    Calibration,
    CalibrationKey,
    Device,
    calibrated,
    machine,
)
from dcpc.trace import autocast_dtype, casting, checked_dtype


def cut_with(
    model: nn.Module,
    buckets: Buckets,
    options: PlanOptions,
    stages: int,
    speeds: Speeds = (),
) -> CutModel:
    """Returns the stages that `compile(pipeline=)` would cut a model into, and their planner.

    Args:
        model: as for `plan`.
        buckets: as for `plan`.
        options: those of `plan`; its ranks are all those of all pipelines.
        stages: of a pipeline.
        speeds: of each rank, as for `cut_model`.

    Raises:
        DcpcError: as from `compile`.
    """
    refuse_beside_stages(options, stages, options.world)
    single = plan_with(model, buckets, of_one_rank(options), partly=True)
    sp = stage_degree(options, stages)
    return cut_model(model, buckets, single, stages, options.world, sp, speeds)


def of_one_rank(options: PlanOptions) -> PlanOptions:
    """Returns what a model is planned with before it is cut into stages: one of its ranks alone."""
    # Its wires, sums and groups of ranks are as many as a rank may have.
    among = MOST_COMMUNICATORS if options.world > 1 else 0
    memory = rank_memory_bytes(options.memory, target_of(options.device), options.world, among)
    return replace(options, world=1, memory=memory, sp=1, parameters="whole")


@taking(PlanOptions)
def plan(model: nn.Module, buckets: Buckets, options: PlanOptions) -> Planned:
    """Returns the plan of every bucket for `world` ranks, from one process and no process group.

    Args:
        model: as for `compile`; its parameters' values are not read, so they may be on the meta
            device (`with torch.device("meta"): model = ...`), where they take no memory.
        buckets: as for `compile`.
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
    """Returns what `plan` does, of options made before.

    Args:
        model: as for `plan`.
        buckets: as for `plan`.
        options: those of `plan`.
        ranges: the least and the largest lengths that one trace is to serve; None: the buckets'.
        partly: whether buckets that fit with no setting are left without a plan, as
            `Planned.misfits`, and are no error.

    Raises:
        DcpcError: as from `plan`.
    """
    if isinstance(model, CompiledModel):
        raise TraceError(
            "model: got a CompiledModel, what dcpc.compile returned; expected the module that it "
            "was made of; pass that (`compiled.model`)"
        )
    if options.parameters != "auto":
        return _plan_with(model, buckets, options, ranges, partly)
    gpu = target_of(options.device).gpu
    *first, last = ("whole", "step", "rounds" if gpu or options.block else "pull")
    for mode in first if options.world > 1 else ():
        with contextlib.suppress(PlanError):
            same = replace(options, parameters=mode, block=None)
            return _plan_with(model, buckets, same, ranges, False)
    block = (options.block or "auto") if last == "rounds" else None
    chosen = replace(options, parameters=last, block=block)
    return _plan_with(model, buckets, chosen, ranges, partly)


def _plan_with(
    model: nn.Module, buckets: Buckets, options: PlanOptions, ranges: Buckets | None, partly: bool
) -> Planned:
    """Returns the plan with parameters held as the options say."""
    if options.block != "auto":
        return _plan_held(model, buckets, options, ranges, partly, [])
    best: Planned | None = None
    least, traces = math.inf, list[Traced]()
    for block in degrees("auto", options.world)[1:]:
        own, target = replace(options, block=block), target_of(options.device)
        request = request_of(model, own, degrees("auto", options.world), target)
        if request.resident_bytes >= request.memory_bytes:
            continue
        with contextlib.suppress(PlanError):
            found = _plan_held(model, buckets, own, ranges, False, traces)
            price = _step_price(found)
            if price >= least:
                break
            best, least = found, price
    whole = replace(options, block=None)
    return best or _plan_held(model, buckets, whole, ranges, partly, traces)


def _step_price(planned: Planned) -> float:
    """Returns a number that is least where steps of one round of each bucket are quickest.

    The sum over buckets of the logarithm of rank-seconds a sample, as all count alike; each step
    pays its sum over blocks.
    """
    return sum(
        math.log((plan.seconds_s + planned.sum_s) * plan.sp / plan.micro_batch)
        for plan in planned.plans.values()
    )


def _plan_held(
    model: nn.Module,
    buckets: Buckets,
    options: PlanOptions,
    ranges: Buckets | None,
    partly: bool,
    traces: list[Traced],
) -> Planned:
    """Returns the plan; `traces` are those of the model where they were made, else gets them."""
    world = options.world
    target = target_of(options.device)
    sps = degrees(options.sp, world)
    if target.communicator_bytes and options.sp == "auto":
        sps = few_degrees(sps, world)
    measured = Calibration.of(options.calibration)
    if measured is not None:
        target = calibrated(target, measured.fits)
    request = request_of(model, options, sps, target)
    kind = (device_of(model) or torch.device("cpu")).type
    autocast = checked_dtype(options.autocast or autocast_dtype(kind))
    by_bucket = trace_all(model, buckets, target, autocast, options, ranges, made=traces)
    if measured is not None:
        used = {id(v): v.traced for v in by_bucket.values()}
        wanted = calibration_key([*used.values()], target, device_of(model), world)
        measured.check(wanted, anywhere=options.device != "auto")
    if world > 1:
        every = [v.traced.sharding for v in by_bucket.values()]
        warn_replicated({n: reason for s in every for n, reason in s.replicated.items()})
        warn_derived({op: rule for s in every for op, rule in s.derived.items()})
    misfits: dict[Bucket, PlanError] = {}
    with casting(kind, None):  # what is traced now has its casts already
        plans, tables = plan_buckets(
            {b: v.priced for b, v in by_bucket.items()}, request, misfits if partly else None
        )
    for runnable in by_bucket.values():
        runnable.priced.placements.settle()
    return Planned(by_bucket, plans, tables, request, autocast, misfits, options.loss)


def calibration_key(
    traces: Sequence[Traced], device: Device, at: torch.device | None, world: int
) -> CalibrationKey:
    """Returns what a calibration must be of that these traces are planned with.

    Args:
        traces: of the model, in the order of the buckets.
        device: that is planned for.
        at: where the model is.
        world: number of ranks.
    """
    first = traces[0]
    return CalibrationKey(
        device=device.name,
        machine=machine(at or torch.device("cpu")),
        world=world,
        dtype=str(compute_dtype(first.program)),
        backend=first.backend,
        torch=torch.__version__,
        graphs=tuple(v.program.graph_hash for v in traces),
    )


def trace_all(
    model: nn.Module,
    buckets: Buckets,
    device: Device,
    autocast: torch.dtype | None,
    options: PlanOptions,
    ranges: Buckets | None,
    programs: Sequence[Program] = (),
    made: list[Traced] | None = None,
) -> dict[Bucket, Runnable]:
    """Returns what is made from the trace of each bucket, in the buckets' order.

    Args:
        model: the user's.
        buckets: of all traces.
        device: that is planned for.
        autocast: that the model is traced under.
        options: as for `plan`, with the mode of parameters that was chosen.
        ranges: as for `plan_with`.
        programs: the traces, where they were made before.
        made: what was made of the traces before, for another block of ranks; gets what is made now.
    """
    found: dict[Bucket, Runnable] = {}
    libraries: dict[str, Library] = {}
    derive = options.world > 1 and options.derive_rules
    mode = options.parameters if options.world > 1 else "whole"
    every: list[Traced] = [] if made is None else made
    groups = [*buckets.by_ones().values()]
    left = [] if every else groups
    for i, mine in enumerate(tracked(left, "trace", lambda b: f"{len(b)} buckets")):
        one = traced(
            model, ranges or mine, device, options.backend, autocast=autocast, derive_rules=derive,
            attention=options.attention, libraries=libraries, loss=options.loss,
            program=programs[i] if programs else None,
        )  # fmt: skip
        every.append(replace(
            one, reference=max(mine, key=elements).sizes, hands_over=mode in ("pull", "rounds")
        ))  # fmt: skip
    if mode == "rounds":
        assert not isinstance(options.block, str), "it is chosen"
        every = gathering(every, options.block or options.world)
    for mine, one in zip(groups, every, strict=True):
        found |= dict.fromkeys(mine, Runnable(one))
    return {bucket: found[bucket] for bucket in buckets}
