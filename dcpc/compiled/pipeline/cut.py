"""From a model's traces, a mixture of shapes and devices to the stages, and their recompute."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf, prod

from torch import nn

from dcpc.buckets import Fixed, Sizes
from dcpc.compiled.pipeline.borders import common_borders, homes_of
from dcpc.compiled.pipeline.chain import CallChain, chain_of
from dcpc.compiled.pipeline.model_stage import ModelStage, StageState
from dcpc.compiled.pipeline.stage_costs import (
    MixedBucket,
    ProgramCosts,
    StageDevice,
    mixed_costs,
    mixture_dims,
)
from dcpc.compiled.pipeline.stages import ProgramStage, stages_of
from dcpc.errors import PlanError
from dcpc.passes.stages.cut_costs import StageCut
from dcpc.passes.stages.mixture import best_cut
from dcpc.plan.runnable import Runnable
from dcpc.plan.traced import Traced
from dcpc.runtime.pipeline.stage import Shaped
from dcpc.symbolic_profile import OptimizerMemory, bytes_text

TRIES = 8  # cuts that are made with less memory each, where a stage's own graph needs more


@dataclass(frozen=True, slots=True)
class StagePlan:
    """A model cut into stages.

    Attributes:
        stages: stages in order.
        cut: cut with its costs; its blocks lie between places where all traces may be cut.
        borders: number of the border at each stage's begin, and at the end, in each trace's
            chain.
        devices: number of each stage's device among those asked for.
        menu_steps: steps of recompute that fit, for each stage and each shape of the mixture.
        needed_bytes: largest need of each stage, with as many micro-batches on their way
            as there are stages from it on.
        chains: calls of each trace, in which the borders are.
    """

    stages: tuple[ModelStage, ...]
    cut: StageCut
    borders: tuple[tuple[int, ...], ...]
    devices: tuple[int, ...]
    menu_steps: tuple[tuple[int, ...], ...]
    needed_bytes: tuple[int, ...]
    chains: tuple[CallChain, ...] = ()


def plan_stages(
    runnables: Sequence[Runnable],
    model: nn.Module,
    mixture: Sequence[MixedBucket],
    devices: Sequence[StageDevice],
    *,
    all_devices: bool = False,
    sp: int = 1,
) -> StagePlan:
    """Returns the stages of least expected bottleneck that fit, each checked on its own graph.

    Args:
        runnables: runnable of each trace's whole program.
        model: model that was traced.
        mixture: shapes of micro-batches and their shares, which add up to 1; each trace has some.
        devices: device for each stage, in any order; one that is too slow gets none.
        all_devices: whether each device gets a stage, also where fewer would be faster.
        sp: number of ranks that run each stage together; each of them is such a device.

    Raises:
        PlanError: no cut fits, or the traces cannot be cut into so many stages at the same places.
    """
    own = [[b for b in mixture if b.trace == t] for t in range(len(runnables))]
    traces = [runnable.traced for runnable in runnables]
    dims = [mixture_dims(v.program, buckets) for v, buckets in zip(traces, own, strict=True)]
    chains = [chain_of(v.program, each) for v, each in zip(traces, dims, strict=True)]
    places = common_borders(traces, chains, dims)
    if all_devices and places.most_stages < len(devices):
        raise _too_few(places.most_stages, len(devices), [v.program.fixed for v in traces])
    costs = [ProgramCosts(v, chain, sp) for v, chain in zip(runnables, chains, strict=True)]
    counts = Counter(devices)
    kinds = [*counts]
    room = {kind: kind for kind in kinds}  # what the search is told of each
    for _ in range(TRIES):
        told = [(room[kind], counts[kind]) for kind in kinds]
        cut = best_cut(mixed_costs(costs, places.array, mixture, told, all_devices))
        borders = tuple(places.at[place] for place in cut.borders)
        stages = _stages_at(borders, traces, chains, model, sp)
        fitted = [
            _fitted(stage, kinds[k], mixture) for stage, k in zip(stages, cut.kinds, strict=True)
        ]
        over = dict.fromkeys(kinds, 0.0)
        for (_, most), k in zip(fitted, cut.kinds, strict=True):
            over[kinds[k]] = max(over[kinds[k]], most - kinds[k].memory_bytes)
        if all(bytes_over <= 0 for bytes_over in over.values()):
            steps, needed = zip(*fitted, strict=True)
            numbers = _numbers(devices, kinds, cut)
            return StagePlan(stages, cut, borders, numbers, steps, needed, tuple(chains))
        room = {k: replace(m, memory_bytes=m.memory_bytes - over[k]) for k, m in room.items()}
    raise _none_fits(max(n for _, n in fitted), kinds, len(stages))


def _none_fits(needed_bytes: int, kinds: Sequence[StageDevice], stages: int) -> PlanError:
    """Returns the error that a stage needs more memory than there is, however it is cut."""
    most_bytes = min(k.memory_bytes for k in kinds)
    return PlanError(
        f"stages: got {bytes_text(int(needed_bytes))} on the fullest of {stages} stages with all "
        f"recompute; expected at most {bytes_text(int(most_bytes))}; add devices or memory, or "
        "lower the largest shape"
    )


def _stages_at(
    borders: Sequence[tuple[int, ...]],
    traces: Sequence[Traced],
    chains: Sequence[CallChain],
    model: nn.Module,
    sp: int,
) -> tuple[ModelStage, ...]:
    """Returns the stages of a model that is cut at these borders of each trace's chain."""
    homes = homes_of(traces, chains, borders)
    programs = [
        stages_of(v, model, chain, [at[t] for at in borders], sp, homes[t])
        for t, (v, chain) in enumerate(zip(traces, chains, strict=True))
    ]
    fixed = [v.program.fixed for v in traces]
    every = zip(*programs, strict=True)
    return tuple(ModelStage(dict(zip(fixed, each, strict=True))) for each in every)


