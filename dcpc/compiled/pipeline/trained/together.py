"""All stages in one process, in turn or by the graphs of all ranks: to compare with the model."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dcpc.codegen import broken_guards, integers_of, run_in_step, summed
from dcpc.compiled.pipeline.stages import ProgramStage
from dcpc.errors import CodegenError
from dcpc.ir import Partition
from dcpc.plan.traced import Hints
from dcpc.verify import LossAndGradients


def run_in_turn(
    stages: Sequence[ProgramStage],
    inputs: Mapping[str, Tensor],
    weight: float = 1.0,
    seed: int = 0,
    apart: bool = False,
) -> Tensor:
    """Returns the loss of a micro-batch that one process takes through all stages and back.

    Args:
        stages: stages of a model, in order; gradients are added to `.grad` of its parameters.
        inputs: inputs of the model, by name.
        weight: factor of the loss that is differentiated.
        seed: seed of the micro-batch's random numbers.
        apart: whether backwards are run in two parts, all second parts last.
    """
    kept, sent = [], tuple[Tensor, ...]()
    for stage in stages:
        sent, saved = stage.forward(inputs, sent, seed)
        kept.append(saved)
    (loss,) = sent
    grads: tuple[Tensor | None, ...] = (torch.full_like(loss, weight),)
    later = []
    for stage, saved in zip(reversed(stages), reversed(kept), strict=True):
        if apart:
            grads, rest = stage.backward_input(saved, grads)
            later.append((stage, rest))
        else:
            grads = stage.backward(saved, grads)
    for stage, rest in later:
        stage.backward_weight(rest)
    assert grads == (), "the first stage received nothing"
    return loss


def together(
    stages: Sequence[ProgramStage],
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    compiled: int | None = None,
) -> LossAndGradients:
    """Returns loss and gradients of a micro-batch that goes through all ranks of all stages.

    Args:
        stages: stages of the model, with its parameters; their `grad` is left as it is.
        model: model of the user.
        inputs: tensors by input name.
        compiled: number of a stage of one rank that is run as in a step, by compiled code; None:
            all are run by the graphs that are compiled.
    """
    first = {id(p): n for n, p in model.named_parameters()}
    # What flows has one name in all stages, so what goes past some of them needs no handing on.
    flowing, grads = dict[str, Tensor](), dict[str, Tensor]()
    saved: Any = None
    for stage in stages:
        if stage.index == compiled:
            received = tuple(flowing[n] for n in stage.part.received)
            with torch.enable_grad():
                sent, saved = stage.forward(inputs, received)
            flowing |= dict(zip(stage.part.sent, sent, strict=True))
        else:
            flowing |= _run(stage, inputs, flowing, {})[0]
    (name,) = stages[-1].part.sent
    grads[name] = torch.ones_like(flowing[name])
    found: dict[str, Tensor | None] = {
        n: None for n, p in model.named_parameters() if p.requires_grad
    }
    for stage in reversed(stages):
        held = stage.runnable.traced.tensors()
        if stage.index == compiled:
            made = _backward(stage, saved, grads, model)
        else:
            made = _run(stage, inputs, flowing, grads)[1]
        for n, gradient in made.items():
            if n in stage.part.program.parameters:
                own = first[id(held[n])]
                found[own] = _added(found[own], gradient)
            else:
                grads[n] = _added(grads.get(n), gradient)
    return LossAndGradients(flowing[name], found)


@contextmanager
def own_gradients(model: nn.Module) -> Iterator[None]:
    """Takes the parameters' gradients away within its block, and gives them back after it."""
    had = [(p, p.grad) for p in model.parameters()]
    for p, _ in had:
        p.grad = None
    try:
        yield
    finally:
        for p, gradient in had:
            p.grad = gradient


def _backward(
    stage: ProgramStage, saved: Any, grads: Mapping[str, Tensor], model: nn.Module
) -> dict[str, Tensor]:
    """Returns the gradients of the values that a stage reads, from its own backward.

    A value without an entry in `grads` has a gradient of zero: what a stage hands on goes past it.
    """
    part, held = stage.part, stage.runnable.traced.tensors()
    given = tuple(grads.get(n) if n in part.program.outputs else None for n in part.sent)
    with torch.enable_grad(), own_gradients(model):
        back = stage.backward(saved, given)
        made = dict(zip(part.received, back, strict=True))
        own = {id(held[n]): n for n in part.program.learning if n in held}
        made |= {n: held[n].grad for n in own.values()}  # one name of each
    return {n: g for n, g in made.items() if g is not None}


@dataclass(frozen=True, slots=True)
class _LaneGraphs:
    """The graphs that a rank of a stage runs at some sizes.

    Attributes:
        partition: partition into forward and backward.
        integers: integers that both take.
        learned: placeholders that have a gradient, in its order.
    """

    partition: Partition
    integers: Mapping[str, int]
    learned: Sequence[str]


def _graphs(stage: ProgramStage, sizes: Mapping[str, int], lane: int) -> _LaneGraphs:
    """Returns the graphs that a rank of a stage has compiled for some sizes.

    Raises:
        CodegenError: none is right at these sizes.
    """
    runnable = stage.runnable
    traced, backend = runnable.traced, runnable.traced.backend
    placement = stage.placement(sizes)
    dims = traced.program.dims(sizes)
    hints: list[Hints] = [None if backend == "eager" else ()]
    for chosen in itertools.chain(hints, runnable.hints(placement, backend, dims, lane)):
        lowering = traced.lowering(placement, chosen, backend)
        own = integers_of(lowering.lowered, dims)[lane]
        at = {i.symbol: own[i.name] for i in lowering.lowered.integers}
        if not broken_guards(lowering.joint.guards, at):
            parts = runnable.partition(placement, stage.menu_step, chosen, backend)
            return _LaneGraphs(parts, own, lowering.joint.trainable)
    raise CodegenError(f"stage {stage.index}: got no graph that is right at {dict(sizes)}")


def _added(had: Tensor | None, more: Tensor) -> Tensor:
    return more if had is None else had + more


def _run(
    stage: ProgramStage,
    inputs: Mapping[str, Tensor],
    flowing: Mapping[str, Tensor],
    grads: Mapping[str, Tensor],
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Returns the values that a stage makes, by name, and the gradients of those it reads."""
    program = stage.part.program
    sizes = stage.sizes(inputs, [flowing[n] for n in stage.part.received])
    every = [_graphs(stage, sizes, lane) for lane in range(stage.sp)]
    received = {n: flowing[n] for n in stage.part.read}
    given = {p: inputs[n].contiguous() for p, n in program.inputs.items() if p not in received}
    held = {**stage.runnable.traced.tensors(), **received, **given}
    named = {n: x.detach() for n, x in held.items()}

    def tangent(position: int, made: Tensor) -> Tensor:
        known = grads.get(program.outputs[position])
        return torch.zeros_like(made) if known is None else known

    graphs, integers = [own.partition for own in every], [own.integers for own in every]
    results = run_in_step(graphs, integers, named, tangents=tangent)
    made = dict(zip(program.outputs, results[0].outputs, strict=True))
    both = zip(every[0].learned, summed(results), results[0].gradients, strict=True)
    # Each rank has a share of a parameter's gradient, and the whole of what it received.
    gradients = {n: whole if n in received else total for n, total, whole in both}
    return made, {n: g for n, g in gradients.items() if g is not None}
