"""`dcpc report | plan | source | check`: the decisions of a compile, and whether it is right.

    dcpc plan examples.train_text:model --buckets examples/buckets.yaml --device h200 --world 8

For a plan one process is enough and nothing is run: it is a pure function of the model, the buckets
and the options. `check` runs the model on small shapes, on ranks of its own or torchrun's.
"""

from __future__ import annotations

import functools
import itertools
import platform
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer

from dcpc import __version__
from dcpc.api import rank_memory_bytes
from dcpc.commands.calibrate import calibrate_command
from dcpc.commands.check.check import CheckRequest, check_model
from dcpc.commands.replay import replay as replayed
from dcpc.commands.report import (
    Needs,
    crossing_lines,
    degree_crossings,
    html_page,
    needs,
    needs_text,
    overview_png,
    remedy_lines,
    settings_text,
    what_if,
    what_if_text,
)
from dcpc.commands.shared.drawing import check_drawable
from dcpc.commands.shared.factories import check_writable, writing
from dcpc.commands.shared.options import (
    Attention,
    BucketFile,
    Factory,
    Lengths,
    LossName,
    SomeBuckets,
    Stages,
    planning,
    reported,
)
from dcpc.commands.shared.planned import NamedModel
from dcpc.commands.simulate import (
    SimulationRequest,
    default_degrees,
    read_cost,
    simulate_cost,
    simulate_model,
    simulate_stages,
    source_of,
)
from dcpc.compiled.pipeline import stages_report
from dcpc.errors import BucketError, PlanError
from dcpc.plan.options import PlanOptions
from dcpc.plan.planning import Planned
from dcpc.plan.progress_bar import during, tracked
from dcpc.runtime.planner.plan_file import PlanFile
from dcpc.runtime.planner.table import mode_table

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="What dcpc.compile would decide for a model and its shape buckets; runs nothing.",
)


def print_version(wanted: bool) -> None:
    """Prints the versions of dcpc, torch and Python and ends, where it is wanted."""
    if wanted:
        python = platform.python_version()
        typer.echo(f"dcpc {__version__} (torch {torch.__version__}, Python {python})")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option("--version", callback=print_version, is_eager=True, help="print it and exit"),
    ] = False,
) -> None:
    """Read the options of no command: each has its own."""


@app.command()
@planning
def report(
    factory: Factory,
    buckets: SomeBuckets = None,
    seq: Lengths = None,
    html: Annotated[
        Path | None, typer.Option(metavar="OUT.html", help="the report as a page, with plots")
    ] = None,
    png: Annotated[
        Path | None, typer.Option(metavar="OUT.png", help="the page's plots as one picture")
    ] = None,
    memory: Annotated[
        list[str] | None,
        typer.Option(
            metavar="BYTES",
            help="bytes a rank may use, as 80e9, 80GB or 512MiB; up to 1.0: a share of the "
            "device's; planned for the first, others: what if",
        ),
    ] = None,
    world: Annotated[
        list[int] | None,
        typer.Option(min=1, help="ranks; planned for the first, others: what if"),
    ] = None,
    pipeline: Stages = None,
    full: Annotated[bool, typer.Option("--full", help="formulas, ways to split attention")] = False,
    *,
    options: PlanOptions,
) -> None:
    """Print the plan of each bucket, its costs, and why."""
    memories: Sequence[str | None] = memory or [None]
    worlds = world or [1]
    if pipeline is not None:
        _refuse_beside_stages(pipeline, html=html, png=png, memory=memories[1:], world=worlds[1:])
        told_one = replace(options, memory=memories[0], world=worlds[0])
        cut, said = NamedModel(factory, buckets, seq).cut(told_one, pipeline)
        typer.echo(f"{said}{stages_report(cut, cut.planner.replicas)}", nl=False)
        return
    _check_worlds(worlds, calibrated=options.calibration is not None)
    told = [
        replace(options, memory=bytes_, world=ranks)
        for bytes_, ranks in itertools.product(memories, worlds)
    ]
    check_drawable("--html", html)
    check_drawable("--png", png)
    planned, said = NamedModel(factory, buckets, seq).planned(told[0], partly=True)
    cases = [
        what_if(planned, rank_memory_bytes(o.memory, planned.device, o.world), o.world)
        for o in tracked(told[1:], "what if", lambda o: f"{o.memory or ''} on {o.world} ranks")
    ]
    crossings = degree_crossings(planned)
    typer.echo(said, nl=False)
    text = []
    if planned.misfits:
        text += [needs_text(planned, _needs(planned, told[0]))]
        text += ["", "of the buckets that fit:", ""] if planned.plans else []
    if planned.plans:
        text += [planned.report(full), *crossing_lines(planned, crossings)]
    text += ["", what_if_text(cases)] if cases else []
    typer.echo("\n".join(line.rstrip("\n") for line in text))
    for file in (html, png) if planned.misfits else ():
        if file is not None:
            typer.echo(f"did not write {file}, as not every bucket fits", err=True)
    _refuse_misfits(planned)
    with during("draw"):
        if html is not None:
            _write(html, html_page(planned, factory, cases, crossings).encode())
        if png is not None:
            _write(png, overview_png(planned))


