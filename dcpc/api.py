"""`compile`: the phases in order; `plan`: as far as they go without running anything."""

from __future__ import annotations

import contextlib
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
from dcpc.errors import DcpcError, DispatchError, GroupError, PlanError, TraceError
from dcpc.ir import Program
from dcpc.passes.sharding.rules import warn_derived, warn_replicated
from dcpc.plan.choose import elements
from dcpc.plan.folding import gathering
from dcpc.plan.following import state_tensors
from dcpc.plan.options import CompileOptions, PlanOptions, degrees, memory_of, taking
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
    try:
        speeds = checked_speeds(options.speeds, groups.world)
        planned = plan_with(model, buckets, told)
    except DcpcError as error:  # on all ranks, as they wait for this one's plan
        agree(groups, groups.world, "plan", "", error)
        raise
    hashes = " ".join(v.traced.program.graph_hash for v in planned.traces)
    paced = "" if options.speeds == "equal" else f"; speeds {options.speeds}"
    agree(groups, groups.world, "plan", f"{hashes} {plans_text(planned.plans)}{paced}")
    share_state(state_tensors(model, planned), groups)
    verifier = Verifier(model, buckets, planned, options.verify)
    compile_s = time.perf_counter() - start_s
    if on_meta(model):
        verifier.postponed_s = compile_s
    else:
        problem = verifier.problem(compile_s)
        agree(groups, groups.world, "verification", str(problem or ""))
        if problem is not None:
            raise problem
    seed = _shared_seed(groups)

    def prepare(
        mine: Buckets, programs: Sequence[Program], loss: Loss | None
    ) -> Mapping[Bucket, Runnable]:
        same = replace(told, parameters=planned.request.parameters, loss=loss)
        return _trace_all(model, mine, planned.device, planned.autocast, same, None, programs)

    return CompiledModel(
        model, buckets, planned, groups, base_seed=seed, verifier=verifier, prepare=prepare,
        learned=LearnedSpeeds(speeds, learns=options.speeds == "auto" and groups.world > 1),
        unpad=options.unpad,
    )  # fmt: skip


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
    *first, last = ("whole", "step", "rounds" if gpu else "pull")
    for mode in first if options.world > 1 else ():
        with contextlib.suppress(PlanError):
            return _plan_with(model, buckets, replace(options, parameters=mode), ranges, False)
    return _plan_with(model, buckets, replace(options, parameters=last), ranges, partly)


def _plan_with(
    model: nn.Module, buckets: Buckets, options: PlanOptions, ranges: Buckets | None, partly: bool
) -> Planned:
    world = options.world
    sps = degrees(options.sp, world)
    target = _target(options.device)
    measured = Calibration.of(options.calibration)
    if measured is not None:
        target = calibrated(target, measured.fits)
    request = _request(model, options, sps, target)
    kind = (_device_of(model) or torch.device("cpu")).type
    autocast = checked_dtype(options.autocast or autocast_dtype(kind))
    by_bucket = _trace_all(model, buckets, target, autocast, options, ranges)
    if measured is not None:
        traces = {id(v): v.traced for v in by_bucket.values()}
        wanted = calibration_key([*traces.values()], target, _device_of(model), world)
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
    if mode == "pull" and target.gpu:
        raise PlanError(
            f"got parameters='pull' for {target.name}; expected a CPU, whose ranks map the same "
            "memory; take 'step'"
        )
    own = list(model.parameters()) if mode == "whole" else shares(model.parameters(), world)
    residents = _residents(model, options, mode)
    stepped = own if options.optimizer_bytes is None else ()
    return PlanRequest(
        sps=sps,
        recompute_mode=options.recompute_mode,
        memory_bytes=rank_memory_bytes(options.memory, target, world),
        resident_bytes=sum(rounded(size_bytes, target.block_bytes) for size_bytes in residents),
        world=world,
        residents=tuple(residents),
        step_bytes=step_bytes(optimizer or torch.optim.Adam, stepped, target.gpu),
        parameters=mode,
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
    """
    found: dict[Bucket, Runnable] = {}
    libraries: dict[str, Library] = {}
    derive = options.world > 1 and options.derive_rules
    mode = options.parameters if options.world > 1 else "whole"
    every: list[Traced] = []
    groups = [*buckets.by_ones().values()]
    for i, mine in enumerate(tracked(groups, "trace", lambda b: f"{len(b)} buckets")):
        made = traced(
            model, ranges or mine, device, options.backend, autocast=autocast, derive_rules=derive,
            attention=options.attention, libraries=libraries, loss=options.loss,
            program=programs[i] if programs else None,
        )  # fmt: skip
        every.append(replace(
            made, reference=max(mine, key=elements).sizes, hands_over=mode in ("pull", "rounds")
        ))  # fmt: skip
    if mode == "rounds":
        every = gathering(every, options.world)
    for mine, made in zip(groups, every, strict=True):
        found |= dict.fromkeys(mine, Runnable(made))
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


def _residents(model: nn.Module, options: PlanOptions, mode: str) -> list[int]:
    """Bytes of each parameter, buffer, gradient and tensor of the optimizer's state."""
    whole = list(model.parameters())
    own = whole if mode == "whole" else shares(whole, options.world)
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
