"""Refuses the options of `dcpc.compile` that do not go with `pipeline=`, each by name."""

from __future__ import annotations

from dataclasses import fields

from dcpc.errors import PlanError
from dcpc.plan.options import ModelOptions

# Option -> values that go with stages beside the default, and what is in the way of others.
_REFUSED = {
    "parameters": (
        ("auto", "step"),
        "a rank has the parameters of its stage, whole; take one of these, or compile without "
        "pipeline=",
    ),
    "away": (
        ("none", "all", "activations"),
        "a rank has its stage's parameters, and their state, on its device; take one of these",
    ),
    "block": ((), "a rank has the parameters of its stage, whole; leave block= out"),
    "batch_norm": (
        (),
        "a stage begins its next micro-batches before the statistics of one have come back from "
        "the last stage; compile without pipeline=, or call eval() on batch norms",
    ),
    "group": ((), "pipelines are made of all ranks of the job; leave group= out"),
}  # fmt: skip


def stage_degree(options: ModelOptions, stages: int | str) -> int:
    """Returns the number of ranks that run a stage together.

    Args:
        options: options of `compile` or of a command.
        stages: number of stages of a pipeline, or "auto".

    Raises:
        PlanError: several degrees are asked for.
    """
    if options.sp == "auto":
        return 1
    if not isinstance(options.sp, int):
        raise PlanError(
            f"pipeline={stages!r}: got sp={options.sp!r}; expected one degree: all stages have as "
            "many ranks; pass one"
        )
    return options.sp


def refuse_beside_stages(options: ModelOptions, stages: int | str, world: int) -> None:
    """Refuses options and numbers of ranks that do not go with stages.

    Raises:
        PlanError: names the option.
    """
    width = (stages if isinstance(stages, int) else 1) * stage_degree(options, stages)
    if world % width:
        raise PlanError(
            f"pipeline={stages!r}, sp={options.sp!r}: got {world} ranks; expected a multiple of "
            f"{width}: ranks for each stage of each pipeline; start more ranks, or take another "
            "number of stages or degree"
        )
    if getattr(options, "speeds", "equal") == "auto":
        raise PlanError(
            f"pipeline={stages!r}: got speeds='auto'; expected 'equal' or a speed for each rank: "
            "the cut is made before anything is measured, and stays; pass the speeds"
        )
    for option in fields(options):
        allowed, why = _REFUSED.get(option.name, ((), ""))
        got = getattr(options, option.name)
        if why and got != option.default and got not in allowed:
            raise PlanError(
                f"pipeline={stages!r}: got {option.name}={got!r}; expected "
                f"{' or '.join(map(repr, dict.fromkeys((option.default, *allowed))))}: {why}"
            )
