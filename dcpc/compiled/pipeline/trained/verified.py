"""Holds a model in stages against the model itself, before it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from dcpc.compiled.pipeline.stages import ProgramStage
from dcpc.compiled.pipeline.trained.cutting import CutModel
from dcpc.compiled.pipeline.trained.together import own_gradients, run_in_turn, together
from dcpc.errors import VerifyError
from dcpc.verify import Given, LossAndGradients, Verifier

Outcome = Callable[[Sequence[ProgramStage], nn.Module, Mapping[str, Tensor]], LossAndGradients]


def stages_problem(
    cut: CutModel, model: nn.Module, verifier: Verifier, rank: int = 0
) -> VerifyError | None:
    """Returns the error of stages that compute another loss or gradient than the model; or None.

    Runs all of them in turn, forward and backward, on drawn inputs at small lengths: as they will
    run, with the least and the most recompute, and with backwards in two parts. Every rank has the
    whole model until then. Where several ranks run a stage this process runs the graphs of all of
    them, backwards as a whole. Where Inductor compiles the stages it runs the graphs that are
    compiled, and this rank's stage as it was compiled, which its first step needs anyway; with
    verify="full" also with the most recompute. One that draws random numbers is run as graphs.
    """
    if verifier.mode == "off":
        return None
    traces, sp = verifier.planned.traces, cut.layout.sp
    for number, runnable in enumerate(traces):
        rows = [[stage.by_trace[number] for stage in row] for row in cut.planner.cost.rows]
        traced, own = runnable.traced, cut.layout.stage(rank)
        chains = _chains(rows, sp, traced.backend, own, thorough=verifier.mode == "full")
        for name, (chain, outcome) in chains:

            def make(
                given: Given, chain: Sequence[ProgramStage] = chain, outcome: Outcome = outcome
            ) -> LossAndGradients:
                names = given.program.inputs
                inputs = {n: given.tensors[p] for p, n in names.items()}
                return outcome(chain, model, inputs)

            what = f"{len(rows)} stages{f' of {sp} ranks' * (sp > 1)}, {name}"
            what += f", trace {number + 1}" * (len(traces) > 1)
            problem = verifier.composed_problem(traced, make, what, alike=sp > 1)
            if problem is not None:
                return problem
    return None


def _chains(
    rows: Sequence[Sequence[ProgramStage]], sp: int, backend: str, own: int, thorough: bool
) -> Iterator[tuple[str, tuple[list[ProgramStage], Outcome]]]:
    """Yields the name of each way to run all stages in turn, the stages, and their runner."""
    recomputes = {"the least recompute": [row[0] for row in rows]}
    if any(len(row) > 1 for row in rows):
        recomputes["the most recompute"] = [row[-1] for row in rows]
    for number, (name, chain) in enumerate(recomputes.items()):
        if backend == "eager":
            yield name, (chain, _outcome if sp == 1 else together)
            continue
        yield f"{name}, the graphs that {backend} compiles", (chain, together)
        if sp == 1 and (thorough or not number) and not _draws(chain[own]):
            compiled = partial(together, compiled=own)
            yield f"{name}, stage {own} as {backend} compiled it", (chain, compiled)
    if sp == 1 and backend == "eager":
        yield "backwards in two parts", ([row[-1] for row in rows], _outcome_apart)


def _draws(stage: ProgramStage) -> bool:
    """Whether a stage draws random numbers: compiled code draws its own."""
    traced = stage.runnable.traced
    placement = stage.runnable.priced.placement(traced.program.hints, stage.sp)
    return any(i.role == "seed" for i in traced.lowering(placement).lowered.integers)


def _outcome_apart(
    stages: Sequence[ProgramStage], model: nn.Module, inputs: Mapping[str, Tensor]
) -> LossAndGradients:
    """Returns the result of `_outcome` with backwards in two parts, all second parts last."""
    return _outcome(stages, model, inputs, apart=True)


def _outcome(
    stages: Sequence[ProgramStage],
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    apart: bool = False,
) -> LossAndGradients:
    """Returns loss and gradients of a micro-batch that one process takes through all stages."""
    with torch.enable_grad(), own_gradients(model):
        loss = run_in_turn(stages, inputs, apart=apart)
        found = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    return LossAndGradients(loss, found)