def _too_few(most: int, stages: int, fixed: Sequence[Fixed]) -> PlanError:
    """Returns the error that a model has too few places where all of its traces may be cut."""
    if len(fixed) == 1:
        return PlanError(
            f"stages: got a model that can be cut into {most} blocks at most; expected one for "
            f"each of {stages} stages; take fewer stages"
        )
    kinds = " | ".join(
        ", ".join(f"{n} {size}" for n, size in sorted(each)) or "no dim" for each in fixed
    )
    return PlanError(
        f"stages: got buckets that need {len(fixed)} traces, as other dims are numbers in them "
        f"({kinds}), and {most} parts at most into which all of these can be cut between the same "
        f"parameters; expected one for each of {stages} stages; take fewer stages, or leave out "
        "the buckets of a trace"
    )


def _numbers(
    devices: Sequence[StageDevice], kinds: Sequence[StageDevice], cut: StageCut
) -> tuple[int, ...]:
    """Returns the devices of the stages, those of a kind in the order they were given."""
    left = {kind: [i for i, d in enumerate(devices) if d == kind] for kind in kinds}
    return tuple(left[kinds[k]].pop(0) for k in cut.kinds)


def _fitted(
    stage: ModelStage, device: StageDevice, mixture: Sequence[MixedBucket]
) -> tuple[tuple[int, ...], int]:
    """Returns the fewest steps of recompute for each shape that fit, and the bytes they need."""
    state, memory_bytes = StageState.of(stage.by_trace, device.optimizer), device.memory_bytes
    resident = state.resident_bytes
    steps, most = [], resident + state.step_bytes
    for bucket in mixture:
        sizes, low = bucket.sizes, 0
        own = stage.at(sizes)
        high = 0 if memory_bytes == inf else own.study(sizes).steps
        while low < high:
            middle = (low + high) // 2
            fits = stage_bytes(own.recomputing(middle), sizes, resident) <= memory_bytes
            low, high = (low, middle) if fits else (middle + 1, high)
        steps.append(low)
        most = max(most, stage_bytes(own.recomputing(low), sizes, resident))
    return tuple(steps), most


def stage_bytes(stage: ProgramStage, sizes: Sizes, resident_bytes: int | None = None) -> int:
    """Returns the bytes a stage needs at most where all micro-batches have one shape, in 1F1B.

    Args:
        stage: stage of a pipeline, with its recompute.
        sizes: lengths of every micro-batch.
        resident_bytes: bytes of parameters with their gradients and state; None: of those it reads
            itself, trained by Adam.
    """
    if resident_bytes is None:
        resident_bytes = StageState.of([stage], OptimizerMemory()).resident_bytes
    found = stage.predict(sizes)
    given_bytes = found.input_bytes + handed_on_bytes(stage, sizes)
    held_bytes = found.saved_bytes + found.shared_bytes + given_bytes
    others = (stage.count - stage.index - 1) * held_bytes
    return resident_bytes + others + found.peak_bytes + given_bytes


def handed_on_bytes(stage: ProgramStage, sizes: Sizes) -> int:
    """Returns the bytes that a stage receives for later stages alone."""
    pairs = zip(stage.part.received, stage.received(sizes), strict=True)
    return sum(nbytes(shaped) for n, shaped in pairs if n not in stage.part.read)


def passed_on_bytes(stage: ProgramStage, sizes: Sizes) -> tuple[int, int]:
    """Returns the bytes that a stage receives and sends on, and those of their gradients."""
    part = stage.part
    pairs = zip(part.received, stage.received(sizes), strict=True)
    passed = {n: nbytes(shaped) for n, shaped in pairs if n in part.sent}
    return sum(passed.values()), sum(passed[n] for n in passed if part.flowing[n].requires_grad)


def nbytes(shaped: Shaped) -> int:
    """Returns the bytes of a value of some shape and dtype."""
    shape, dtype = shaped
    return prod(shape) * dtype.itemsize
