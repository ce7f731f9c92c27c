"""What dcpc makes of a program: right, wrong, a crash, or refused by name."""

from __future__ import annotations

import itertools
import random
import re
import traceback
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

import dcpc
from dcpc.buckets import Sizes
from dcpc.codegen import Variant
from dcpc.commands.check import SplitModel
from dcpc.errors import CodegenError, DcpcError, DefectError
from dcpc.fx.garbage import without_collection
from dcpc.ir import Partition
from dcpc.trace.loss import find_loss
from dcpc.verify.exactness import (
    EXACT,
    Difference,
    LossAndGradients,
    error_of,
    gradient_errors,
    loss_error,
)
from dcpc.verify.reference import plain
from dcpc.verify.replay import RightKernels
from tests.fuzz.program import data

NUDGE = 1e-14  # relative, of all parameters: what a plain model makes of it is its conditioning
TIMES = 3000  # a difference that is less than this many nudges' says nothing

NOTHING = fx.GraphModule(nn.Module(), fx.Graph())
NO_GRAPHS = Partition(NOTHING, NOTHING, (), (), (), {})  # of a variant asked for integers


@dataclass(frozen=True)
class Outcome:
    """What became of a program.

    Attributes:
        kind: "right", "wrong", "crash", "refused"; "void" where the plain model says nothing: it
            refuses all sizes, is not finite, or changes as much by itself.
        text: the error, or the difference, and the setting.
        alike: the same where two programs fail in the same way.
        setting: that failed.
    """

    kind: str
    text: str = ""
    alike: str = ""
    setting: Setting | None = None


@dataclass(frozen=True)
class Setting:
    """How a program is run: ranks in one process, the lowering of attention, recompute."""

    sp: int = 1
    attention: str = "auto"
    recompute: str = "none"


EVERY = tuple(
    Setting(sp, way, again)
    for sp, way in ((1, "auto"), (2, "auto"), (2, "ring"), (3, "auto"), (4, "auto"), (4, "hybrid"))
    for again in ("none", "some", "all")
)
# The plan's own menu of recompute, which costs as much time as all else.
MENU = tuple(Setting(sp, "auto", again) for sp in (1, 2, 4) for again in ("menu 0", "menu all"))


def settings(rng: random.Random, count: int) -> list[Setting]:
    """Returns one rank alone, and one drawn setting of 2 to 4 ranks (or more)."""
    alone, more = ([s for s in EVERY if (s.sp > 1) == flag] for flag in (False, True))
    return [rng.choice(alone), *rng.sample(more, count)]


def taken(
    model: nn.Module, inputs: Mapping[str, str], points: Sequence[Sizes], layout: str = ""
) -> list[Sizes]:
    """Returns the sizes at which the plain model has a finite loss and gradients."""
    found = []
    for sizes in points:
        try:
            outcome = plain(model, data(inputs, sizes, layout=layout))
        except (
            RuntimeError,
            ValueError,
            IndexError,
            TypeError,
            NameError,
            AssertionError,
            DcpcError,
        ):
            continue
        loss, gradients = outcome.loss, outcome.gradients
        every = [loss, *(g for g in gradients.values() if g is not None)]
        finite = all(bool(x.isfinite().all()) and float(x.abs().max()) < 1e7 for x in every)
        if finite and len(every) > 1 and loss.dtype == torch.float64:
            found.append(sizes)
    return found


@without_collection()
def judge(
    model: nn.Module,
    inputs: Mapping[str, str],
    points: Sequence[Sizes],
    tried: Sequence[Setting],
    seed: int = 0,
    layout: str = "",
) -> Outcome:
    """Returns what dcpc makes of a module, in settings of ranks and recompute.

    Args:
        model: a module in float64.
        inputs: name -> spec.
        points: sizes of the buckets, none of them 1 in some of the points only.
        tried: the settings.
        seed: of the values that "some" recompute makes again.
        layout: of inputs; the module is in it already.
    """
    now: list[Setting | None] = [None]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.manual_seed(0)
        points = taken(model, inputs, points, layout)
        if not points:
            return Outcome("void", "the plain model does not run")
        try:
            found = _judged(model, inputs, points, tried, random.Random(seed), now, layout)
        except DefectError as error:
            return Outcome("crash", traceback.format_exc(limit=-4), _alike(error), now[0])
        except DcpcError as error:
            return Outcome("refused", f"{type(error).__name__}: {error}", _alike(error), now[0])
        except Exception as error:
            return Outcome("crash", traceback.format_exc(limit=-4), _alike(error), now[0])
    told = [str(w.message) for w in said if "remainder" in str(w.message)]
    if found.kind == "wrong" and told:
        return Outcome("refused", f"a warning: {told[0]}")
    return found


