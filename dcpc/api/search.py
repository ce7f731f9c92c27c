"""From one set of traces to the plan: who holds parameters, in blocks of how many ranks.

A model is traced once. Each way to hold its parameters, and each block of ranks, is a candidate
planned from the same traces.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import nn

from dcpc.api.requests import away_of, device_of, mode_of, request_of, target_of
from dcpc.buckets import Bucket, Buckets
from dcpc.codegen import Library
from dcpc.compiled import CompiledModel
from dcpc.errors import TraceError
from dcpc.ir import Program
from dcpc.passes.sharding.rules import warn_derived, warn_replicated
from dcpc.plan.choose import elements
from dcpc.plan.folding import gathering
from dcpc.plan.options import PlanOptions, away_kinds, degrees, few_degrees, fitting_degrees
from dcpc.plan.planning import Planned, plan_buckets
from dcpc.plan.prices.placements import compute_dtype
from dcpc.plan.progress_bar import tracked
from dcpc.plan.runnable import Runnable
from dcpc.plan.tiling import TileLadder
from dcpc.plan.traced import Traced, traced
from dcpc.symbolic_profile import Calibration, CalibrationKey, Device, calibrated, machine
from dcpc.trace import autocast_dtype, casting, checked_dtype
from dcpc.trace.capture.dims import SizeError
from dcpc.trace.static import trace_static


class Traces:
    """Traces of a model for one device, made when first asked for and kept for every later plan.

    Args:
        model: the user's module.
        buckets: buckets to plan; those in which the same dims are 1 share a trace.
        options: options of `plan`; the way to hold parameters does not matter here.
        ranges: the least and the largest lengths that one trace is to serve; None: the buckets'.
        programs: the captured programs, where they were made before.

    Raises:
        TraceError: the model is a compiled one.
    """

    def __init__(
        self,
        model: nn.Module,
        buckets: Buckets,
        options: PlanOptions,
        ranges: Buckets | None = None,
        programs: Sequence[Program] = (),
    ) -> None:
        if isinstance(model, CompiledModel):
            raise TraceError(
                "model: got a CompiledModel, what dcpc.compile returned; expected the module that "
                "it was made of; pass that (`compiled.model`)"
            )
        self.model, self.buckets = model, buckets
        self.at = device_of(model) or torch.device("cpu")
        self.autocast = checked_dtype(options.autocast or autocast_dtype(self.at.type))
        self.calibration = Calibration.of(options.calibration)
        target = target_of(options.device)
        measured = self.calibration
        self.device = target if measured is None else calibrated(target, measured.fits)
        self._options, self._ranges, self._programs = options, ranges, programs
        self._traced: list[Traced] = []

    def held(self, options: PlanOptions) -> dict[Bucket, Runnable]:
        """Returns the runnable of each bucket, in the buckets' order.

        Args:
            options: options of `plan`, with the mode of parameters and the block chosen.

        Raises:
            TraceError: the model cannot be captured.
            PlanError: parameters in rounds are not the same in all traces.
        """
        mode = mode_of(options)
        hands_over = mode in ("pull", "rounds")
        every = [replace(one, hands_over=hands_over) for one in self._all()]
        if mode == "rounds":
            assert not isinstance(options.block, str), "it is chosen"
            away = away_kinds(options.away)[1]
            every = gathering(every, options.block or options.world, away)
        found: dict[Bucket, Runnable] = {}
        for mine, one in zip(self.buckets.by_trace().values(), every, strict=True):
            found |= dict.fromkeys(mine, Runnable(one))
        return {bucket: found[bucket] for bucket in self.buckets}

    def _all(self) -> Sequence[Traced]:
        if self._traced:
            return self._traced
        try:
            self._traced = [*self._made()]
        except SizeError as refused:
            if self._programs or self._ranges is not None:
                raise
            self.buckets, self._programs = trace_static(
                self.model, self.buckets, self.autocast, self._options.loss, refused
            )
            self._traced = [*self._made()]
        return self._traced

    def _made(self) -> Iterator[Traced]:
        options, libraries = self._options, dict[str, Library]()
        derive = options.world > 1 and options.derive_rules
        groups = [*self.buckets.by_trace().values()]
        for i, mine in enumerate(tracked(groups, "trace", lambda b: f"{len(b)} buckets")):
            one = traced(
                self.model, self._ranges or mine, self.device, options.backend,
                autocast=self.autocast, derive_rules=derive, attention=options.attention,
                libraries=libraries, loss=options.loss,
                program=self._programs[i] if self._programs else None,
            )  # fmt: skip
            away = away_of(options, self.device)
            yield replace(one, reference=max(mine, key=elements).sizes, away=away)


def search(traces: Traces, options: PlanOptions, *, partly: bool) -> Planned:
    """Returns the plan with parameters held in the first way in which every bucket fits.

    Args:
        traces: traces of the model.
        options: options of `plan`.
        partly: whether, where no way fits all buckets, those that fit are planned all the same;
            else planning ends at the first bucket that does not fit.

    Raises:
        DcpcError: as from `plan`, but for buckets that do not fit: these are `Planned.misfits`.
    """
    *first, last = _ways_to_hold(options, traces.device)
    for held in first:
        found = _quickest(traces, held, partly=False)
        if not found.misfits:
            return found
    return _quickest(traces, last, partly)


def _ways_to_hold(options: PlanOptions, device: Device) -> list[PlanOptions]:
    """Returns the options with each mode of parameters to try, the one that sends least first."""
    if options.held != "auto":
        return [options]
    last: list[PlanOptions] = []
    if options.away == "auto" and (options.host or options.disk) and not options.block:
        last = [replace(options, away=("activations", "parameters"), parameters="rounds")]
    whole, step = (replace(options, parameters=m, block=None) for m in ("whole", "step"))
    least = replace(options, parameters="pull", block=None)
    if device.gpu or options.block:
        least = replace(options, parameters="rounds", block=options.block or "auto")
    if options.world == 1:
        return [replace(options, parameters="whole", block=None), *last]
    return [whole, step, least, *last]


def _quickest(traces: Traces, options: PlanOptions, partly: bool) -> Planned:
    """Returns the plan of the block of ranks whose steps are quickest, where it is to be chosen.

    Blocks are tried from the smallest on, up to the first that is no quicker than the one before.
    """
    if options.block != "auto":
        return _planned(traces, options, partly)
    best: Planned | None = None
    least = math.inf
    for block in _blocks(traces, options):
        found = _planned(traces, replace(options, block=block), partly=False)
        if found.misfits:
            continue
        price = _step_price(found)
        if price >= least:
            break
        best, least = found, price
    return best or _planned(traces, replace(options, block=None), partly)


def _blocks(traces: Traces, options: PlanOptions) -> Iterator[int]:
    """Yields the blocks within which a degree fits and a rank has room for its parameters' part."""
    every, world = degrees("auto", options.world), options.world
    asked = degrees(options.sp, world)
    for block in every[1:]:
        fitting = block == world or fitting_degrees(block, asked, world)
        request = request_of(traces.model, replace(options, block=block), every, traces.device)
        if fitting and request.resident_bytes < request.memory_bytes:
            yield block


