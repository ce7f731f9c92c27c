"""`compile`: the phases in order; `plan`: as far as they go without running anything."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from dcpc.buckets import Bucket, Buckets
from dcpc.codegen import Library
from dcpc.codegen.backends import decompositions
from dcpc.compiled import CompiledModel
from dcpc.errors import PlanError, VerifyError
from dcpc.following import Held, state_tensors
from dcpc.masks import without_masks
from dcpc.passes.lowerings import restricted
from dcpc.passes.rules import warn_derived, warn_replicated
from dcpc.passes.sharding import analyse
from dcpc.placements import compute_dtype
from dcpc.planning import Planned, Request, check_forced, plan_buckets, plans_text
from dcpc.progress import tracked
from dcpc.runtime.agreement import agree
from dcpc.runtime.groups import Groups
from dcpc.runtime.same_state import share_state
from dcpc.runtime.zero import fullest_share
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
from dcpc.trace import autocast_dtype, casting, checked_dtype, trace
from dcpc.variants import Variants
from dcpc.verify import Verifier, check_mode

# Adam's two moments, in the parameters' dtype: what a plan counts where it is given no optimizer.
ADAM_STATES = 2


def compile(
    model: nn.Module,
    buckets: Buckets,
    *,
    group: dist.ProcessGroup | None = None,
    memory: int | float | None = None,
    device: str | Device = "auto",
    sp: int | str | Sequence[int] = "auto",
    recompute: str = "auto",
    backend: str = "inductor",
    optimizer: OptimizerLike | None = None,
    optimizer_bytes: int | None = None,
    autocast: torch.dtype | None = None,
    derive_rules: bool = True,
    zero: bool = False,
    calibration: str | Path | Calibration | None = None,
    attention: str = "auto",
    verify: str = "auto",
) -> CompiledModel:
    """Returns the model compiled for shape buckets: one trace, a plan and a variant per bucket.

    Example:
        buckets = dcpc.Buckets(
            inputs={"input_ids": "int64[batch, seq]", "labels": "int64[batch, seq]"},
            sizes=[{"seq": 512}, {"seq": 2048}, {"seq": 8192}],
        )
        compiled = dcpc.compile(model, buckets)
        loss = compiled(input_ids=ids, labels=labels)
        loss.backward()
        compiled.reduce_gradients()

    Args:
        model: any module whose forward takes the buckets' inputs and returns a scalar loss, or a
            mapping, dataclass or tuple that has one. Its parameters are shared, not copied.
        buckets: input specs and the shapes to compile for.
        group: ranks to use; default: the initialised process group, or one rank alone.
        memory: bytes a rank may use, or a share of what the device has, up to 1.0; default: all
            that the device has.
        device: what costs are predicted for: "auto", a name of `dcpc.symbolic_profile.DEVICES`, or
            a `Device`.
        sp: "auto" (every divisor of the number of ranks), a degree of sequence parallelism for
            every bucket, or the degrees to price: `DataLoader(mode="auto")` uses any of them, also
            those that do not divide the ranks.
        recompute: "auto" (as little as fits; "pyramid" is the same), "none" or "all".
        backend: "inductor" or "eager".
        optimizer: what will train the model, whose state takes memory: a class of torch.optim, a
            partial of one (`functools.partial(torch.optim.SGD, momentum=0.9)`), an optimizer, or a
            class of your own; default: two tensors for each trainable parameter, as Adam has.
        optimizer_bytes: what the optimizer keeps on a rank, where that is known better.
        autocast: mixed precision, `torch.bfloat16`: the model runs as under `torch.autocast` of it,
            parameters and gradients stay as they are. None: what is active around this call.
        derive_rules: whether an op without a sharding rule is run on small random pieces to find
            one, which is then used with a warning that prints it; else each rank does all of it.
        zero: the optimizer is `dcpc.zero`'s: a rank keeps only its share of the state.
        calibration: what `dcpc calibrate` measured of this model on this device and these ranks, or
            its file: seconds are predicted by it.
        attention: how attention is split: "auto" (each as costs least), or "heads", "gathered",
            "ring", "hybrid" wherever an attention can have it (`passes/lowerings.py`).
        verify: what is compared with the model itself, loss and every gradient, on inputs drawn at
            small sizes: "auto" (traces and variants, within a tenth of what compiling takes or 2
            s), "full" (every row of every bucket's table, at each bucket's size too) or "off".

    Where ranks have other parameters, buffers or constants than rank 0, they get rank 0's, with a
    warning.

    Raises:
        TraceError: the model cannot be captured.
        PlanError: a bucket fits with no setting, or a forced value is impossible.
        ProfileError: the calibration is of another model, device, number of ranks or dtype.
        GroupError: ranks of the group made different plans.
        VerifyError: a trace or a variant does not compute what the model computes.
    """
    _refuse_meta(model)
    check_mode(verify)
    start_s = time.perf_counter()
    groups = Groups.default(group=group, device=_device_of(model))
    planned = plan(
        model,
        buckets,
        world=groups.world,
        memory=memory,
        device=device,
        sp=sp,
        recompute=recompute,
        backend=backend,
        optimizer=optimizer,
        optimizer_bytes=optimizer_bytes,
        autocast=autocast,
        derive_rules=derive_rules,
        zero=zero,
        calibration=calibration,
        attention=attention,
    )
    hashes = " ".join(v.program.graph_hash for v in planned.traces)
    agree(groups, groups.world, "plan", f"{hashes} {plans_text(planned.plans)}")
    share_state(state_tensors(model, planned), groups)
    verifier = Verifier(model, buckets, planned, verify)
    problem = _problem(verifier, time.perf_counter() - start_s)
    agree(groups, groups.world, "verification", str(problem or ""))
    if problem is not None:
        raise problem
    seed = _shared_seed(groups)
    return CompiledModel(model, buckets, planned, groups, base_seed=seed, verifier=verifier)


def plan(
    model: nn.Module,
    buckets: Buckets,
    *,
    world: int = 1,
    memory: int | float | None = None,
    device: str | Device = "auto",
    sp: int | str | Sequence[int] = "auto",
    recompute: str = "auto",
    backend: str = "inductor",
    optimizer: OptimizerLike | None = None,
    optimizer_bytes: int | None = None,
    autocast: torch.dtype | None = None,
    derive_rules: bool = True,
    zero: bool = False,
    calibration: str | Path | Calibration | None = None,
    attention: str = "auto",
) -> Planned:
    """Returns the plan of every bucket for `world` ranks, from one process and no process group.

    Args:
        model: as for `compile`; its parameters' values are not read, so they may be on the meta
            device (`with torch.device("meta"): model = ...`), where they take no memory.
        buckets: as for `compile`.
        world: number of ranks to plan for.
        memory: bytes a rank may use; default: what the device has, shared by all ranks if it is the
            CPU.
        device: as for `compile`, and so are the others.
        sp: "auto", a degree, or degrees.
        recompute: "auto" ("pyramid" is the same), "none" or "all".
        backend: "inductor" or "eager".
        optimizer: as for `compile`.
        optimizer_bytes: what the optimizer keeps on a rank.
        autocast: dtype of mixed precision; None: what is active around this call.
        derive_rules: as for `compile`.
        zero: the optimizer's state is spread over the ranks.
        calibration: as for `compile`; with `device="auto"` it must be of this very machine, with a
            named device of any that has it.
        attention: as for `compile`.

    Raises:
        TraceError: the model cannot be captured.
        PlanError: a bucket fits with no setting, or a forced value is impossible.
        ProfileError: the calibration is of another model, device, number of ranks or dtype.
    """
    decompositions(backend)  # refuses an unknown backend before minutes of work
    degrees = check_forced(sp, recompute, world)
    recompute = "auto" if recompute == "pyramid" else recompute
    target = _target(device)
    measured = Calibration.of(calibration)
    if measured is not None:
        target = calibrated(target, measured.fits)
    memory_bytes = rank_memory_bytes(memory, target, world)
    residents = _residents(model, optimizer, optimizer_bytes, world if zero else 1)
    resident = sum(rounded(size_bytes, target.block_bytes) for size_bytes in residents)
    stepped = model.parameters() if optimizer_bytes is None else ()
    step = step_bytes(optimizer or torch.optim.Adam, stepped, target.gpu)
    request = Request(degrees, recompute, memory_bytes, resident, world, tuple(residents), step)
    kind = (_device_of(model) or torch.device("cpu")).type
    kind = "cpu" if kind == "meta" else kind  # what a trace takes meta tensors for
    autocast = checked_dtype(autocast or autocast_dtype(kind))
    by_bucket = _trace_all(
        model, buckets, target, backend, autocast, world > 1 and derive_rules, attention
    )
    if measured is not None:
        traces = tuple({id(v): v for v in by_bucket.values()}.values())
        wanted = calibration_key(traces, target, _device_of(model), world)
        measured.check(wanted, anywhere=device != "auto")
    if world > 1:
        replicated = {n: r for v in by_bucket.values() for n, r in v.sharding.replicated.items()}
        warn_replicated(replicated)
        warn_derived({op: v for b in by_bucket.values() for op, v in b.sharding.derived.items()})
    with casting(kind, None):  # what is traced now has its casts already
        plans, tables = plan_buckets(by_bucket, request)
    for variants in by_bucket.values():
        variants.placements.settle()
    return Planned(by_bucket, plans, tables, request, autocast)


def calibration_key(
    traces: Sequence[Variants], device: Device, at: torch.device | None, world: int
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
    backend: str,
    autocast: torch.dtype | None,
    derive_rules: bool,
    attention: str,
) -> dict[Bucket, Variants]:
    """Returns what is made from the trace of each bucket, in the buckets' order."""
    found: dict[Bucket, Variants] = {}
    libraries: dict[str, Library] = {}
    for mine in tracked([*buckets.by_ones().values()], "trace", lambda b: f"{len(b)} buckets"):
        program = without_masks(trace(model, mine, autocast))
        sharding = restricted(program, analyse(program, derive_rules), attention)
        held = Held(program, model)
        longest = max(mine, key=lambda bucket: math.prod(n for _, n in bucket.shape_key))
        variants = Variants(
            program, sharding, device, backend, held, longest.sizes, libraries=libraries
        )
        found |= dict.fromkeys(mine, variants)
    return {bucket: found[bucket] for bucket in buckets}


