"""`compile`: the phases in order; `plan`: as far as they go without running anything."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn

from dcpc.buckets import Bucket, Buckets
from dcpc.codegen import Library
from dcpc.compiled import CompiledModel
from dcpc.compiled.materialize import Init, on_meta
from dcpc.compiled.pipeline import (
    CutModel,
    PipelinedModel,
    choose_stages,
    cut_model,
    refuse_beside_stages,
    stages_problem,
)
from dcpc.errors import DcpcError, DispatchError, GroupError, PlanError, TraceError
from dcpc.ir import Program
from dcpc.passes.sharding.rules import warn_derived, warn_replicated
from dcpc.plan.choose import elements
from dcpc.plan.folding import gathering
from dcpc.plan.following import state_tensors
from dcpc.plan.options import (
    CompileOptions,
    PlanOptions,
    block_of,
    degrees,
    memory_of,
    taking,
)
from dcpc.plan.placements import compute_dtype
from dcpc.plan.planning import Planned, PlanRequest, plan_buckets, plans_text
from dcpc.plan.progress import tracked
from dcpc.plan.runnable import Runnable
from dcpc.plan.traced import Traced, traced
from dcpc.runtime.groups.agreement import agree
from dcpc.runtime.groups.groups import Groups
from dcpc.runtime.groups.same_state import share_state
from dcpc.runtime.parameters.modes import shares
from dcpc.runtime.parameters.reduction import COMM_BUCKET_BYTES
from dcpc.runtime.planner.speeds import LearnedSpeeds, checked_speeds
from dcpc.symbolic_profile import (
    Calibration,
    CalibrationKey,
    Device,
    OptimizerLike,
    calibrated,
    detect,
    find,
    machine,
    rounded,
    state_bytes,
    step_bytes,
)
from dcpc.trace import autocast_dtype, casting, checked_dtype
from dcpc.trace.loss import Loss
from dcpc.verify import Verifier

# Adam's two moments, in the parameters' dtype: what a plan counts where it is given no optimizer.
ADAM_STATES = 2


def _tell_others(error: DcpcError, given: Mapping[str, object]) -> None:
    """Has all ranks raise what is wrong with the arguments of one: the others wait for its plan."""
    model, group = given.get("model"), given.get("group")
    if isinstance(error, GroupError):  # whom to tell is what is wrong
        return
    groups = Groups.default(
        group=group if isinstance(group, dist.ProcessGroup) else None,
        device=_device_of(model) if isinstance(model, nn.Module) else None,
    )
    agree(groups, groups.world, "plan", "", error)


@taking(CompileOptions, refused=_tell_others)
def compile(model: nn.Module, buckets: Buckets, options: CompileOptions) -> CompiledModel:
    """Returns the model compiled for shape buckets: one trace, a plan and a variant per bucket.

    Example:
        buckets = dcpc.Buckets(
            inputs={"input_ids": "int64[batch, seq]", "labels": "int64[batch, seq]"},
            sizes=[{"seq": 512}, {"seq": 2048}, {"seq": 8192}],
        )
        compiled = dcpc.compile(model, buckets, memory=80e9)
        loss = compiled(input_ids=ids, labels=labels)
        loss.backward()
        compiled.reduce_gradients()

    Args:
        model: any module whose forward takes the buckets' inputs and returns what `loss=` takes;
            without `loss=` a floating scalar, the loss; or a mapping or dataclass that has it as
            `loss`; or a tuple or list, whose first floating scalar is taken (with a warning if
            there are several). Its parameters are shared, not copied. A model on the meta device
            gets memory by `dcpc.materialize`.
        buckets: input specs and the shapes to compile for.
        options: each field of `CompileOptions` by its name, such as `memory=80e9`.

    Where ranks have other parameters, buffers or constants than rank 0, they get rank 0's, with a
    warning.

    Raises:
        TraceError: the model cannot be captured.
        PlanError: a bucket fits with no setting, or a forced value is impossible.
        ProfileError: the calibration is of another model, device, number of ranks or dtype.
        GroupError: ranks of the group made different plans.
        VerifyError: a trace or a variant does not compute what the model computes.
    """
    start_s = time.perf_counter()
    groups = Groups.default(
        group=options.group, device=_device_of(model), silence_s=options.timeout
    )
    with groups.watch.section("dcpc.compile"):
        return _compiled(model, buckets, options, groups, start_s)


def _compiled(
    model: nn.Module, buckets: Buckets, options: CompileOptions, groups: Groups, start_s: float
) -> CompiledModel:
    """Returns what `compile` does, on these ranks."""
    told = options.planned_for(groups.world)
    cut, why = None, ""
    try:
        speeds = checked_speeds(options.speeds, groups.world)
        if options.pipeline is None:
            planned = plan_with(model, buckets, told)
        else:
            planned, cut, why = _staged(model, buckets, options, told)
    except DcpcError as error:  # on all ranks, as they wait for this one's plan
        agree(groups, groups.world, "plan", "", error)
        raise
    hashes = " ".join(v.traced.program.graph_hash for v in planned.traces)
    asked = planned.request
    held = f"; parameters {asked.parameters}, block {asked.block}" if asked.block else ""
    paced = "" if options.speeds == "equal" else f"; speeds {options.speeds}"
    staged = "" if cut is None else f"; {cut.text()}"
    text = f"{hashes} {plans_text(planned.plans)}{held}{paced}{staged}"
    agree(groups, groups.world, "plan", text)
    share_state(state_tensors(model, planned), groups)
    verifier = Verifier(model, buckets, planned, options.verify)
    compile_s = time.perf_counter() - start_s
    if on_meta(model):
        verifier.postponed_s = compile_s
    else:
        problem = verifier.problem(compile_s)
        if problem is None and cut is not None:
            problem = stages_problem(cut, model, verifier)
        agree(groups, groups.world, "verification", str(problem or ""))
        if problem is not None:
            raise problem
    seed = _shared_seed(groups)

    def prepare(
        mine: Buckets, programs: Sequence[Program], loss: Loss | None
    ) -> Mapping[Bucket, Runnable]:
        same = replace(told, parameters=asked.parameters, block=asked.block or None, loss=loss)
        return _trace_all(model, mine, planned.device, planned.autocast, same, None, programs)

    kind = CompiledModel if cut is None else PipelinedModel
    compiled = kind(
        model, buckets, planned, groups, base_seed=seed, verifier=verifier, prepare=prepare,
        learned=LearnedSpeeds(speeds, learns=options.speeds == "auto" and groups.world > 1),
        unpad=options.unpad,
    )  # fmt: skip
    if cut is not None:
        assert isinstance(compiled, PipelinedModel), "the kind that has stages"
        compiled.in_stages(cut)
    compiled.staging = why
    return compiled


def _staged(
    model: nn.Module, buckets: Buckets, options: CompileOptions, told: PlanOptions
) -> tuple[Planned, CutModel | None, str]:
    """Returns the plan that runs, the stages it is cut into, and why these; without: no pipeline.

    Args:
        model: the user's.
        buckets: it is compiled for.
        options: with `pipeline`.
        told: of a plan without a pipeline.
    """
    stages, world = options.pipeline, told.world
    assert stages is not None, "asked for"
    refuse_beside_stages(options, stages, world)
    if on_meta(model):
        raise PlanError(
            f"pipeline={stages!r}: got a model on the meta device; expected one with memory; make "
            "it on the CPU, or compile it without pipeline="
        )
    single = plan_with(model, buckets, _of_one_rank(told), partly=True)
    if isinstance(stages, int):
        return single, cut_model(model, buckets, single, stages, world // stages), ""
    whole: Planned | PlanError
    try:
        whole = plan_with(model, buckets, told)
    except PlanError as error:
        whole = error
    chosen = choose_stages(model, buckets, whole, single, world)
    if chosen.cut is not None:
        return single, chosen.cut, chosen.why
    assert isinstance(whole, Planned), "it was priced"
    return whole, None, chosen.why


def cut_with(model: nn.Module, buckets: Buckets, options: PlanOptions, stages: int) -> CutModel:
    """Returns the stages that `compile(pipeline=)` would cut a model into, and their planner.

    Args:
        model: as for `plan`.
        buckets: as for `plan`.
        options: those of `plan`; its ranks are all those of all pipelines.
        stages: of a pipeline.

    Raises:
        DcpcError: as from `compile`.
    """
    refuse_beside_stages(options, stages, options.world)
    single = plan_with(model, buckets, _of_one_rank(options), partly=True)
    return cut_model(model, buckets, single, stages, options.world // stages)


def _of_one_rank(options: PlanOptions) -> PlanOptions:
    """Returns what a model is planned with before it is cut into stages: one of its ranks alone."""
    memory = rank_memory_bytes(options.memory, _target(options.device), options.world)
    return replace(options, world=1, memory=memory, sp=1, parameters="whole")


def materialize(compiled: CompiledModel, init: Init = None) -> None:
    """Gives a model that was compiled on the meta device memory and values, module by module.

    Collective over all ranks. No rank ever holds the whole model, where `parameters=` shares it
    out: a rank holds what it keeps and the tensors of the one module that is being initialised.

    Example:
        with torch.device("meta"):
            model = GPT(config)
        compiled = dcpc.compile(model, buckets, parameters="pull")
        dcpc.materialize(compiled)
        optimizer = torch.optim.AdamW(compiled.parameters())

    Modules come in the order of `nn.Module.apply`, children first, each once; only those with
    parameters or buffers of their own on the meta device. Random numbers are rank 0's on all ranks:
    after `torch.manual_seed` values are bit for bit those of the plain model made on the CPU, if
    its modules are initialised in that order. A tied parameter then has what its first module gives
    it; with a function as `init` what its last one does, as with `nn.Module.apply`.
    The parameters of the model are other objects afterwards, as after `nn.Module.to_empty`.

    Args:
        compiled: whose model was on the meta device at compile.
        init: None: each module's own `reset_parameters()`. A function: `init(module)`, with the
            module's own parameters and buffers on the CPU, whole, as `model.apply(init)` would call
            it. "empty": memory alone, NaN until a checkpoint is loaded.

    Raises:
        DispatchError: the model has its memory already; a module has no `reset_parameters` and
            there is no `init`; something was left without values, or tensors of another module
            were written to; parameters share memory or have hooks.
        GroupError: ranks initialised to different values, or one did not arrive.
        VerifyError: a trace or a variant does not compute what the model computes.
    """
    if not isinstance(compiled, CompiledModel):
        raise DispatchError(
            f"dcpc.materialize: got {type(compiled).__name__}; expected what dcpc.compile "
            "returned; compile the model while it is on the meta device, then materialize that"
        )
    compiled.materialize(init)


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
    gpu = _target(options.device).gpu
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
        own, target = replace(options, block=block), _target(options.device)
        request = _request(model, own, degrees("auto", options.world), target)
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
    sps = degrees(options.sp, world)
    target = _target(options.device)
    measured = Calibration.of(options.calibration)
    if measured is not None:
        target = calibrated(target, measured.fits)
    request = _request(model, options, sps, target)
    kind = (_device_of(model) or torch.device("cpu")).type
    autocast = checked_dtype(options.autocast or autocast_dtype(kind))
    by_bucket = _trace_all(model, buckets, target, autocast, options, ranges, made=traces)
    if measured is not None:
        used = {id(v): v.traced for v in by_bucket.values()}
        wanted = calibration_key([*used.values()], target, _device_of(model), world)
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


def _request(
    model: nn.Module, options: PlanOptions, sps: tuple[int, ...], target: Device
) -> PlanRequest:
    """Returns what the planner is asked for: the options, with the model's bytes."""
    world, optimizer = options.world, options.optimizer
    mode = options.parameters if world > 1 else "whole"
    owners = world  # of a parameter's rows
    if mode == "rounds" or options.block is not None:
        assert not isinstance(options.block, str), "it is chosen"
        owners, sps = block_of(options.block, sps, world)
    if mode == "pull" and target.gpu:
        raise PlanError(
            f"got parameters='pull' for {target.name}; expected a CPU, whose ranks map the same "
            "memory; take 'step'"
        )
    whole = list(model.parameters())
    own = whole if mode == "whole" else shares(whole, owners)
    residents = _residents(model, own, options, mode)
    rows_bytes = sum(p.nbytes for p in own if p.requires_grad)
    stepped = own if options.optimizer_bytes is None else ()
    return PlanRequest(
        sps=sps,
        recompute_mode=options.recompute_mode,
        memory_bytes=rank_memory_bytes(options.memory, target, world),
        resident_bytes=sum(rounded(size_bytes, target.block_bytes) for size_bytes in residents),
        world=world,
        residents=tuple(residents),
        step_bytes=max(
            step_bytes(optimizer or torch.optim.Adam, stepped, target.gpu),
            # A comm bucket on its way to the other blocks lies beside the gradients.
            min(rows_bytes, COMM_BUCKET_BYTES) if owners < world else 0,
        ),
        parameters=mode,
        block=owners if mode == "rounds" else 0,
        gradient_bytes=rows_bytes,
    )


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


