"""Runs one fault: whether it changes numbers without verification, and whether "auto" sees it."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from unittest import mock

import torch
from torch import nn

from dcpc import api
from dcpc.buckets import BATCH
from dcpc.codegen import Variant
from dcpc.commands.check.split import SPLITTING
from dcpc.errors import DcpcError, VerifyError
from dcpc.plan import traced
from dcpc.plan.planning import Planned
from dcpc.plan.runnable import Runnable
from dcpc.verify import Verifier
from dcpc.verify.compare import Given
from dcpc.verify.exactness import LossAndGradients, error_of
from dcpc.verify.reference import plain, trainable
from tests.mutants.layers import SETTINGS
from tests.mutants.models import Setting
from tests.mutants.plant import MisplantedError, Mutant

EFFECTIVE = 1e-6
LOSS_FACTOR = 0.5  # the gradient of the loss that a variant's backward gets

# How planting a fault ends.
CAUGHT = "VerifyError"  # before a number reached the user
REFUSED = "DcpcError"  # another one: dcpc's own checks
DROPPED = "dropped"  # the check of masks left a mask as it is, with a note: the numbers are right
STOPPED = "stopped"  # by an error that is no DcpcError: no wrong number, but nobody knows why
ESCAPED = "escaped"
HARMLESS = "ineffective"  # the numbers are right: it does not count
MISPLANTED = "no place"  # the code that it is an edit of reads otherwise now: to be written anew
LOUD = "error"  # not effective either: no number comes out at all, with or without verification


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a fault.

    Attributes:
        mutant: the fault; None: nothing was planted.
        end: one of the constants above.
        error: largest relative error of loss and gradients without verification.
        said: what was raised.
        spent_s: seconds of planting, planning, verifying and running.
    """

    mutant: Mutant | None
    end: str
    error: float
    said: str
    spent_s: float

    @property
    def effective(self) -> bool:
        """Whether it makes wrong numbers that nothing but verification stops."""
        return self.end in (CAUGHT, REFUSED, DROPPED, STOPPED, ESCAPED)


def run_mutant(mutant: Mutant) -> Verdict:
    """Plants a fault, plans, verifies and runs its model; returns what became of it."""
    verdict = judged(SETTINGS[mutant.setting], mutant)
    if verdict.end != HARMLESS or not hasattr(traced, "wrong_masks"):
        return verdict
    with mock.patch.object(traced, "wrong_masks", return_value={}):  # what makes it right?
        again = judged(SETTINGS[mutant.setting], mutant)
    return replace(again, end=DROPPED) if again.effective else verdict


def run_sound(setting: str) -> Verdict:
    """Does the same without a fault: it has to be ineffective, and nothing may be raised."""
    return judged(SETTINGS[setting], None)


def judged(setting: Setting, mutant: Mutant | None) -> Verdict:
    """Returns what became of a fault, or of none, on one model."""
    start_s = time.perf_counter()
    error, raised, said = 0.0, "", ""
    model = setting.model()
    expected = [plain_outcome(setting, model, sizes) for sizes in _points(setting)]
    plant: AbstractContextManager[object] = nullcontext() if mutant is None else mutant.plant()
    try:
        with warnings.catch_warnings(), plant:
            warnings.simplefilter("ignore")
            planned = _planned(setting, model)
            raised, said = _verified(setting, model, planned, time.perf_counter() - start_s)
            for sizes, want in zip(_points(setting), expected, strict=True):
                for sp in _degrees(setting, planned, sizes):
                    found = _outcome(setting, model, planned, sizes, sp)
                    error = max(error, error_of(found, want[sp > 1])[0].worst)
    except MisplantedError as missing:
        return Verdict(mutant, MISPLANTED, 0.0, str(missing), time.perf_counter() - start_s)
    except Exception as failure:  # numbers that nobody sees: a crash, or a refusal
        said = said or f"{type(failure).__name__}: {failure}"
        return Verdict(mutant, LOUD, error, said, time.perf_counter() - start_s)
    end = (raised or ESCAPED) if error > EFFECTIVE else HARMLESS
    if mutant is None and raised:
        end = raised
    return Verdict(mutant, end, error, said, time.perf_counter() - start_s)


