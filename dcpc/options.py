"""The options that commands share, and what gives them to a command."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from dcpc.errors import PlanError
from dcpc.passes.lowerings import LOWERINGS
from dcpc.symbolic_profile import DEVICES

AUTOCAST = {"none": None, "bfloat16": torch.bfloat16, "float16": torch.float16}

Factory = Annotated[
    str,
    typer.Argument(
        metavar="MODULE:FACTORY",
        help="a callable without arguments that returns the nn.Module, e.g. my_project.models:gpt",
    ),
]
BucketFile = Annotated[
    Path, typer.Option("--buckets", metavar="FILE", help="YAML file with inputs and sizes")
]
DeviceName = Annotated[
    str,
    typer.Option(
        "--device", help=f"auto (this machine's), or one of {', '.join(d.name for d in DEVICES)}"
    ),
]
World = Annotated[int, typer.Option("--world", min=1, help="number of ranks to plan for")]
Memory = Annotated[
    float | None,
    typer.Option("--memory", help="bytes a rank may use, e.g. 80e9; default: all the device has"),
]
Degree = Annotated[str, typer.Option("--sp", help="auto, or a degree for every bucket")]
Recompute = Annotated[str, typer.Option("--recompute", help="auto, none or all")]
Attention = Annotated[
    str,
    typer.Option("--attention", help=f"how it is split: auto, or one of {', '.join(LOWERINGS)}"),
]
Backend = Annotated[str, typer.Option("--backend", help="inductor or eager")]
OptimizerBytes = Annotated[
    int | None,
    typer.Option(
        "--optimizer-bytes", min=0, help="kept by the optimizer on a rank; default: Adam's"
    ),
]
CalibrationFile = Annotated[
    Path | None,
    typer.Option("--calibration", metavar="FILE", help="written by `dcpc calibrate`"),
]
Autocast = Annotated[
    str, typer.Option("--autocast", help=f"mixed precision: one of {', '.join(AUTOCAST)}")
]


@dataclass(frozen=True, slots=True)
class Options:
    """What every command that plans is told; `dcpc.api.plan` says what each means."""

    device: DeviceName = "auto"
    world: World = 1
    memory: Memory = None
    sp: Degree = "auto"
    recompute: Recompute = "auto"
    backend: Backend = "inductor"
    optimizer_bytes: OptimizerBytes = None
    calibration: CalibrationFile = None
    attention: Attention = "auto"
    autocast: Autocast = "none"


def check_choice(what: str, got: str, known: Iterable[str]) -> None:
    """Refuses a value that an option does not have.

    Args:
        what: how the message begins, such as "got --autocast".
        got: the value.
        known: those it may have.

    Raises:
        PlanError: it is none of them.
    """
    if got not in known:
        raise PlanError(f"{what} {got}; expected one of {', '.join(known)}; choose one")


def planning(command: Callable[..., None], without: Collection[str] = ()) -> Callable[..., None]:
    """Gives a command the `Options` that it lacks, as its last argument.

    Args:
        command: a function with `options`, and options of its own.
        without: those that it does not take and finds out itself.
    """
    own = [p for p in signature(command, eval_str=True).parameters.values() if p.name != "options"]
    shared = signature(Options, eval_str=True).parameters.values()
    taken = {o.name for o in own}.union(without)
    more = [p for p in shared if p.name not in taken]

    @functools.wraps(command)
    def run(**given: Any) -> None:
        options = {p.name: given.pop(p.name) for p in more}
        command(**given, options=Options(**options))

    parameters = [p.replace(kind=Parameter.KEYWORD_ONLY) for p in (*own, *more)]
    run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    del run.__wrapped__
    return run
