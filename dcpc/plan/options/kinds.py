"""The options of `dcpc.compile`, `dcpc.api.plan`, the command line and docs/options.md, each once.

A field declares its default, its type, its meaning in a line, its check, and how the command line
reads it. Signatures, docstrings, `dcpc plan --help` and docs/options.md are made of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import torch
import torch.distributed as dist

from dcpc.codegen import BACKENDS
from dcpc.errors import PlanError
from dcpc.passes.sharding.attention_ways import LOWERINGS
from dcpc.plan.options.declared import CommandOption, declare, facts, quoted
from dcpc.plan.options.values import (
    AUTOCAST,
    AWAY,
    PARAMETERS,
    RECOMPUTE,
    VERIFY,
    autocast_of,
    away_kinds,
    check_block,
    check_count,
    check_device,
    check_group,
    check_optimizer_bytes,
    check_pipeline,
    check_speeds,
    check_tile,
    check_timeout,
    disk_of,
    host_of,
    memory_of,
    one_of,
    optimizer_bytes_of,
    parse_block,
    parse_degrees,
    parse_tile,
)
from dcpc.symbolic_profile import DEVICES, Calibration, Device, OptimizerLike
from dcpc.trace import checked_dtype
from dcpc.trace.loss import Loss, MicroStatistics, check_loss, returns_statistics
from dcpc.trace.statistics import BATCH_NORM, MICRO


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """Options that `compile` and `plan` share.

    Raises:
        DcpcError: a value is impossible.
    """

    memory: int | float | str | None = declare(
        None,
        'bytes a rank may use, model and optimizer included, as 80e9, `"80GB"` or '
        '`"512MiB"`; up to 1.0: a share of the device\'s',
        default="the device's (of a CPU: its share)",
        check=memory_of,
        command=CommandOption(str | None, metavar="BYTES"),
    )
    device: str | Device = declare(
        "auto",
        'what costs are predicted for: `"auto"` (this machine\'s), '
        f"{', '.join(d.name for d in DEVICES)}, or a `Device`",
        check=check_device,
        command=CommandOption(str, choices=("auto", *(d.name for d in DEVICES))),
    )
    sp: int | str | Sequence[int] = declare(
        "auto",
        "degree of sequence parallelism of every bucket, a divisor of the ranks; or degrees to "
        "plan with, any up to the ranks",
        default='`"auto"`: every divisor of the ranks',
        command=CommandOption(str, parse_degrees, choices=("auto",)),
    )
    recompute: str = declare(
        "auto",
        'what backward makes again: `"auto"` (or `"pyramid"`), `"none"` or `"all"`',
        default='`"auto"`: as little as fits',
        check=one_of("recompute", RECOMPUTE),
        command=CommandOption(str, choices=RECOMPUTE),
    )
    tile: int | str = declare(
        "auto",
        "most rows (sample, position) at which values far wider than what enters and leaves, such "
        'as logits, are computed at a time: `"auto"` (4,096, 1,024 or 256, of a bucket that would '
        'recompute or not fit), `"none"`, or a number, for all buckets',
        check=check_tile,
        command=CommandOption(str, parse_tile, choices=("auto", "none")),
    )
    host: int | float | str | None = declare(
        None,
        "bytes of a host's memory, of all its ranks together, in which saved values may wait for "
        "backward, where that is quicker than making them again, or they fit in no other way",
        default="none: values stay",
        check=host_of,
        command=CommandOption(str | None, metavar="BYTES"),
    )
    disk: str | None = declare(
        None,
        "a folder for those that find no room in `host`, the bytes that they may take and, beside "
        '2GB/s, its speed: `"/nvme/dcpc:2TB@5GB/s"`',
        default="none",
        check=disk_of,
        command=CommandOption(str | None, metavar="FOLDER:BYTES"),
    )
    away: str | Sequence[str] = declare(
        "auto",
        'what leaves the device, for `host` or `disk`: `"auto"` (saved values of a bucket that '
        'would recompute or not fit, where that pays), `"none"`, `"all"` (all saved values), or '
        'some of `"activations"` (as `"auto"`), `"optimizer"` (its state lies there) and '
        '`"parameters"` (they, their gradients and that state lie there, and graphs fetch them one '
        "block after the other)",
        check=away_kinds,
        command=CommandOption(str, choices=AWAY),
    )
    backend: str = declare(
        "inductor",
        f"what runs the graphs: {quoted(BACKENDS)}",
        check=one_of("backend", BACKENDS),
        command=CommandOption(str, choices=BACKENDS),
    )
    optimizer: OptimizerLike | None = declare(
        None,
        "what will train the model, whose state takes memory: a class of torch.optim, a "
        "`functools.partial` of one, an optimizer, or a class of your own",
        default="two tensors a trainable parameter (Adam)",
    )
    optimizer_bytes: int | None = declare(
        None,
        "what the optimizer keeps on a rank, where that is known better",
        check=check_optimizer_bytes,
        default="what follows from `optimizer`",
        command=CommandOption(str | None, optimizer_bytes_of, metavar="BYTES"),
    )
    parameters: str = declare(
        "whole",
        'who holds them: `"whole"` (every rank all), `"step"` (a rank updates its rows and keeps '
        "the optimizer's state of those), `\"pull\"` (so, and all ranks of one host's CPU map the "
        'same memory), `"rounds"` (a rank has its rows alone, and graphs gather what they need), '
        'or `"auto"` (the first of these that fits)',
        check=one_of("parameters", PARAMETERS),
        command=CommandOption(str, choices=PARAMETERS),
    )
    block: int | str | None = declare(
        None,
        'with `parameters="rounds"`: the ranks that share them out, a divisor of all; blocks run '
        'free of each other and sum gradients once a step; `"auto"`: the divisor of least '
        "predicted time that fits",
        default='all ranks; with `parameters="auto"` that is `"auto"`',
        check=check_block,
        command=CommandOption(str | None, parse_block, metavar="RANKS"),
    )
    attention: str = declare(
        "auto",
        f'how attention is split: `"auto"`, or {quoted(LOWERINGS)} wherever an attention can '
        "have it",
        default='`"auto"`: as costs least',
        check=one_of("attention", ("auto", *LOWERINGS)),
        command=CommandOption(str, choices=("auto", *LOWERINGS)),
    )
    autocast: torch.dtype | str | None = declare(
        None,
        'mixed precision, `torch.bfloat16`, `"bf16"`, `torch.float16` or `"fp16"`; parameters and '
        "gradients stay as they are",
        default="that around the call",
        check=checked_dtype,
        command=CommandOption(
            str, autocast_of, "none", metavar="|".join(AUTOCAST), choices=tuple(AUTOCAST)
        ),
    )
    calibration: str | Path | Calibration | None = declare(
        None,
        "what `dcpc calibrate` measured of this model on this device and these ranks, or its "
        "file: seconds are predicted by it",
        command=CommandOption(Path | None, metavar="FILE"),
    )
    derive_rules: bool = declare(
        True,
        "find a rule for an op without a sharding rule by runs on small random pieces, and warn "
        "of it; else each rank does all of the op",
        check=one_of("derive_rules", (True, False)),
        command=CommandOption(bool),
    )
    loss: Loss | None = declare(
        None,
        "the loss of a model that returns something else: `loss(outputs, **inputs)`, a function or "
        "a module without parameters; it and the model get those inputs of the buckets that they "
        "take",
        default="what forward returns",
        check=check_loss,
    )
    batch_norm: str = declare(
        "refuse",
        'batch norms in train(): `"refuse"`, or `"micro"`: by the statistics of the micro-batch '
        "that a group runs; running statistics are averaged over the ranks each step",
        check=one_of("batch_norm", BATCH_NORM),
        command=CommandOption(str, choices=BATCH_NORM),
    )

    def __post_init__(self) -> None:
        """Checks every value."""
        for option in fields(self):
            check = facts(option).check
            if check is not None:
                check(getattr(self, option.name))
        if self.batch_norm == MICRO and not returns_statistics(self.loss):
            object.__setattr__(self, "loss", MicroStatistics(self.loss))
        if self.optimizer is not None and self.optimizer_bytes is not None:
            raise PlanError(
                "got optimizer= and optimizer_bytes=; expected one of them: what the optimizer's "
                "state takes follows from the first, and the second says it; leave one out"
            )

        if away_kinds(self.away)[1]:
            self._check_away()
        if self.block is not None and self.held not in ("rounds", "auto"):
            raise PlanError(
                f"got block={self.block!r} with parameters={self.parameters!r}; expected "
                "parameters='rounds': of the other ways to hold them none gathers within a block; "
                "leave it out, or take 'rounds'"
            )

    @property
    def held(self) -> str:
        """Returns the way to hold parameters: "rounds" where they are away."""
        return "rounds" if away_kinds(self.away)[1] else self.parameters

    def _check_away(self) -> None:
        if self.block is not None:
            raise PlanError(
                f"got block={self.block!r} with away={self.away!r}; expected none: ranks of "
                "several blocks sum gradients by the device's links, and these lie elsewhere; "
                "leave it out"
            )
        if self.parameters not in ("whole", "rounds", "auto"):
            raise PlanError(
                f"got parameters={self.parameters!r} with away={self.away!r}; expected "
                "parameters='rounds', or to leave it out: graphs fetch what lies elsewhere one "
                "block after the other, and of the others none gathers; leave it out"
            )

    @property
    def recompute_mode(self) -> str:
        """Returns "auto", "none" or "all"."""
        return "auto" if self.recompute == "pyramid" else self.recompute


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions(ModelOptions):
    """Options of `plan`, and of every command that plans."""

    world: int = declare(
        1,
        "number of ranks to plan for",
        check=check_count("world", 1),
        command=CommandOption(int, least=1),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileOptions(ModelOptions):
    """Options of `compile`."""

    group: dist.ProcessGroup | None = declare(
        None, "a process group", default="all ranks, or one alone", check=check_group
    )
    verify: str = declare(
        "auto",
        "what is compared with your model, loss and every gradient, at small sizes: "
        '`"auto"` (traces and variants, within a tenth of what compiling takes or 2 s), `"full"` '
        '(every row of every bucket) or `"off"`',
        check=one_of("verify", VERIFY),
    )
    timeout: float = declare(
        60.0,
        "seconds without a sign of life after which a rank is lost, and an error on all others; "
        "what has ended or failed is told at once, and one that lives (compiles) is waited for",
        check=check_timeout,
    )

    speeds: str | Sequence[float] = declare(
        "equal",
        'how fast ranks are beside each other: `"equal"`, one number for each, as `[1.0, 0.5]`, or '
        '`"auto"`: measured while they train, and plans follow (seeds of dropout follow plans)',
        check=check_speeds,
    )

    unpad: bool | str = declare(
        False,
        "run calls for the rows alone that an attention mask says are valid: "
        '`"auto"` (where that pays, and all that is returned is as it was), `True` (wherever the '
        "loss and every gradient are as they were; other outputs are 0 at padded rows) or `False`",
        check=one_of("unpad", ("auto", True, False)),
    )

    pipeline: int | str | None = declare(
        None,
        "stages of a pipeline: each rank runs one and has its parameters alone; the ranks are that "
        'many for each pipeline, and pipelines share the samples; or `"auto"`: no pipeline or as '
        "many stages as end a step first, as predicted",
        default="every rank runs the whole model",
        check=check_pipeline,
    )

    def planned_for(self, world: int) -> PlanOptions:
        """Returns these options without those of `compile` alone."""
        shared = {option.name: getattr(self, option.name) for option in fields(ModelOptions)}
        return PlanOptions(**shared, world=world)
