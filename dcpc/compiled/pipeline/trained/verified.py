"""Holds a model in stages against the model itself, before it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from dcpc.compiled.pipeline.stages import ProgramStage, run_in_turn
from dcpc.compiled.pipeline.trained.cutting import CutModel
from dcpc.compiled.pipeline.trained.together import together
from dcpc.errors import VerifyError
from dcpc.verify import Given, LossAndGradients, Verifier

Outcome = Callable[[Sequence[ProgramStage], nn.Module, Mapping[str, Tensor]], LossAndGradients]


def stages_problem(cut: CutModel, model: nn.Module, verifier: Verifier) -> VerifyError | None:
    """Returns why the stages do not compute what the model computes; None: they do.

    Runs all of them in turn, forward and backward, on drawn inputs at small lengths: as they will
    run, with the least and the most recompute, and with backwards in two parts. Every rank has the
    whole model until then. Where several ranks run a stage this process runs the graphs of all of
    them, backwards as a whole.

    Args:
        cut: the model's stages.
        model: the user's, with memory.
        verifier: of it; it says what was compared.
    """
    if verifier.mode == "off":
        return None
    traced = verifier.planned.runnable.traced
    if traced.backend != "eager":
        verifier.lines.append(f"stages: NOT compared with the model: compiled by {traced.backend}")
        return None
    rows, sp = cut.planner.cost.rows, cut.layout.sp
    least, most = [row[0] for row in rows], [row[-1] for row in rows]
    chains: dict[str, tuple[list[ProgramStage], Outcome]] = {
        "the least recompute": (least, _outcome if sp == 1 else together)
    }
    if any(len(row) > 1 for row in rows):
        chains["the most recompute"] = most, _outcome if sp == 1 else together
    if sp == 1 and traced.backend == "eager":
        chains["backwards in two parts"] = most, _outcome_apart
    for name, (chain, outcome) in chains.items():

        def make(
            given: Given, chain: Sequence[ProgramStage] = chain, outcome: Outcome = outcome
        ) -> LossAndGradients:
            names = given.program.inputs
            inputs = {n: given.tensors[p] for p, n in names.items()}
            return outcome(chain, model, inputs)

        what = f"{len(rows)} stages{f' of {sp} ranks' * (sp > 1)}, {name}"
        problem = verifier.composed_problem(traced, make, what, alike=sp > 1)
        if problem is not None:
            return problem
    return None


def _outcome_apart(
    stages: Sequence[ProgramStage], model: nn.Module, inputs: Mapping[str, Tensor]
) -> LossAndGradients:
    """Returns what `_outcome` does, of backwards in two parts, all of the second ones last."""
    return _outcome(stages, model, inputs, apart=True)


def _outcome(
    stages: Sequence[ProgramStage],
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    apart: bool = False,
) -> LossAndGradients:
    """Returns loss and gradients of a micro-batch that one process takes through all stages.

    Args:
        stages: of the model, with its parameters; their `grad` is left as it is.
        model: the user's.
        inputs: by name.
        apart: whether backwards are run in two parts.
    """
    with torch.enable_grad(), _own_gradients(model):
        loss = run_in_turn(stages, inputs, apart=apart)
        found = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    return LossAndGradients(loss, found)


@contextmanager
def _own_gradients(model: nn.Module) -> Iterator[None]:
    """Gives parameters no gradient at first, and afterwards those back that they had."""
    had = [(p, p.grad) for p in model.parameters()]
    for p, _ in had:
        p.grad = None
    try:
        yield
    finally:
        for p, gradient in had:
            p.grad = gradient
