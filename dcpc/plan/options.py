"""The options of `dcpc.compile`, `dcpc.api.plan`, the command line and docs/train.md, each once.

A field declares its default, its type, its meaning in a line, its check, and how the command line
reads it. Signatures, docstrings, `dcpc plan --help` and the table of docs/train.md are made of it.
"""

from __future__ import annotations

import functools
import inspect
import math
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any, ParamSpec, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from dcpc.buckets import Buckets
from dcpc.codegen import BACKENDS, check_backend
from dcpc.errors import BucketError, DcpcError, GroupError, PlanError, ProfileError, TraceError
from dcpc.passes.sharding.attention_ways import LOWERINGS, check_lowering
from dcpc.symbolic_profile import DEVICES, Calibration, Device, OptimizerLike, bytes_of, find
from dcpc.trace import checked_dtype
from dcpc.trace.loss import Loss, check_loss
from dcpc.trace.wrappers import refuse_wrapped

# "pyramid" is VideoSys' name for what "auto" does: short samples recompute little, long ones more.
RECOMPUTE = ("auto", "pyramid", "none", "all")
VERIFY = ("auto", "full", "off")
PARAMETERS = ("whole", "step", "pull", "rounds", "auto")
_LARGEST = (1 << 63) - 1  # integers from here on fit in no tensor
AUTOCAST = {"none": None, "bfloat16": torch.bfloat16, "float16": torch.float16}

P = ParamSpec("P")
T = TypeVar("T")
Result_co = TypeVar("Result_co", covariant=True)


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


def memory_of(memory: int | float | str | None) -> int | float | None:
    """Returns the number that a memory stands for: bytes, or up to 1.0 a share; None as it is.

    Args:
        memory: a number, or a text such as "80GB", "512MiB" or "1.5e9".

    Raises:
        PlanError: it is not a positive number.
    """
    if memory is None:
        return None
    found = bytes_of(memory) if isinstance(memory, str) else memory
    number = isinstance(found, int | float) and not isinstance(found, bool)
    if found is None or not number or not 0 < found < math.inf:
        raise PlanError(
            f"got memory={memory!r}; expected a positive number of bytes a rank may use, such as "
            "80e9, 80GB (1e9 bytes each) or 512MiB (2**20 each); correct it, or leave it out for "
            "all that the device has"
        )
    return found


def _optimizer_bytes_of(text: str | None) -> int | None:
    """Returns the bytes that the command line's text stands for."""
    if text is None:
        return None
    found = bytes_of(text)
    if found is None or found == math.inf:
        raise PlanError(
            f"got --optimizer-bytes {text}; expected a number of bytes from 0, such as 2e9, 2GB or "
            "512MiB; correct it"
        )
    return int(found)


def degrees(sp: int | str | Sequence[int], world: int) -> tuple[int, ...]:
    """Returns the degrees to try, ascending; a bucket's own plan takes a divisor of `world`.

    Raises:
        PlanError: a forced value is not possible.
    """
    divisors = tuple(d for d in range(1, world + 1) if world % d == 0)
    if sp == "auto":
        return divisors
    if isinstance(sp, Sequence) and not isinstance(sp, str):
        whole = all(isinstance(d, int) and not isinstance(d, bool) for d in sp)
        if whole and all(1 <= d <= world for d in sp) and set(sp) & set(divisors):
            return tuple(sorted(set(sp)))
    elif not isinstance(sp, bool) and isinstance(sp, int) and sp in divisors:
        return (sp,)
    raise PlanError(
        f"got sp={sp!r} with {world} ranks; expected 'auto' or a divisor of the world size "
        f"({', '.join(map(str, divisors))}), or degrees up to it with one of these in it; "
        "choose one, or run on a multiple of it"
    )


def _check_timeout(timeout: object) -> None:
    number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
    if not number or not 0 < timeout < math.inf:  # type: ignore[operator]
        raise PlanError(
            f"got timeout={timeout!r}; expected a positive number of seconds, after which a rank "
            "without a sign of life is lost; correct it, or leave it out for 60"
        )


def _check_recompute(mode: str) -> None:
    if mode not in RECOMPUTE:
        raise PlanError(
            f"got recompute={mode!r}; expected 'auto', 'none' or 'all' ('pyramid' is 'auto'); "
            "choose one"
        )


def _check_verify(mode: str) -> None:
    if mode not in VERIFY:
        raise PlanError(f"got verify={mode!r}; expected one of {', '.join(VERIFY)}; choose one")


