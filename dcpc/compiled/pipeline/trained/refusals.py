"""Which options of `dcpc.compile` do not go with `pipeline=`: each is refused by name."""

from __future__ import annotations

from dataclasses import fields

from dcpc.errors import PlanError
from dcpc.plan.options import CompileOptions

# Option -> values that go with stages beside the default, and what is in the way of others.
_REFUSED = {
    "sp": ((1,), "a stage runs on one rank; leave sp= out, or compile without pipeline="),
    "parameters": (
        ("auto",),
        "a rank has the parameters of its stage, whole; leave parameters= out, or compile without "
        "pipeline=",
    ),
    "attention": ((), "no attention is split within a stage; leave attention= out"),
    "unpad": ((False,), "stages take whole batches; leave unpad= out"),
    "speeds": ((), "the cut is for stages that are equally fast; leave speeds= out"),
    "optimizer": ((), "the cut counts Adam's state; leave optimizer= out, and raise memory= by "
                      "what yours has less"),
    "optimizer_bytes": ((), "the cut counts Adam's state; leave optimizer_bytes= out, and raise "
                            "memory= by what yours has less"),
    "group": ((), "pipelines are made of all ranks of the job; leave group= out"),
}  # fmt: skip


def refuse_beside_stages(options: CompileOptions, world: int, on_meta: bool) -> None:
    """Refuses what does not go with stages, and numbers of ranks that do not.

    Args:
        options: of `compile`, with a number of stages.
        world: ranks.
        on_meta: whether the model has no memory.

    Raises:
        PlanError: names the option.
    """
    stages = options.pipeline
    assert stages is not None, "asked for"
    if world % stages:
        raise PlanError(
            f"pipeline={stages}: got {world} ranks; expected a multiple of {stages}: a rank for "
            "each stage of each pipeline; start more ranks, or take another number of stages"
        )
    if on_meta:
        raise PlanError(
            f"pipeline={stages}: got a model on the meta device; expected one with memory; make it "
            "on the CPU, or compile it without pipeline="
        )
    for option in fields(options):
        allowed, why = _REFUSED.get(option.name, ((), ""))
        got = getattr(options, option.name)
        if why and got != option.default and got not in allowed:
            raise PlanError(
                f"pipeline={stages}: got {option.name}={got!r}; expected "
                f"{' or '.join(map(repr, (option.default, *allowed)))}: {why}"
            )