def _refuse_beside_stages(pipeline: int | None, **given: object) -> None:
    """Refuses options that a command does not support for a model in stages."""
    for name in (name for name, value in given.items() if value and pipeline is not None):
        raise PlanError(
            f"got --pipeline {pipeline} with --{name}, or with more than one; expected one number "
            f"of ranks and one memory, and a picture by simulate; leave --{name} out"
        )


def _check_worlds(worlds: Sequence[int], calibrated: bool) -> None:
    """Refuses `--world` values for which the calibration was not measured."""
    if calibrated and len(set(worlds)) > 1:
        raise PlanError(
            f"report: got --calibration with --world {', '.join(map(str, worlds))}; expected one "
            "number of ranks, that of the calibration: it says nothing about others; leave out the "
            "other --world, or --calibration"
        )


def _write(file: Path, content: bytes) -> None:
    with writing(file):
        file.write_bytes(content)
    typer.echo(f"wrote {file}", err=True)


def _needs(planned: Planned, options: PlanOptions) -> Needs:
    """Returns the needs of the buckets that no setting fits."""

    def memory_of(world: int) -> int:
        return rank_memory_bytes(options.memory, planned.device, world)

    return needs(planned, memory_of)


def _refuse_misfits(planned: Planned) -> None:
    """Ends a command, after it printed its tables, where a bucket fits with no setting."""
    if planned.misfits:
        first, *more = planned.misfits.values()
        others = f" ({len(more)} more of {len(planned.tables)} do not fit either)" if more else ""
        raise PlanError(f"{first}{others}")


@app.command()
@planning
def plan(
    factory: Factory, buckets: SomeBuckets = None, seq: Lengths = None, *, options: PlanOptions
) -> None:
    """Print every setting tried for each bucket, whether it fits, and the chosen one."""
    planned, said = NamedModel(factory, buckets, seq).planned(options, partly=True)
    typer.echo(said + settings_text(planned), nl=False)
    if planned.misfits:
        typer.echo("\n".join(remedy_lines(planned, _needs(planned, options))))
    _refuse_misfits(planned)


@app.command()
@planning
def source(
    factory: Factory,
    buckets: SomeBuckets = None,
    seq: Lengths = None,
    bucket: Annotated[
        str | None,
        typer.Option(metavar="DIM=SIZE,...", help="which one, e.g. seq=512; default: the only one"),
    ] = None,
    *,
    options: PlanOptions,
) -> None:
    """Print the forward and backward of one bucket as Python a person can read."""
    wanted = parse_bucket(bucket) if bucket else {}
    planned, said = NamedModel(factory, buckets, seq).planned(options, partly=True)
    only = len(planned.tables) == 1 and not bucket
    found = planned.find(next(iter(planned.tables)).sizes if only else wanted)
    typer.echo(said, nl=False, err=True)
    with during(f"make the source of {found}"):
        text = planned.source(found)
    typer.echo(text, nl=False)


@app.command()
@reported()
def check(
    factory: Factory,
    buckets: BucketFile,
    sp: Annotated[
        int, typer.Option("--sp", min=0, help="ranks; default: 2 alone, all of them by torchrun")
    ] = 0,
    example: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FUNCTION",
            help="called with the sizes, returns some of the inputs: ids, masks; others are drawn",
        ),
    ] = None,
    at: Annotated[
        list[str] | None,
        typer.Option(metavar="DIM=SIZE,...", help="a shape to compare at; may be repeated"),
    ] = None,
    attention: Attention = "auto",
    loss: LossName = None,
    timeout: Annotated[float, typer.Option(min=1.0, help="seconds until ranks are ended")] = 600.0,
) -> None:
    """Check that a model traces, is split, and has its own numbers in float64; exit 1 if not."""
    points = tuple(map(parse_bucket, at or ()))
    request = CheckRequest(factory, str(buckets), sp, example, points, attention, loss)
    text, accepted = check_model(request, timeout)
    typer.echo(text, nl=False)
    if not accepted:
        raise typer.Exit(1)