def _check_unpad(given: object) -> None:
    if not isinstance(given, bool) and given != "auto":
        raise PlanError(
            f"got unpad={reprlib.repr(given)}; expected 'auto', True or False; pass one"
        )


def _check_parameters(mode: str) -> None:
    if mode not in PARAMETERS:
        raise PlanError(
            f"got parameters={mode!r}; expected one of {', '.join(PARAMETERS)}; choose one"
        )


def _check_block(block: object) -> None:
    whole = isinstance(block, int) and not isinstance(block, bool) and block >= 2
    if block not in (None, "auto") and not whole:
        raise PlanError(
            f"got block={block!r}; expected a number of ranks from 2 on that divides all of them, "
            "'auto', or None for all; correct it, or take parameters='whole' for blocks of one"
        )


def block_of(block: int | None, sps: Sequence[int], world: int) -> tuple[int, tuple[int, ...]]:
    """Returns the ranks that share parameters out in rounds, and the degrees that fit them.

    A group of ranks that take a sequence together is within a block, or is of whole blocks.

    Args:
        block: as for `compile`, None: all ranks.
        sps: degrees to try.
        world: number of ranks.

    Raises:
        PlanError: the block does not divide the ranks, or no degree fits it.
    """
    if block is None or block == world:
        return world, tuple(sps)
    if world % block:
        raise PlanError(
            f"got block={block} with {world} ranks; expected a divisor of them from 2 on "
            f"({', '.join(str(d) for d in range(2, world + 1) if world % d == 0) or 'none'}); "
            "choose one, or leave it out for all ranks"
        )
    fitting = [sp for sp in sps if world % sp == 0 and (block % sp == 0 or sp % block == 0)]
    if not fitting:
        raise PlanError(
            f"got sp={', '.join(map(str, sps))} with block={block}; expected a degree that divides "
            "the block or is a multiple of it, and divides the ranks: ranks of a block gather "
            "parameters together; choose another of them"
        )
    return block, tuple(fitting)


def parse_block(text: str | None) -> int | str | None:
    """Returns the block that the command line's text stands for."""
    return int(text) if text is not None and text.isdecimal() else text


def _check_speeds(speeds: object) -> None:
    """Refuses what is neither a word nor positive numbers.

    Raises:
        PlanError: it is.
    """
    if isinstance(speeds, str) and speeds in ("auto", "equal"):
        return
    numbers = isinstance(speeds, list | tuple) and all(
        isinstance(s, int | float) and not isinstance(s, bool) and 0 < s < math.inf for s in speeds
    )
    if not numbers or not speeds:
        raise PlanError(
            f"got speeds={speeds!r}; expected 'auto', 'equal' or a positive number for each rank, "
            "such as [1.0, 0.5]; choose one"
        )


def _check_pipeline(pipeline: object) -> None:
    """Refuses what is no number of stages.

    Raises:
        PlanError: it is none.
    """
    whole = isinstance(pipeline, int) and not isinstance(pipeline, bool)
    if pipeline in (None, "auto"):
        return
    if not whole or not 2 <= int(pipeline) <= _LARGEST:  # type: ignore[call-overload]
        raise PlanError(
            f"got pipeline={pipeline!r}; expected a number of stages from 2 on, or 'auto'; pass "
            "one, or leave it out for ranks that run the whole model"
        )


def _check_given(model: object, buckets: object) -> None:
    """Refuses what is no module, or no buckets.

    Raises:
        TraceError: `model` is no `nn.Module`, or a wrapper of one.
        BucketError: `buckets` are no `Buckets`.
    """
    if not isinstance(model, nn.Module):
        made = isinstance(model, type) and issubclass(model, nn.Module)
        got = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        raise TraceError(
            f"model: got {got}; expected a torch.nn.Module; "
            + ("call the class to make one" if made else "put the function into a module's forward")
        )
    refuse_wrapped(model)
    if not isinstance(buckets, Buckets):
        raise BucketError(
            f"buckets: got {type(buckets).__name__}; expected dcpc.Buckets; pass "
            "dcpc.Buckets(inputs=..., sizes=...), or dcpc.Buckets.from_yaml(file)"
        )


def _check_device(device: str | Device) -> None:
    if not isinstance(device, str | Device):
        known = ", ".join(d.name for d in DEVICES)
        raise ProfileError(
            f"device: got {reprlib.repr(device)}; expected 'auto', one of {known}, or a Device; "
            "pass one"
        )
    if isinstance(device, str) and device != "auto":
        find(device)


