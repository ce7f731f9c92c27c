"""`dcpc calibrate`: measures a user's model on this device, alone or on ranks, into a file."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer

from dcpc.buckets import Buckets
from dcpc.codegen import BACKENDS
from dcpc.commands.calibrate.calibrate import calibrate
from dcpc.commands.shared.factories import check_writable, load_example, load_loss, load_model
from dcpc.commands.shared.options import Autocast, Backend, BucketFile, Factory, LossName, offered
from dcpc.errors import PlanError, check_choice
from dcpc.plan.options import autocast_of
from dcpc.plan.progress_bar import during
from dcpc.runtime.groups.groups import Groups
from dcpc.runtime.groups.local_ranks import run_ranks
from dcpc.symbolic_profile import Calibration, as_text, headed

LIMIT_S = 600.0  # ranks of its own are ended after this
DEFAULT_FILE = Path("calibration.json")


@dataclass(frozen=True, slots=True)
class CalibrationRequest:
    """Arguments of `dcpc calibrate`.

    Attributes:
        factory: `module:factory` of the model.
        file: file of the buckets.
        device: "cpu", "cuda" or "auto": a GPU where there is one.
        backend: "eager" or "inductor".
        autocast: "none", "bfloat16" or "float16".
        example: `module:function` that makes the inputs, or None.
        loss: `module:function` that returns the loss of the model's outputs, or None.
    """

    factory: str
    file: str
    device: str
    backend: str
    autocast: str
    example: str | None
    loss: str | None = None


def calibrate_command(
    factory: Factory,
    buckets: BucketFile,
    device: Annotated[
        str,
        typer.Option(
            help="cpu, cuda, or auto: cuda where it is",
            autocompletion=offered("auto", "cpu", "cuda"),
        ),
    ] = "auto",
    world: Annotated[
        int, typer.Option(min=1, help="ranks to start on this CPU; torchrun brings its own")
    ] = 1,
    backend: Backend = "inductor",
    autocast: Autocast = "none",
    example: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FUNCTION", help="called with the sizes, returns some of the inputs"
        ),
    ] = None,
    loss: LossName = None,
    out: Annotated[Path, typer.Option(metavar="FILE", help="written as JSON")] = DEFAULT_FILE,
) -> None:
    """Measure a model's calls and collectives on this device, for plans with --calibration."""
    check_writable("--out", out)
    request = CalibrationRequest(factory, str(buckets), device, backend, autocast, example, loss)
    found = measured(request, world)
    if found is not None:
        found.write(out)
        typer.echo(calibration_text(found) + f"written to {out}")


def measured(request: CalibrationRequest, world: int) -> Calibration | None:
    """Returns the calibration; None on all of torchrun's ranks but the first.

    Raises:
        PlanError: an option is wrong.
        DcpcError: the file or factory is wrong, or a rank failed or did not end.
    """
    _check(request)
    if "RANK" in os.environ:
        with during("calibrate"):
            found = on_rank(int(os.environ["RANK"]), request)
        return found if os.environ["RANK"] == "0" else None
    if world == 1:
        with during("calibrate"):
            return on_rank(0, request)
    if _device(request).type != "cpu":
        raise PlanError(
            f"calibrate: got --world {world} with a GPU; expected torchrun to start ranks on GPUs; "
            f"run torchrun --nproc-per-node {world} -m dcpc calibrate ... without --world"
        )
    with during(f"calibrate on {world} ranks"):
        ranks: list[Calibration] = run_ranks(on_rank, world, request, timeout_s=LIMIT_S)
    return ranks[0]


def on_rank(rank: int, request: CalibrationRequest) -> Calibration:
    """Returns the calibration; every rank calls this."""
    at = _device(request)
    model = load_model(request.factory).to(at)
    Groups.default(device=at)  # before anything takes long: is every rank there?
    return calibrate(
        model,
        Buckets.from_yaml(request.file),
        backend=request.backend,
        autocast=autocast_of(request.autocast),
        example=load_example(request.example),
        loss=load_loss(request.loss),
    )


def calibration_text(found: Calibration) -> str:
    """Returns a table of the measured rates and their errors, for a person."""
    key, fits = found.key, found.fits
    ranks = "1 rank" if key.world == 1 else f"{key.world} ranks"
    title = f"{key.device}: {key.machine}; {ranks}, {key.dtype}, {key.backend}"
    words, numbers = ("class", "direction", "dtype"), ("us at least", "GFLOP/s", "GB/s")
    table = headed(title, words, numbers)
    for c in fits.classes:
        rates = [1 / y for _, y in c.knots] or [1 / c.s_per_flop if c.s_per_flop else 0.0]
        flops = " to ".join(f"{r / 1e9:.1f}" for r in sorted({min(rates), max(rates)}) if r)
        per_byte = {c.s_per_byte, c.s_per_byte + c.s_per_far_byte}
        moved = " to ".join(f"{1e-9 / s:.1f}" for s in sorted(per_byte) if s)
        direction = "forward" if c.forward else "backward"
        table.add_row(c.op_class, direction, str(c.dtype), f"{1e6 * c.launch_s:.1f}", flops, moved)
    for link in fits.collectives:
        sent = f"{1e-9 / link.s_per_byte:.2f}"
        table.add_row(link.op, f"{link.ranks} ranks", "", f"{1e6 * link.alpha_s:.1f}", "", sent)
    lines = as_text(table, width=100).splitlines()
    for p in found.points:
        sizes = ", ".join(f"{n} {s}" for n, s in p.sizes.items())
        lines.append(
            f"{sizes}: {1e3 * p.measured_s:.1f} ms measured, {1e3 * p.predicted_s:.1f} by the fits"
        )
    worst = max(abs(p.predicted_s / p.measured_s - 1) for p in found.points)
    off = f"seconds ± {fits.error:.1%} in the median of these sizes, up to {worst:.1%} off"
    lines.append(f"in {found.seconds_s:.1f} s; {off}")
    return "\n".join(lines) + "\n"


def _device(request: CalibrationRequest) -> torch.device:
    kind = request.device
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cpu":
        return torch.device("cpu")
    return torch.device(kind, int(os.environ.get("LOCAL_RANK", "0")))


def _check(request: CalibrationRequest) -> None:
    """Refuses wrong options before any rank starts."""
    check_choice("calibrate: got --device ", request.device, ("auto", "cpu", "cuda"))
    autocast_of(request.autocast)
    if request.device == "cuda" and not torch.cuda.is_available():
        raise PlanError("calibrate: got --device cuda; expected a GPU that torch sees; use cpu")
    check_choice("got --backend ", request.backend, BACKENDS)
    Buckets.from_yaml(request.file)
    load_loss(request.loss)
    load_example(request.example)