def _trace_all(
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


def _shared_seed(groups: Groups) -> int:
    """Returns rank 0's `torch.initial_seed()`: what `torch.manual_seed` fixed before compiling."""
    seed = torch.tensor([torch.initial_seed() & ((1 << 62) - 1)])
    pg = groups.control(groups.world)
    if pg is not None:
        dist.broadcast(seed, group=pg, group_src=0)
    return int(seed)


def _device_of(model: nn.Module) -> torch.device | None:
    """Returns where the model is; one on the meta device gets its memory on the CPU."""
    parameter = next(iter(model.parameters()), None)
    if parameter is None:
        return None
    return torch.device("cpu") if parameter.is_meta else parameter.device


def _target(device: str | Device) -> Device:
    if isinstance(device, Device):
        return device
    return detect() if device == "auto" else find(device)


def _residents(
    model: nn.Module, own: Sequence[nn.Parameter], options: PlanOptions, mode: str
) -> list[int]:
    """Bytes of each parameter, buffer, gradient and tensor of the optimizer's state.

    Args:
        model: the user's.
        own: for each parameter what this rank updates of it.
        options: as for `plan`.
        mode: who holds them.
    """
    whole = list(model.parameters())
    held = own if mode in ("pull", "rounds") else whole
    found = [*(p.nbytes for p in held), *(b.nbytes for b in model.buffers())]
    # "pull": a rank's part of the sum of all ranks, and then its own rows of it.
    found += [p.nbytes for p in held if p.requires_grad] * (2 if mode == "pull" else 1)
    if mode == "step":  # one comm bucket on its way: what is sent, and what arrives
        trained_bytes = sum(p.nbytes for p in whole if p.requires_grad)
        found += [min(trained_bytes, COMM_BUCKET_BYTES)] * 2
    if options.optimizer_bytes is not None:
        return [*found, options.optimizer_bytes]
    adam = {id(p): ADAM_STATES * p.nbytes for p in own if p.requires_grad}
    chosen = options.optimizer
    states = adam if chosen is None else _state_bytes(chosen, whole, own)
    for p in own:  # what is as large as the parameter, and the rest
        count, rest = divmod(states.get(id(p), 0), max(p.nbytes, 1))
        found += [p.nbytes] * count + [rest]
    return found


def _state_bytes(
    optimizer: OptimizerLike, whole: Sequence[nn.Parameter], own: Sequence[nn.Parameter]
) -> dict[int, int]:
    """Returns `id(parameter)` -> bytes of its state.

    Args:
        optimizer: what trains the model.
        whole: the model's parameters.
        own: for each what this rank updates of it.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        return state_bytes(optimizer, own)
    # It knows its parameters; of what it keeps a rank has as much as of them.
    states = state_bytes(optimizer, whole)
    pairs = zip(whole, own, strict=True)
    return {id(q): -(-states.get(id(p), 0) * q.nbytes // max(p.nbytes, 1)) for p, q in pairs}


def rank_memory_bytes(memory: int | float | str | None, device: Device, world: int) -> int:
    """Returns the bytes that a rank may use.

    Args:
        memory: bytes, also as a text such as "80GB"; or a share of what the device has, up to 1.0;
            None: all of it.
        device: what is planned for.
        world: ranks; they share the memory of a CPU.

    Raises:
        PlanError: `memory` is not a positive number.
    """
    memory = memory_of(memory)
    have_bytes = device.memory_bytes // (world if device.name == "cpu" else 1)
    if memory is None:
        return have_bytes
    if isinstance(memory, float) and memory <= 1.0:
        return int(memory * have_bytes)
    return int(memory)