def _planned(setting: Setting, model: nn.Module) -> Planned:
    options = {"device": SPLITTING, **setting.options}
    return api.plan(model, setting.buckets(), backend="eager", **options)


def _points(setting: Setting) -> list[dict[str, int]]:
    batched = any("batch" in text for text in setting.inputs.values())
    return [{**sizes, **({BATCH: setting.samples} if batched else {})} for sizes in setting.sizes]


def _degrees(setting: Setting, planned: Planned, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The degrees that a bucket is run at: its plan's, and what a step planner may use besides."""
    return setting.degrees or (planned.plans[planned.find(sizes)].sp,)


def plain_outcome(
    setting: Setting, model: nn.Module, sizes: Mapping[str, int]
) -> tuple[LossAndGradients, LossAndGradients]:
    """Returns what the model itself computes: with random numbers by place, and all alike."""
    by_place, alike = (plain(model, setting.data(sizes), alike=alike) for alike in (False, True))
    return by_place, alike


def _verified(
    setting: Setting, model: nn.Module, planned: Planned, compile_s: float
) -> tuple[str, str]:
    """Returns how verification ends, as `dcpc.compile` and a first call of each shape do it."""
    try:
        verifier = Verifier(model, setting.buckets(), planned, "auto")
        verifier.start(compile_s)
        for sizes in _points(setting):
            for sp in _degrees(setting, planned, sizes):
                _ranks(planned, sizes, sp)
    except VerifyError as error:
        return CAUGHT, str(error)
    except DcpcError as error:
        return REFUSED, f"{type(error).__name__}: {error}"
    except Exception as error:  # of the checks themselves: it stops the user, but says too little
        return STOPPED, f"{type(error).__name__}: {error}"
    finally:
        for runnable in planned.traces:
            runnable.inspector = None
    return "", ""


def _ranks(
    planned: Planned, sizes: Mapping[str, int], sp: int
) -> tuple[Runnable, list[tuple[Variant, tuple[int, ...]]]]:
    """Returns each rank's variant and integers, as `CompiledModel` asks for them."""
    bucket = planned.find(sizes)
    runnable, plan = planned.by_bucket[bucket], planned.plans[bucket]
    own = {**bucket.sizes, BATCH: plan.micro_batch}
    placement = runnable.priced.placement(own, sp)
    every = [runnable.variant(placement, plan.menu_step, sizes, rank) for rank in range(sp)]
    return runnable, every


def _outcome(
    setting: Setting, model: nn.Module, planned: Planned, sizes: Mapping[str, int], sp: int
) -> LossAndGradients:
    runnable, ranks = _ranks(planned, sizes, sp)
    program, wanted = runnable.traced.program, trainable(model)
    given = Given(program, model, setting.data(sizes), wide=False, alike=sp > 1, wanted=wanted)
    if setting.called:
        return _called(given, *ranks[0])
    results, sums = given.of_variants(ranks)
    share = sp / ranks[0][0].sp  # a variant takes the share of the degree that it was made for
    gradients = {n: None if g is None else g * share for n, g in sums.items()}
    return LossAndGradients(results[0].loss, gradients)


def _called(given: Given, variant: Variant, integers: tuple[int, ...]) -> LossAndGradients:
    """Calls a variant as a compiled model does, with autograd around it."""
    leaves = [given.leaves[name] for name in given.wanted]
    with torch.enable_grad():
        loss = variant([given.tensors[n] for n in variant.placeholders], integers)
        found = torch.autograd.grad(loss * LOSS_FACTOR, leaves, allow_unused=True)
    sums = [None if g is None else g / LOSS_FACTOR for g in found]
    return LossAndGradients(loss.detach(), dict(zip(given.wanted, sums, strict=True)))
