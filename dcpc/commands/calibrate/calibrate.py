"""A model in, the seconds of its calls and collectives on this device out, in under a minute."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dcpc.api import calibration_key
from dcpc.buckets import BATCH, Buckets, Sizes
from dcpc.commands.calibrate.fit import (
    TimedCall,
    fit_classes,
    memory_rate,
    predicted_s,
    product_rates,
    scaled,
    scales,
)
from dcpc.commands.calibrate.links import time_collectives
from dcpc.commands.calibrate.measure import Bench, Whole
from dcpc.commands.calibrate.points import choose_points, trial_point
from dcpc.plan.runnable import Runnable
from dcpc.plan.traced import traced
from dcpc.runtime.groups.groups import Groups
from dcpc.symbolic_profile import (
    CalibratedPoint,
    Calibration,
    ClassFit,
    CollectiveFit,
    Fits,
    detect,
    find,
)
from dcpc.trace import autocast_dtype, casting, checked_dtype
from dcpc.trace.loss import Loss
from dcpc.trace.static import trace_all
from dcpc.verify.inputs import Example, example_inputs

Inputs = Mapping[str, Tensor]

BUDGET_S = 30.0  # of measuring; tracing comes before it
# What Inductor calls as eager does; it fuses the rest.
APART = frozenset({"matmul", "convolution", "attention", "collective"})
LINKS = 0.25  # of it for the collectives, where there are ranks
ROUNDS = 5  # that the budget should suffice for
TRIAL = 0.05  # of a round for the run that says by how much the data sheet is wrong
SPARE = 0.8  # of the memory


def calibrate(
    model: nn.Module,
    buckets: Buckets,
    *,
    backend: str = "inductor",
    autocast: torch.dtype | None = None,
    example: Example | None = None,
    loss: Loss | None = None,
    group: dist.ProcessGroup | None = None,
    budget_s: float = BUDGET_S,
) -> Calibration:
    """Returns the measured rates of this device for the model's calls, and of the ranks' links.

    Two blocks of the model are run, forward and backward, at four lengths of the buckets; each call
    is timed alone and the whole as it runs.

    Args:
        model: model as for `dcpc.compile`, on the device to measure.
        buckets: buckets as for `dcpc.compile`.
        backend: "eager" or "inductor".
        autocast: dtype of autocast, as for `dcpc.compile`.
        example: function that returns inputs of a shape, as for `dcpc check`; None: they are drawn.
        loss: loss function, as for `dcpc.compile`; None: forward returns the loss.
        group: ranks to measure on, all of which call this and get the same; default: the
            initialised process group or torchrun's ranks, or one rank alone.
        budget_s: seconds to measure for, beside the tracing.
    """
    begin_s = time.perf_counter()
    parameter = next(iter(model.parameters()), None)
    at = torch.device("cpu") if parameter is None or parameter.is_meta else parameter.device
    groups = Groups.default(group=group, device=at)
    autocast = checked_dtype(autocast or autocast_dtype(at.type))
    device = find("cpu") if at.type == "cpu" and torch.cuda.is_available() else detect()
    buckets, programs = trace_all(model, buckets, autocast, loss)
    traces = []
    for mine, program in zip(buckets.by_trace().values(), programs, strict=True):
        made = traced(model, mine, device, backend, derive_rules=False, program=program)
        traces.append((mine, Runnable(made)))
    share_s = budget_s if groups.world == 1 else budget_s * (1 - LINKS)
    with casting(at.type, None):
        wholes = mean_over_ranks(_measure(traces, example, at, share_s), groups)
    links = time_collectives(groups, budget_s * LINKS)
    fits, points = fitted(wholes, links, APART if backend == "inductor" else ())
    key = calibration_key([v.traced for _, v in traces], device, at, groups.world)
    return Calibration(key, fits, points, time.perf_counter() - begin_s)


def mean_over_ranks(wholes: Sequence[Whole], groups: Groups) -> list[Whole]:
    """Returns the runs with the mean seconds of all ranks, which ran at the same time."""
    if groups.world == 1:
        return list(wholes)
    own = [s.seconds_s for w in wholes for s in (*w.samples, *w.alone)]
    own += [s for w in wholes for s in (w.forward_s, w.backward_s)]
    total = torch.tensor(own, dtype=torch.float64)
    dist.all_reduce(total, group=groups.control(groups.world))
    mean = iter((total / groups.world).tolist())
    calls = [
        [tuple(replace(s, seconds_s=next(mean)) for s in part) for part in (w.samples, w.alone)]
        for w in wholes
    ]
    return [
        Whole(w.sizes, samples, next(mean), next(mean), alone)
        for w, (samples, alone) in zip(wholes, calls, strict=True)
    ]


def fitted(
    wholes: Sequence[Whole],
    collectives: tuple[CollectiveFit, ...] = (),
    apart: Collection[str] = (),
) -> tuple[Fits, tuple[CalibratedPoint, ...]]:
    """Returns the fits of all timed calls, and their prediction of each whole run.

    Calls are timed one after the other with a clock between them. As a whole they find other
    caches, nothing waits for a clock, and a compiler fuses them: launches and the rest of each
    direction are scaled by what changes.

    Args:
        wholes: measured excerpts.
        collectives: fits of the collectives.
        apart: classes that a compiler leaves as they are: the others' fits are scaled alone.
    """
    samples = [s for whole in wholes for s in (*whole.samples, *whole.alone)]
    classes: tuple[ClassFit, ...] = ()
    for forward in (True, False):
        alone = fit_classes([s for s in samples if s.forward is forward])
        parts = [whole.part(forward) for whole in wholes]
        classes += scaled(alone, *_changed(alone, parts, apart), apart)
    points = tuple(
        CalibratedPoint(w.sizes, w.forward_s + w.backward_s, sum(predicted_s(classes, w.samples)))
        for w in wholes
    )
    fits = Fits(
        classes=classes,
        collectives=collectives,
        flops_per_s=product_rates(samples),
        memory_bytes_per_s=memory_rate(samples),
        launch_s=median(c.launch_s for c in classes),
        error=median(abs(p.predicted_s / p.measured_s - 1) for p in points),
    )
    return fits, points


def _changed(
    alone: Sequence[ClassFit],
    parts: Sequence[tuple[Sequence[TimedCall], float]],
    apart: Collection[str],
) -> tuple[float, float]:
    """Returns by how much launches and the rest change from calls alone to the whole."""
    found = []
    for samples, whole_s in parts:
        kept_s = sum(predicted_s(alone, [s for s in samples if s.op_class in apart]))
        rest = predicted_s(alone, [s for s in samples if s.op_class not in apart])
        found.append((*rest, whole_s - kept_s))
    return scales(found)


def _measure(
    traces: Sequence[tuple[Buckets, Runnable]],
    example: Example | None,
    at: torch.device,
    budget_s: float,
) -> list[Whole]:
    """Returns the runs of all traces, each with its share of the time."""
    wholes = []
    begin_s = time.perf_counter()
    for number, (buckets, runnable) in enumerate(traces):
        bench = Bench(runnable, partial(_inputs, buckets, example, at), at)
        limit_s, batched = budget_s / len(traces) / ROUNDS, BATCH in runnable.traced.program.symbols
        trial = trial_point(buckets.buckets, bench.expected_s, TRIAL * limit_s, batched)
        points = choose_points(
            buckets.buckets,
            seconds=partial(_expected_s, bench, bench.slowness(trial)),
            fits=partial(_fits, bench),
            limit_s=limit_s,
            batched=batched,
        )
        wholes += bench.measure(points, begin_s + budget_s * (number + 1) / len(traces))
    return wholes


def _inputs(buckets: Buckets, example: Example | None, at: torch.device, sizes: Sizes) -> Inputs:
    return {n: t.to(at) for n, t in example_inputs(buckets, sizes, example).items()}


def _expected_s(bench: Bench, slowness: float, sizes: Sizes) -> float:
    return slowness * bench.expected_s(sizes)


def _fits(bench: Bench, sizes: Sizes) -> bool:
    return bench.made_bytes(sizes) < SPARE * bench.traced.device.memory_bytes