def _judged(
    model: nn.Module,
    inputs: Mapping[str, str],
    points: Sequence[Sizes],
    tried: Sequence[Setting],
    rng: random.Random,
    now: list[Setting | None],
    layout: str,
) -> Outcome:
    buckets = dcpc.Buckets(dict(inputs), [dict(p) for p in points])
    traced = SplitModel(model, buckets, {**points[-1], "batch": 1}, sp=1)
    for setting in tried:
        now[0] = setting
        split = traced.of("eager", setting.sp, setting.attention)
        for sizes in points:
            given = data(inputs, sizes, layout=layout)
            if setting.recompute.startswith("menu"):
                again = setting.recompute.removeprefix("menu ").replace("0", "none")
                found = split.difference(sizes, given, again, in_step=True)
            else:
                found = _difference(split, sizes, given, setting.recompute, rng)
            if found.worst <= EXACT:
                continue
            if found.worst <= TIMES * _nudged(model, given):
                return Outcome("void", "the plain model changes as much by itself")
            where = f"{setting} at {dict(sizes)}"
            how = f"loss {found.loss:.1e}, gradient {found.gradient:.1e} of {found.parameter}"
            return Outcome("wrong", f"{where}: {how}", setting=setting)
    return Outcome("right")


def _alike(error: Exception) -> str:
    """Returns what errors of one cause have in common: the class and how the text begins."""
    frames = traceback.extract_tb(error.__traceback__)
    at = next((f"{f.filename}:{f.name}" for f in reversed(frames) if "/dcpc/" in f.filename), "")
    return f"{type(error).__name__} {at} {re.sub('[0-9]+', '', str(error))[:60]}"


def _difference(
    split: SplitModel,
    sizes: Sizes,
    inputs: Mapping[str, Tensor],
    recompute: str,
    rng: random.Random,
) -> Difference:
    """Returns how far all ranks in one process are from the plain model.

    Args:
        split: the program, placed.
        sizes: length of every dim.
        inputs: by name.
        recompute: "none", "all" or "some": a drawn part of what can be made again, whatever a plan
            would choose.
        rng: draws it.
    """
    symbols = split.program.symbols
    dims = {symbols[n]: size for n, size in sizes.items() if n in symbols}
    integers, lowerings = [], []
    share = {"none": 0.0, "all": 1.0}.get(recompute, rng.random())
    seed = rng.random()
    for rank in range(split.sp):
        lowering, values = _lowered(split, dims, rank)
        lowerings.append(lowering)
        integers.append(values)
    graphs: dict[int, Partition] = {}
    for lowering in lowerings:
        if id(lowering) not in graphs:
            draw = random.Random(seed)
            chosen = [key for key in lowering.keys if draw.random() < share]
            graphs[id(lowering)] = lowering.partition(chosen)
    parts = [graphs[id(lowering)] for lowering in lowerings]
    trained = lowerings[0].joint.trainable
    results, sums = split.given(inputs).of_ranks(parts, integers, trained)
    expected = plain(split.model, inputs)
    found = (LossAndGradients(result.loss, sums) for result in results)
    errors = (error_of(one, expected, none_is_zero=False)[0] for one in found)
    return max(errors, key=lambda error: error.worst)


def _lowered(split: SplitModel, dims: Any, rank: int) -> tuple[Any, dict[str, int]]:
    """Returns the graph that is right for one rank's sizes, and its integers.

    Raises:
        CodegenError: there is none, as `Runnable.variant` says.
    """
    got = ""
    hints = split.runnable.hints(split.placement, "eager", dims, rank)
    for chosen in itertools.chain([None], hints):
        try:
            lowering = split.traced.lowering(split.placement, chosen)
        except CodegenError as error:
            if chosen is None:
                raise
            got = got or str(error)
            continue
        guarded = Variant(
            partition=NO_GRAPHS, integers=lowering.lowered.integers, placeholders=(),
            trainable=(), sp=split.sp, guards=lowering.joint.guards, run_forward=_never,
            run_backward=_never, run_handing_over=None, backend="eager",
        )  # fmt: skip
        values, broken = guarded.integer_values(dims, rank)
        if not broken:
            return lowering, {i.name: v for i, v in zip(guarded.integers, values, strict=True)}
        got = got or f"a graph that assumes {broken}"
    raise CodegenError(f"rank {rank} of {split.sp} at {dims}: {got}")


def _never(arguments: list[Any]) -> Any:
    raise AssertionError("a variant that is asked for its integers alone")


def _nudged(model: nn.Module, inputs: Mapping[str, Tensor]) -> float:
    """Returns how much the plain model's numbers change with its parameters' last bits."""
    expected = plain(model, inputs)
    held = {n: p.detach().clone() for n, p in model.named_parameters()}
    generator = torch.Generator().manual_seed(0)
    worst = 0.0
    for _ in range(2):
        with torch.no_grad():
            for p in model.parameters():
                noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
                p.mul_(1 + NUDGE * noise)
        with RightKernels():
            loss = find_loss(model(**inputs))
            loss.backward()
        errors = gradient_errors(model, expected.gradients)
        model.zero_grad()
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(held[name])
        worst = max(worst, loss_error(loss.detach(), expected.loss), *errors.values())
    return worst