@app.command()
@functools.partial(planning, without=("world",))
def replay(
    file: Annotated[
        Path, typer.Argument(metavar="PLAN", help="a file that DataLoader.save_plan wrote")
    ],
    factory: Annotated[
        str | None,
        typer.Argument(metavar="MODULE:FACTORY", help="check the plan against this model as it is"),
    ] = None,
    buckets: SomeBuckets = None,
    *,
    options: PlanOptions,
) -> None:
    """Print a recorded step's timeline, gap and limiting cause, and plan the same batch again."""
    recorded = PlanFile.read(file)
    now = None
    if factory is not None:
        if buckets is None:
            raise PlanError("replay: got a model and no buckets; expected both; add --buckets")
        world = recorded.table.world
        planned, _ = NamedModel(factory, buckets).planned(replace(options, world=world))
        now = mode_table(planned, recorded.plan.mode, world, planned.device.node_ranks)
    typer.echo(replayed(recorded, now), nl=False)


@app.command()
@planning
def simulate(
    factory: Annotated[
        str | None,
        typer.Argument(metavar="MODULE:FACTORY", help="the model; none with --cost"),
    ] = None,
    buckets: SomeBuckets = None,
    cost: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="JSON of a cost formula, in place of a model"),
    ] = None,
    lengths: Annotated[
        Path | None, typer.Option(metavar="FILE", help=r'JSON {"lens": \[tokens, ...]}')
    ] = None,
    histogram: Annotated[
        Path | None, typer.Option(metavar="FILE", help=r'CSV of "\[low, high]",count')
    ] = None,
    shares: Annotated[
        str, typer.Option(help="how likely each bucket is, such as 5,3,1, in place of lengths")
    ] = "",
    steps: Annotated[int, typer.Option(min=1, help="global batches")] = 4,
    tokens_per_step: Annotated[
        int, typer.Option(min=0, help="of a global batch; 0: 16,384 a rank")
    ] = 0,
    seed: Annotated[int, typer.Option(help="of the samples")] = 0,
    pipeline: Stages = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="OUT.json", help="Chrome trace of the first steps")
    ] = None,
    png: Annotated[
        Path | None, typer.Option(metavar="OUT.png", help="picture of the first steps")
    ] = None,
    *,
    options: PlanOptions,
) -> None:
    """Predict step time, tokens/s, idling and bytes sent of dcpc and of common baselines."""
    check_writable("--trace", trace)
    check_drawable("--png", png)
    request = SimulationRequest(options.world, steps, tokens_per_step, seed, trace, png)
    drawn = source_of(lengths, histogram, shares)
    if cost is not None:
        _refuse_beside_stages(pipeline, cost=cost)
        typer.echo(simulate_cost(read_cost(cost, options.world), drawn, request), nl=False)
        return
    if factory is None or buckets is None:
        raise PlanError(
            f"simulate: got model {factory} and buckets {buckets}; expected both, or a formula "
            "in --cost; add what is missing"
        )
    if pipeline is not None:
        cut, _ = NamedModel(factory, buckets).cut(options, pipeline)
        typer.echo(simulate_stages(cut, drawn, request), nl=False)
        return
    if options.sp == "auto":
        options = replace(options, sp=default_degrees(options.world))
    planned, _ = NamedModel(factory, buckets).planned(options)
    device = planned.device
    typer.echo(simulate_model(planned, device, drawn, request), nl=False)


app.command("calibrate")(reported()(calibrate_command))


def parse_bucket(text: str) -> Mapping[str, int]:
    """Returns the lengths that a text such as `seq=512` or `height=32,width=48` stands for.

    Raises:
        BucketError: the text is not of this form.
    """
    sizes = {}
    for part in text.split(","):
        name, _, size = (p.strip() for p in part.partition("="))
        if not name.isidentifier() or not size.isdecimal():
            raise BucketError(
                f"got bucket {text!r}; expected DIM=SIZE, several separated by commas, such as "
                "seq=512; correct it"
            )
        sizes[name] = int(size)
    return sizes


if __name__ == "__main__":
    app()
