"""`compile`: the phases in order, on all ranks."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn

from dcpc.api.plan_model import of_one_rank, plan_with, whole_plan
from dcpc.api.requests import device_of
from dcpc.api.search import Traces, search
from dcpc.buckets import Bucket, Buckets
from dcpc.compiled import CompiledModel
from dcpc.compiled.materialize import Init, on_meta
from dcpc.compiled.model import ModelCore, ModelInsight, ModelOnGroup
from dcpc.compiled.pipeline import (
    CutModel,
    PipelinedModel,
    choose_stages,
    cut_model,
    refuse_beside_stages,
    stage_degree,
    stages_problem,
)
from dcpc.errors import DcpcError, DispatchError, GroupError, PlanError, checking_call, explaining
from dcpc.ir import Program
from dcpc.plan.following import state_tensors
from dcpc.plan.options import CompileOptions, PlanOptions, taking
from dcpc.plan.planning import Planned, plans_text
from dcpc.plan.runnable import Runnable
from dcpc.runtime.groups.agreement import agree
from dcpc.runtime.groups.groups import Groups
from dcpc.runtime.groups.same_state import share_state
from dcpc.runtime.planner.speeds import LearnedSpeeds, Speeds, checked_speeds
from dcpc.trace.loss import Loss
from dcpc.verify import Verifier


def _tell_others(error: DcpcError, given: Mapping[str, object]) -> None:
    """Raises one rank's error about its arguments on all ranks, as the others wait for its plan."""
    model, group = given.get("model"), given.get("group")
    if isinstance(error, GroupError):  # whom to tell is what is wrong
        return
    groups = Groups.default(
        group=group if isinstance(group, dist.ProcessGroup) else None,
        device=device_of(model) if isinstance(model, nn.Module) else None,
    )
    with groups.watch.section("dcpc.compile"):  # as the others, which count sections
        agree(groups, groups.world, "plan", "", error)


@taking(CompileOptions, refused=_tell_others, within="dcpc")
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
        model: module whose forward takes the buckets' inputs and returns the argument of `loss=`;
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
    groups = Groups.default(group=options.group, device=device_of(model), silence_s=options.timeout)
    with explaining("dcpc.compile"), groups.watch.section("dcpc.compile"):
        return _compiled(model, buckets, options, groups, start_s)


def _as_planned(told: PlanOptions, planned: Planned) -> PlanOptions:
    """Returns options with the plan's choices, by which other programs of the model are made."""
    asked = planned.request
    block = asked.block if 0 < asked.block < asked.world else None  # all ranks are one
    away = ("activations", "parameters") if asked.held_away else told.away
    return replace(
        told, parameters=asked.parameters, block=block, away=away, device=planned.device,
        calibration=None, autocast=planned.autocast,
    )  # fmt: skip


def _compiled(
    model: nn.Module, buckets: Buckets, options: CompileOptions, groups: Groups, start_s: float
) -> CompiledModel:
    """Returns the model compiled on these ranks."""
    told = options.planned_for(groups.world)
    cut, why = None, ""
    try:
        speeds = checked_speeds(options.speeds, groups.world)
        with explaining("dcpc.compile"):
            if options.pipeline is None:
                planned = plan_with(model, buckets, told)
            else:
                planned, cut, why = _staged(model, buckets, options, told, speeds)
    except DcpcError as error:  # on all ranks, as they wait for this one's plan
        agree(groups, groups.world, "plan", "", error)
        raise
    buckets = buckets.with_static(planned.static)
    agree(groups, groups.world, "plan", _decisions(planned, options, cut))
    share_state(state_tensors(model, planned), groups)
    verifier = Verifier(model, buckets, planned, options.verify)
    compile_s = time.perf_counter() - start_s
    if on_meta(model):
        verifier.postponed_s = compile_s
    else:
        problem = verifier.problem(compile_s)
        if problem is None and cut is not None:
            problem = stages_problem(cut, model, verifier, groups.rank)
        agree(groups, groups.world, "verification", str(problem or ""))
        if problem is not None:
            raise problem
    seed = _shared_seed(groups)

    def prepare(
        mine: Buckets, programs: Sequence[Program], loss: Loss | None
    ) -> Mapping[Bucket, Runnable]:
        same = replace(_as_planned(told, planned), loss=loss)
        return Traces(model, mine, same, programs=programs).held(same)

    core = ModelCore(
        model, buckets, planned, groups, base_seed=seed, verifier=verifier, prepare=prepare,
        learned=LearnedSpeeds(speeds, learns=options.speeds == "auto" and groups.world > 1),
        unpad=options.unpad,
    )  # fmt: skip
    if cut is not None:
        return PipelinedModel(core, cut, why)
    return CompiledModel(core, ModelOnGroup(core), ModelInsight(core, why))


def _decisions(planned: Planned, options: CompileOptions, cut: CutModel | None) -> str:
    """Returns the decisions as one text, equal on ranks that decided alike."""
    hashes = " ".join(v.traced.program.graph_hash for v in planned.traces)
    asked = planned.request
    held = f"; parameters {asked.parameters}, block {asked.block}" if asked.block else ""
    paced = "" if options.speeds == "equal" else f"; speeds {options.speeds}"
    staged = "" if cut is None else f"; {cut.text()}"
    return f"{hashes} {plans_text(planned.plans)}{held}{paced}{staged}"


def _staged(
    model: nn.Module, buckets: Buckets, options: CompileOptions, told: PlanOptions, speeds: Speeds
) -> tuple[Planned, CutModel | None, str]:
    """Returns the plan to run, its stages, and the reason for these; no stages: no pipeline."""
    stages, world = options.pipeline, told.world
    assert stages is not None, "asked for"
    refuse_beside_stages(options, stages, world)
    sp = stage_degree(options, stages)
    if on_meta(model):
        raise PlanError(
            f"pipeline={stages!r}: got a model on the meta device; expected one with memory; make "
            "it on the CPU, or compile it without pipeline="
        )
    one = of_one_rank(told)
    if isinstance(stages, int):
        single = plan_with(model, buckets, one, partly=True)
        cut = cut_model(model, buckets, single, stages, world, sp, speeds, options.parameters)
        return single, cut, ""
    traces = Traces(model, buckets, told)
    single = search(traces, one, partly=True)
    whole: Planned | PlanError
    try:
        whole = whole_plan(search(traces, told, partly=False))
    except PlanError as error:
        whole = error
    chosen = choose_stages(model, buckets, whole, single, world, sp, speeds, options.parameters)
    if chosen.cut is not None:
        return single, chosen.cut, chosen.why
    assert isinstance(whole, Planned), "it was priced"
    return whole, None, chosen.why


@checking_call("dcpc.materialize", DispatchError)
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
        compiled: compiled model, on the meta device at compile.
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


def _shared_seed(groups: Groups) -> int:
    """Returns rank 0's `torch.initial_seed()`, as set by `torch.manual_seed` before compiling."""
    seed = torch.tensor([torch.initial_seed() & ((1 << 62) - 1)])
    pg = groups.control(groups.world)
    if pg is not None:
        dist.broadcast(seed, group=pg, group_src=0)
    return int(seed)