def _step_price(planned: Planned) -> float:
    """Returns a number that is least where steps of one round of each bucket are quickest.

    The sum over buckets of the logarithm of rank-seconds a sample, as all count alike; each step
    pays its sum over blocks.
    """
    return sum(
        math.log((plan.seconds_s + planned.sum_s) * plan.sp / plan.micro_batch)
        for plan in planned.plans.values()
    )


def _planned(traces: Traces, options: PlanOptions, partly: bool) -> Planned:
    """Returns the plan with parameters held as the options say; buckets may be misfits."""
    world = options.world
    sps = degrees(options.sp, world)
    if traces.device.communicator_bytes and options.sp == "auto":
        sps = few_degrees(sps, world)
    request = request_of(traces.model, options, sps, traces.device)
    ladder = TileLadder(traces.held(options), request.tile)
    by_bucket = ladder.by_bucket
    used = [*{id(v): v.traced for v in by_bucket.values()}.values()]
    if traces.calibration is not None:
        wanted = calibration_key(used, traces.device, traces.at, world)
        traces.calibration.check(wanted, anywhere=options.device != "auto")
    if world > 1:
        warn_replicated({n: r for v in used for n, r in v.sharding.replicated.items()})
        warn_derived({op: rule for v in used for op, rule in v.sharding.derived.items()})
    with casting(traces.at.type, None):  # what is traced now has its casts already
        found = plan_buckets(ladder.priced, request, partly=partly, others=ladder.others)
    by_bucket = ladder.chosen(found.priced)
    for runnable in by_bucket.values():
        runnable.priced.placements.settle()
    return Planned(
        by_bucket, found.plans, found.tables, request, traces.autocast, found.misfits, options.loss,
        traces.buckets.static,
    )  # fmt: skip


def calibration_key(
    traces: Sequence[Traced], device: Device, at: torch.device, world: int
) -> CalibrationKey:
    """Returns the key that a calibration must have to plan these traces with it."""
    first = traces[0]
    return CalibrationKey(
        device=device.name,
        machine=machine(at),
        world=world,
        dtype=str(compute_dtype(first.program)),
        backend=first.backend,
        torch=torch.__version__,
        graphs=tuple(v.program.graph_hash for v in traces),
    )