def _check_count(what: str, least: int) -> Callable[[object], None]:
    """Returns what refuses all but integers from `least` on, and None where that is a default."""

    def check(given: object) -> None:
        whole = isinstance(given, int) and not isinstance(given, bool)
        if not whole or not least <= int(given) <= _LARGEST:  # type: ignore[call-overload]
            raise PlanError(
                f"got {what}={reprlib.repr(given)}; expected an integer from {least} to "
                f"{_LARGEST}; correct it"
            )

    return check


def _check_optimizer_bytes(given: int | None) -> None:
    if given is not None:
        _check_count("optimizer_bytes", 0)(given)


def _check_derive(given: object) -> None:
    if not isinstance(given, bool):
        raise PlanError(f"got derive_rules={reprlib.repr(given)}; expected True or False; pass one")


def _check_group(group: object) -> None:
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise GroupError(
            f"got group={reprlib.repr(group)}; expected a torch.distributed.ProcessGroup that this "
            "rank is in; make one by torch.distributed.new_group, or leave it out for all ranks"
        )


def parse_degrees(text: str) -> int | str | list[int]:
    """Returns the degree, or the degrees, that a text such as `4` or `1,2,4` stands for."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        return text
    return int(text) if len(parts) == 1 else [int(part) for part in parts]


def autocast_of(name: str) -> torch.dtype | None:
    """Returns the dtype of one of `AUTOCAST`.

    Raises:
        PlanError: there is no such name.
    """
    check_choice("got --autocast", name, AUTOCAST)
    return AUTOCAST[name]


# ------------------------------------------------------------------------------ one option


@dataclass(frozen=True, slots=True)
class CommandOption:
    """How the command line reads an option.

    Attributes:
        type: what typer makes of the text.
        value: option from this.
        default: of that type; None: the option's own default.
        least: smallest number.
        metavar: what help calls the value.
        choices: values that a shell offers.
    """

    type: Any
    value: Callable[[Any], Any] = lambda given: given
    default: Any = None
    least: int | None = None
    metavar: str | None = None
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class OptionFacts:
    """What is known of an option besides its name, type and default.

    Attributes:
        meaning: for documents, docstrings and help.
        default: what documents say of the default; "": its value.
        check: raises a `DcpcError` for a value that is not possible.
        command: how the command line reads it; None: it is Python's alone.
    """

    meaning: str
    default: str = ""
    check: Callable[[Any], object] | None = None
    command: CommandOption | None = None


def _option(value: Any, meaning: str, **more: Any) -> Any:
    return field(default=value, metadata={"facts": OptionFacts(meaning, **more)})


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f'`"{name}"`' for name in names)


def facts(option: Field[Any]) -> OptionFacts:
    """Returns what is known of a field of the types below."""
    found: OptionFacts = option.metadata["facts"]
    return found


# ------------------------------------------------------------------------- the options


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """What both `compile` and `plan` are told.

    Raises:
        DcpcError: a value is not possible.
    """

    memory: int | float | str | None = _option(
        None,
        'bytes a rank may use, model and optimizer included, as 80e9, `"80GB"` or '
        '`"512MiB"`; up to 1.0: a share of the device\'s',
        default="the device's (of a CPU: its share)",
        check=memory_of,
        command=CommandOption(str | None, metavar="BYTES"),
    )
    device: str | Device = _option(
        "auto",
        'what costs are predicted for: `"auto"` (this machine\'s), '
        f"{', '.join(d.name for d in DEVICES)}, or a `Device`",
        check=_check_device,
        command=CommandOption(str, choices=("auto", *(d.name for d in DEVICES))),
    )
    sp: int | str | Sequence[int] = _option(
        "auto",
        "degree of sequence parallelism of every bucket, a divisor of the ranks; or degrees to "
        "plan with, any up to the ranks",
        default='`"auto"`: every divisor of the ranks',
        command=CommandOption(str, parse_degrees, choices=("auto",)),
    )
    recompute: str = _option(
        "auto",
        'what backward makes again: `"auto"` (or `"pyramid"`), `"none"` or `"all"`',
        default='`"auto"`: as little as fits',
        check=_check_recompute,
        command=CommandOption(str, choices=RECOMPUTE),
    )
    backend: str = _option(
        "inductor",
        f"what runs the graphs: {_quoted(BACKENDS)}",
        check=check_backend,
        command=CommandOption(str, choices=BACKENDS),
    )
    optimizer: OptimizerLike | None = _option(
        None,
        "what will train the model, whose state takes memory: a class of torch.optim, a "
        "`functools.partial` of one, an optimizer, or a class of your own",
        default="two tensors a trainable parameter (Adam)",
    )
    optimizer_bytes: int | None = _option(
        None,
        "what the optimizer keeps on a rank, where that is known better",
        check=_check_optimizer_bytes,
        default="what follows from `optimizer`",
        command=CommandOption(str | None, _optimizer_bytes_of, metavar="BYTES"),
    )
    parameters: str = _option(
        "whole",
        'who holds them: `"whole"` (every rank all), `"step"` (a rank updates its rows and keeps '
        "the optimizer's state of those), `\"pull\"` (so, and all ranks of one host's CPU map the "
        'same memory), `"rounds"` (a rank has its rows alone, and graphs gather what they need), '
        'or `"auto"` (the first of these that fits)',
        check=_check_parameters,
        command=CommandOption(str, choices=PARAMETERS),
    )
    block: int | str | None = _option(
        None,
        'with `parameters="rounds"`: the ranks that share them out, a divisor of all; blocks run '
        'free of each other and sum gradients once a step; `"auto"`: the divisor of least '
        "predicted time that fits",
        default='all ranks; with `parameters="auto"` that is `"auto"`',
        check=_check_block,
        command=CommandOption(str | None, parse_block, metavar="RANKS"),
    )
    attention: str = _option(
        "auto",
        f'how attention is split: `"auto"`, or {_quoted(LOWERINGS)} wherever an attention can '
        "have it",
        default='`"auto"`: as costs least',
        check=check_lowering,
        command=CommandOption(str, choices=("auto", *LOWERINGS)),
    )
    autocast: torch.dtype | None = _option(
        None,
        "mixed precision, `torch.bfloat16` or `torch.float16`; parameters and gradients stay as "
        "they are",
        default="that around the call",
        check=checked_dtype,
        command=CommandOption(
            str, autocast_of, "none", metavar="|".join(AUTOCAST), choices=tuple(AUTOCAST)
        ),
    )
    calibration: str | Path | Calibration | None = _option(
        None,
        "what `dcpc calibrate` measured of this model on this device and these ranks, or its "
        "file: seconds are predicted by it",
        command=CommandOption(Path | None, metavar="FILE"),
    )
    derive_rules: bool = _option(
        True,
        "find a rule for an op without a sharding rule by runs on small random pieces, and warn "
        "of it; else each rank does all of the op",
        check=_check_derive,
        command=CommandOption(bool),
    )
    loss: Loss | None = _option(
        None,
        "the loss of a model that returns something else: `loss(outputs, **inputs)`, a function or "
        "a module without parameters; it and the model get those inputs of the buckets that they "
        "take",
        default="what forward returns",
        check=check_loss,
    )

    def __post_init__(self) -> None:
        """Checks every value."""
        for option in fields(self):
            check = facts(option).check
            if check is not None:
                check(getattr(self, option.name))
        if self.optimizer is not None and self.optimizer_bytes is not None:
            raise PlanError(
                "got optimizer= and optimizer_bytes=; expected one of them: what the optimizer's "
                "state takes follows from the first, and the second says it; leave one out"
            )

        if self.block is not None and self.parameters not in ("rounds", "auto"):
            raise PlanError(
                f"got block={self.block!r} with parameters={self.parameters!r}; expected "
                "parameters='rounds': of the other ways to hold them none gathers within a block; "
                "leave it out, or take 'rounds'"
            )

    @property
    def recompute_mode(self) -> str:
        """Returns "auto", "none" or "all"."""
        return "auto" if self.recompute == "pyramid" else self.recompute


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions(ModelOptions):
    """What `plan` is told, and every command that plans."""

    world: int = _option(
        1,
        "number of ranks to plan for",
        check=_check_count("world", 1),
        command=CommandOption(int, least=1),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileOptions(ModelOptions):
    """What `compile` is told."""

    group: dist.ProcessGroup | None = _option(
        None, "a process group", default="all ranks, or one alone", check=_check_group
    )
    verify: str = _option(
        "auto",
        "what is compared with your model, loss and every gradient, at small sizes: "
        '`"auto"` (traces and variants, within a tenth of what compiling takes or 2 s), `"full"` '
        '(every row of every bucket) or `"off"`',
        check=_check_verify,
    )
    timeout: float = _option(
        60.0,
        "seconds without a sign of life after which a rank is lost, and an error on all others; "
        "what has ended or failed is told at once, and one that lives (compiles) is waited for",
        check=_check_timeout,
    )

    speeds: str | Sequence[float] = _option(
        "equal",
        'how fast ranks are beside each other: `"equal"`, one number for each, as `[1.0, 0.5]`, or '
        '`"auto"`: measured while they train, and plans follow (seeds of dropout follow plans)',
        check=_check_speeds,
    )

    unpad: bool | str = _option(
        False,
        "run calls at sp 1 for the rows alone that an attention mask says are valid: "
        '`"auto"` (where that pays, and all that is returned is as it was), `True` (wherever the '
        "loss and every gradient are as they were; other outputs are 0 at padded rows) or `False`",
        check=_check_unpad,
    )

    pipeline: int | str | None = _option(
        None,
        "stages of a pipeline: each rank runs one and has its parameters alone; the ranks are that "
        'many for each pipeline, and pipelines share the samples; or `"auto"`: no pipeline or as '
        "many stages as end a step first, as predicted",
        default="every rank runs the whole model",
        check=_check_pipeline,
    )

    def planned_for(self, world: int) -> PlanOptions:
        """Returns these options without those of `compile` alone.

        Args:
            world: number of ranks.
        """
        shared = {option.name: getattr(self, option.name) for option in fields(ModelOptions)}
        return PlanOptions(**shared, world=world)


# ------------------------------------------------------ signatures and documents from them


class Taking(Protocol[P, Result_co]):
    """A function of a model, its buckets and options by name."""

    def __call__(
        self, model: nn.Module, buckets: Buckets, *args: P.args, **options: P.kwargs
    ) -> Result_co:
        """Calls it."""


def taking(
    kind: Callable[P, T],
    refused: Callable[[DcpcError, Mapping[str, Any]], None] | None = None,
) -> Callable[[Callable[[nn.Module, Buckets, T], Result_co]], Taking[P, Result_co]]:
    """Lets callers of a function give the fields of its options by name.

    The signature and the docstring that Python shows have a line an option.

    Args:
        kind: a type of options, the function's last argument.
        refused: is told of an error in them, and of all arguments, before it is raised.
    """
    make: Callable[..., T] = kind
    options = fields(kind)  # type: ignore[arg-type]
    keywords = [
        inspect.Parameter(
            o.name, inspect.Parameter.KEYWORD_ONLY, default=o.default, annotation=o.type
        )
        for o in options
    ]

    def decorate(function: Callable[[nn.Module, Buckets, T], Result_co]) -> Taking[P, Result_co]:
        told = inspect.signature(function)
        own = [p for p in told.parameters.values() if p.name != "options"]
        signature = told.replace(parameters=[*own, *keywords])

        @functools.wraps(function)
        def run(*args: Any, **given: Any) -> Result_co:
            bound = signature.bind(*args, **given)  # refuses unknown names as any call does
            model, buckets = bound.args
            try:
                _check_given(model, buckets)
                options = make(**bound.kwargs)
            except DcpcError as error:
                if refused is not None:
                    refused(error, bound.arguments)
                raise
            return function(model, buckets, options)

        run.__signature__ = signature  # type: ignore[attr-defined]
        lines = [f"    {o.name}: {facts(o).meaning}. Default: {default_of(o)}." for o in options]
        run.__doc__ = "\n".join([inspect.getdoc(function) or "", "", "Options:", *lines])
        return run

    return decorate


def default_of(option: Field[Any]) -> str:
    """Returns what documents say of an option's default."""
    quote = '"' * isinstance(option.default, str)
    return facts(option).default or f"`{quote}{option.default}{quote}`"


def options_table(kind: type[ModelOptions]) -> str:
    """Returns the options of a type as a table of Markdown."""
    rows = [f"| `{o.name}` | {default_of(o)} | {facts(o).meaning} |" for o in fields(kind)]
    return "\n".join(["| option | default | meaning |", "|---|---|---|", *rows]) + "\n"


def commanded() -> Mapping[str, tuple[OptionFacts, CommandOption, Any]]:
    """Returns facts, reading and default of each option of `plan` that the command line has."""
    return {
        o.name: (facts(o), read, o.default)
        for o in fields(PlanOptions)
        if (read := facts(o).command) is not None
    }
