"""Which options of `dcpc.compile` do not go with `pipeline=`: each is refused by name."""

from __future__ import annotations

from dataclasses import fields

from dcpc.errors import PlanError
from dcpc.plan.options import ModelOptions

# Option -> values that go with stages beside the default, and what is in the way of others.
_REFUSED = {
    "sp": ((1,), "a stage runs on one rank; leave sp= out, or compile without pipeline="),
    "parameters": (
        ("auto",),
        "a rank has the parameters of its stage, whole; leave parameters= out, or compile without "
        "pipeline=",
    ),
    "block": ((), "a rank has the parameters of its stage, whole; leave block= out"),
    "attention": ((), "no attention is split within a stage; leave attention= out"),
    "unpad": ((False,), "stages take whole batches; leave unpad= out"),
    "speeds": ((), "the cut is for stages that are equally fast; leave speeds= out"),
    "optimizer": ((), "the cut counts Adam's state; leave optimizer= out, and raise memory= by "
                      "what yours has less"),
    "optimizer_bytes": ((), "the cut counts Adam's state; leave optimizer_bytes= out, and raise "
                            "memory= by what yours has less"),
    "group": ((), "pipelines are made of all ranks of the job; leave group= out"),
}  # fmt: skip


def refuse_beside_stages(options: ModelOptions, stages: int | str, world: int) -> None:
    """Refuses what does not go with stages, and numbers of ranks that do not.

    Args:
        options: of `compile` or of a command.
        stages: of a pipeline, or "auto".
        world: ranks.

    Raises:
        PlanError: names the option.
    """
    if isinstance(stages, int) and world % stages:
        raise PlanError(
            f"pipeline={stages}: got {world} ranks; expected a multiple of {stages}: a rank for "
            "each stage of each pipeline; start more ranks, or take another number of stages"
        )
    for option in fields(options):
        allowed, why = _REFUSED.get(option.name, ((), ""))
        got = getattr(options, option.name)
        if why and got != option.default and got not in allowed:
            raise PlanError(
                f"pipeline={stages!r}: got {option.name}={got!r}; expected "
                f"{' or '.join(map(repr, (option.default, *allowed)))}: {why}"
            )