def _problem(verifier: Verifier, compile_s: float) -> VerifyError | None:
    """Returns what verification found; not raised, as ranks have to tell each other first."""
    try:
        verifier.start(compile_s)
    except VerifyError as error:
        return error
    return None


def _shared_seed(groups: Groups) -> int:
    """Returns rank 0's `torch.initial_seed()`: what `torch.manual_seed` fixed before compiling."""
    seed = torch.tensor([torch.initial_seed() & ((1 << 62) - 1)])
    pg = groups.control(groups.world)
    if pg is not None:
        dist.broadcast(seed, group=pg, group_src=0)
    return int(seed)


def _device_of(model: nn.Module) -> torch.device | None:
    parameter = next(iter(model.parameters()), None)
    return None if parameter is None else parameter.device


def _refuse_meta(model: nn.Module) -> None:
    tensors = (*model.named_parameters(), *model.named_buffers())
    found = [name for name, tensor in tensors if tensor.is_meta]
    if found:
        raise PlanError(
            f"got {len(found)} parameters and buffers on the meta device ({', '.join(found[:3])}); "
            "expected a model that can run; give them memory first (to_empty, then initialise), or "
            "only plan for it: dcpc.api.plan and `dcpc report` take it as it is"
        )


def _target(device: str | Device) -> Device:
    if isinstance(device, Device):
        return device
    return detect() if device == "auto" else find(device)


