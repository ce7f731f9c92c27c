"""Stages of several ranks each, all of them in one process: to hold them against the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from dcpc.codegen import run_in_step, summed
from dcpc.compiled.pipeline.stages import ProgramStage
from dcpc.verify import LossAndGradients


def together(
    stages: Sequence[ProgramStage], model: nn.Module, inputs: Mapping[str, Tensor]
) -> LossAndGradients:
    """Returns loss and gradients of a micro-batch that goes through all ranks of all stages.

    Args:
        stages: of the model, with its parameters.
        model: the user's.
        inputs: by name.
    """
    first = {id(p): n for n, p in model.named_parameters()}
    # What flows has one name in all stages, so what goes past some of them needs no handing on.
    flowing, grads = dict[str, Tensor](), dict[str, Tensor]()
    for stage in stages:
        flowing |= _run(stage, inputs, flowing, {})[0]
    (name,) = stages[-1].part.sent
    grads[name] = torch.ones_like(flowing[name])
    found: dict[str, Tensor | None] = {
        n: None for n, p in model.named_parameters() if p.requires_grad
    }
    for stage in reversed(stages):
        held = stage.runnable.traced.tensors()
        for n, gradient in _run(stage, inputs, flowing, grads)[1].items():
            if n in stage.part.program.parameters:
                own = first[id(held[n])]
                found[own] = _added(found[own], gradient)
            else:
                grads[n] = _added(grads.get(n), gradient)
    return LossAndGradients(flowing[name], found)


def _added(had: Tensor | None, more: Tensor) -> Tensor:
    return more if had is None else had + more


def _run(
    stage: ProgramStage,
    inputs: Mapping[str, Tensor],
    flowing: Mapping[str, Tensor],
    grads: Mapping[str, Tensor],
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Returns what a stage makes, by name, and the gradients of what it reads.

    Args:
        stage: which one.
        inputs: of the model.
        flowing: what stages before made; of a stage that ran, what it made as well.
        grads: of what it makes; of others it is zero.
    """
    program, ranks = stage.part.program, range(stage.sp)
    sizes = stage.sizes(inputs, [flowing[n] for n in stage.part.received])
    every = [stage.in_lane(lane).variant(sizes) for lane in ranks]
    integers = [
        {i.name: value for i, value in zip(variant.integers, values, strict=True)}
        for variant, values in every
    ]
    received = {n: flowing[n] for n in stage.part.read}
    given = {p: inputs[n].contiguous() for p, n in program.inputs.items() if p not in received}
    held = {**stage.runnable.traced.tensors(), **received, **given}
    named = {n: x.detach() for n, x in held.items()}

    def tangent(position: int, made: Tensor) -> Tensor:
        known = grads.get(program.outputs[position])
        return torch.zeros_like(made) if known is None else known

    results = run_in_step([v.partition for v, _ in every], integers, named, tangents=tangent)
    made = dict(zip(program.outputs, results[0].outputs, strict=True))
    variant = every[0][0]
    learned = [variant.placeholders[position] for position in variant.trainable]
    both = zip(learned, summed(results), results[0].gradients, strict=True)
    # Each rank has a share of a parameter's gradient, and the whole of what it received.
    gradients = {n: whole if n in received else total for n, total, whole in both}
    return made, {n: g for n, g in gradients.items() if g is not None}
