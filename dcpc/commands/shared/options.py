"""The options that commands share, and the decorator that adds them to a command."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any

import typer

from dcpc.commands.shared.factories import load_loss
from dcpc.errors import DcpcError
from dcpc.plan.options import PlanOptions, commanded
from dcpc.plan.progress_bar import shown

Factory = Annotated[
    str,
    typer.Argument(
        metavar="MODULE:FACTORY",
        help="a callable without arguments that returns the nn.Module, e.g. my_project.models:gpt",
    ),
]
_BUCKETS = typer.Option("--buckets", metavar="FILE", help="YAML file with inputs and sizes")
BucketFile = Annotated[Path, _BUCKETS]
SomeBuckets = Annotated[Path | None, _BUCKETS]
Lengths = Annotated[
    str | None,
    typer.Option(
        "--seq",
        metavar="N,N,...",
        help="in place of --buckets, for a first look at a model of token ids: its lengths; the "
        "inputs are read from forward's signature",
    ),
]

LossName = Annotated[
    str | None,
    typer.Option(
        "--loss",
        metavar="MODULE:FUNCTION",
        help="of a model that returns something else: called with its outputs and the inputs that "
        "it names, returns the loss",
    ),
]

Stages = Annotated[
    int | None,
    typer.Option(
        "--pipeline",
        min=2,
        metavar="STAGES",
        help="cut the model into stages, each on a rank of its own; --world counts all ranks",
    ),
]


def offered(*values: str) -> Callable[[str], list[str]]:
    """Returns a shell's completion of an option's values, by the text typed so far."""

    def complete(incomplete: str) -> list[str]:
        return [value for value in values if value.startswith(incomplete)]

    return complete


def read_as(name: str) -> Any:
    """Returns how typer reads an option of `PlanOptions` that the command line has."""
    option, read, _ = commanded()[name]
    return typer.Option(
        min=read.least,
        metavar=read.metavar,
        help=re.sub(r"[`\"]", "", option.meaning),
        autocompletion=offered(*read.choices) if read.choices else None,
    )


Backend = Annotated[str, read_as("backend")]
Attention = Annotated[str, read_as("attention")]
Autocast = Annotated[str, read_as("autocast")]


@contextmanager
def reported() -> Iterator[None]:
    """Shows progress on a terminal; an error of dcpc becomes a message on stderr and status 1."""
    try:
        with shown():
            yield
    except DcpcError as error:
        typer.echo(f"{type(error).__name__}: {error}", err=True)
        raise typer.Exit(1) from error


def planning(command: Callable[..., None], without: Collection[str] = ()) -> Callable[..., None]:
    """Gives a command `--loss` and the `PlanOptions` that it lacks, as its last argument.

    Its errors are reported as `reported` does.

    Args:
        command: function with `options`, and options of its own.
        without: options that the command does not take, as it computes them.
    """
    own = [p for p in signature(command, eval_str=True).parameters.values() if p.name != "options"]
    taken = {o.name for o in own}.union(without)
    more = {name: option for name, option in commanded().items() if name not in taken}

    @functools.wraps(command)
    def run(**given: Any) -> None:
        with reported():
            values = {name: read.value(given.pop(name)) for name, (_, read, _) in more.items()}
            values["loss"] = load_loss(given.pop("loss"))
            command(**given, options=PlanOptions(**values))

    shared = [
        Parameter(
            name,
            Parameter.KEYWORD_ONLY,
            default=default if read.default is None else read.default,
            annotation=Annotated[read.type, read_as(name)],
        )
        for name, (_, read, default) in more.items()
    ]
    shared.append(Parameter("loss", Parameter.KEYWORD_ONLY, default=None, annotation=LossName))
    parameters = [*(p.replace(kind=Parameter.KEYWORD_ONLY) for p in own), *shared]
    run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    del run.__wrapped__
    return run