def _residents(
    model: nn.Module, optimizer: OptimizerLike | None, optimizer_bytes: int | None, shares: int
) -> list[int]:
    """Bytes of each parameter, buffer, gradient and tensor of the optimizer's state."""
    parameters = list(model.parameters())
    trained = [p.nbytes for p in parameters if p.requires_grad]
    found = [*(p.nbytes for p in parameters), *(b.nbytes for b in model.buffers()), *trained]
    if optimizer is not None and optimizer_bytes is not None:
        raise PlanError(
            "got optimizer= and optimizer_bytes=; expected one of them: what the optimizer's state "
            "takes follows from the first, and the second says it; leave one out"
        )
    if optimizer_bytes is not None:
        return [*found, optimizer_bytes]
    states = {id(p): ADAM_STATES * p.nbytes for p in parameters if p.requires_grad}
    if optimizer is not None:
        states = state_bytes(optimizer, parameters)
    if shares > 1:
        return [*found, fullest_share(parameters, shares, states)]
    for p in parameters:  # what is as large as the parameter, and the rest
        count, rest = divmod(states.get(id(p), 0), max(p.nbytes, 1))
        found += [p.nbytes] * count + [rest]
    return found


def rank_memory_bytes(memory: int | float | None, device: Device, world: int) -> int:
    """Returns the bytes that a rank may use.

    Args:
        memory: bytes, or a share of what the device has, up to 1.0; None: all of it.
        device: what is planned for.
        world: ranks; they share the memory of a CPU.

    Raises:
        PlanError: `memory` is not a positive number.
    """
    check_memory(memory)
    have_bytes = device.memory_bytes // (world if device.name == "cpu" else 1)
    if memory is None:
        return have_bytes
    if isinstance(memory, float) and memory <= 1.0:
        return int(memory * have_bytes)
    return int(memory)


def check_memory(memory: int | float | None) -> None:
    """Refuses what is no memory that a rank may use.

    Raises:
        PlanError: it is not a positive number.
    """
    if memory is None:
        return
    number = isinstance(memory, int | float) and not isinstance(memory, bool)
    if not number or not 0 < memory < math.inf:
        raise PlanError(
            f"got memory={memory!r}; expected a positive number of bytes a rank may use; pass e.g. "
            "80e9, or leave it out for all that the device has"
        )
