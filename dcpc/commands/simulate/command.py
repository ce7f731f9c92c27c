"""Runs `dcpc simulate`: systems on a model's rows, or on a cost formula; writes its files."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from dcpc.buckets import Bucket
from dcpc.commands.shared.factories import writing
from dcpc.commands.simulate.formula import LinearCost, longest_that_fits
from dcpc.commands.simulate.model_rows import of_planned, tokens_of
from dcpc.commands.simulate.outcome import SimulatedOutcome, of_batches, of_steps, outcomes_text
from dcpc.commands.simulate.packers import planners, plans_of
from dcpc.commands.simulate.pipeline import draw_pipeline, pipeline_trace, said
from dcpc.commands.simulate.png import draw
from dcpc.commands.simulate.systems import PACKING, SHARDED, SYSTEMS
from dcpc.commands.simulate.timeline import chrome_trace
from dcpc.commands.simulate.workload import (
    Epoch,
    Lengths,
    batches_of_lengths,
    by_share,
    in_buckets,
    read_histogram,
    read_lengths,
)
from dcpc.compiled.pipeline import CutModel, stages_report
from dcpc.errors import PlanError
from dcpc.plan.planning import Planned
from dcpc.plan.progress_bar import tracked
from dcpc.symbolic_profile import Device

RANK_TOKENS = 16_384  # of a step, by default
MUCH_PADDING = 0.1  # share of the tokens from which on it is told


@dataclass(frozen=True, slots=True)
class SimulationRequest:
    """Arguments of `dcpc simulate`.

    Attributes:
        world: ranks.
        steps: global batches.
        tokens_per_step: tokens of a global batch; 0: 16,384 a rank.
        seed: seed of the samples.
        trace: Chrome trace JSON to write.
        png: picture to write.
    """

    world: int
    steps: int = 4
    tokens_per_step: int = 0
    seed: int = 0
    trace: Path | None = None
    png: Path | None = None

    @property
    def tokens(self) -> int:
        """Tokens of a global batch."""
        return self.tokens_per_step or RANK_TOKENS * self.world


def source_of(
    lengths: Path | None, histogram: Path | None, shares: str = ""
) -> Lengths | list[float]:
    """Returns the lengths of a file, or shares of buckets: whichever is given.

    Raises:
        PlanError: not exactly one of them is, or it is not of its form.
    """
    given = [x for x in (lengths, histogram, shares) if x]
    if len(given) != 1:
        raise PlanError(
            f"simulate: got {len(given)} of --lengths, --histogram and --shares; expected one of "
            "them, where samples come from; pass one"
        )
    if lengths is not None:
        return read_lengths(lengths)
    if histogram is not None:
        return read_histogram(histogram)
    try:
        found = [float(part) for part in shares.split(",")]
        if not all(0 <= share < math.inf for share in found):
            raise ValueError(shares)
        return found
    except ValueError as error:
        raise PlanError(
            f"--shares: got {shares!r}; expected numbers from 0 on, separated by commas, such as "
            "5,3,1; correct it"
        ) from error


def default_degrees(world: int) -> tuple[int, ...]:
    """Returns the degrees to price: powers of two up to two nodes of eight; a divisor is one."""
    return tuple(1 << i for i in range(5) if 1 << i <= world)


def simulate_model(
    planned: Planned, device: Device, source: Lengths | Sequence[float], request: SimulationRequest
) -> str:
    """Returns the table of all systems on a planned model; writes the requested files."""
    costs = of_planned(planned, request.world, device)
    epoch = _epoch([b.bucket for b in costs.buckets], source, request)
    outcomes, seconds, without = [], [], list[str]()
    for name, system in tracked([*SYSTEMS.items()], "simulate", lambda item: item[0]):
        if name == PACKING and costs.packing is None:
            continue
        begin_s = time.perf_counter()
        own = replace(costs, reduction_s=0.0, gradient_bytes=0.0) if name in SHARDED else costs
        try:
            outcomes.append(of_steps(name, system(costs, epoch), own, epoch.tokens))
        except PlanError as error:  # a system that cannot run these buckets is no reason to end
            without.append(f"left out: {name}: {error}\n")
            continue
        seconds.append(time.perf_counter() - begin_s)
    title = (
        f"{request.world} x {device.name}, {len(epoch.batches)} batches of "
        f"{request.tokens:,} tokens, {len(epoch.tokens):,} samples; predicted"
    )
    return _finish(title, outcomes, seconds, request) + "".join(without) + _padding_text(epoch)


def _padding_text(epoch: Epoch) -> str:
    """Returns a line on padding to buckets, which training does without; "" where it is little."""
    padded = sum(tokens_of(bucket) for _, bucket in epoch.samples)
    share = 1 - sum(epoch.tokens.values()) / padded
    if share < MUCH_PADDING:
        return ""
    return (
        f"each sample is priced at its bucket's length: {share:.0%} of the tokens are padding, in "
        f"all systems but {PACKING!r}, and dcpc's training has little of it; name more buckets "
        "(Buckets.from_lengths, count=24)\n"
    )


def _epoch(
    buckets: Sequence[Bucket], source: Lengths | Sequence[float], request: SimulationRequest
) -> Epoch:
    """Returns the samples of all steps, drawn by length or by bucket."""
    if isinstance(source, Lengths):
        longest = max(map(tokens_of, buckets))
        drawn = batches_of_lengths(
            source.upto(longest), request.steps, request.tokens, request.seed
        )
        return in_buckets(drawn, buckets)
    return by_share(buckets, source, request.steps, request.tokens, request.seed)


def simulate_stages(
    cut: CutModel, source: Lengths | Sequence[float], request: SimulationRequest
) -> str:
    """Returns the cut and the steps of its pipelines; writes the first step's slowest pipeline."""
    epoch = _epoch(cut.planner.buckets, source, request)
    steps = [cut.planner.pipelines([b for _, b in batch]) for batch in tracked(
        epoch.batches, "simulate", lambda batch: f"{len(batch)} samples"
    )]  # fmt: skip
    slowest = [max(s, key=lambda p: p.found.replay.makespan_s) for s in steps]
    text = stages_report(cut, cut.planner.replicas) + (
        f"\n{request.world} ranks, {len(steps)} batches of {request.tokens:,} tokens, "
        f"{len(epoch.tokens):,} samples; predicted, of each step its slowest pipeline\n"
    )
    for number, (every, one) in enumerate(zip(steps, slowest, strict=True)):
        counts = ", ".join(str(len(p.batches)) for p in every)
        text += f"step {number}: {counts} micro-batches; {said(one.found)}\n"
    whole_s = sum(p.found.replay.makespan_s for p in slowest)
    text += f"{sum(epoch.tokens.values()) / whole_s:,.0f} tokens/s, the sum of gradients left out\n"
    first = slowest[0].work, slowest[0].found
    trace, picture = partial(pipeline_trace, *first, "step 0"), partial(draw_pipeline, *first)
    return text + _written(request, "step", trace, picture)


def simulate_cost(
    cost: LinearCost, source: Lengths | Sequence[float], request: SimulationRequest
) -> str:
    """Returns the table of all systems on a cost formula; writes the requested files.

    Args:
        cost: formula for the request's world.
        source: lengths; those that all ranks together cannot hold are left out.
        request: ranks, steps, and files to write.

    Raises:
        PlanError: `source` is shares of buckets; a formula has no buckets.
    """
    if not isinstance(source, Lengths):
        raise PlanError("simulate: got --shares with --cost; expected --lengths or --histogram")
    drawn = batches_of_lengths(
        source.upto(longest_that_fits(cost)), request.steps, request.tokens, request.seed
    )
    outcomes, seconds = [], []
    for name, planner in tracked([*planners(cost, drawn).items()], "simulate", lambda i: i[0]):
        begin_s = time.perf_counter()
        outcomes.append(of_batches(name, plans_of(planner, drawn, cost), cost.comm_bytes))
        seconds.append(time.perf_counter() - begin_s)
    title = (
        f"{request.world} ranks by formula, {len(drawn)} batches of {request.tokens:,} tokens, "
        f"{sum(map(len, drawn)):,} sequences; predicted"
    )
    return _finish(title, outcomes, seconds, request)


def _finish(
    title: str,
    outcomes: Sequence[SimulatedOutcome],
    seconds: Sequence[float],
    request: SimulationRequest,
) -> str:
    text = outcomes_text(title, outcomes)
    text += "simulated in " + ", ".join(
        f"{o.name} {s:.1f} s" for o, s in zip(outcomes, seconds, strict=True)
    )
    shown = {o.name: o.shown for o in outcomes}
    made = partial(chrome_trace, shown), partial(draw, shown)
    return f"{text}\n{_written(request, 'steps', *made)}"


def _written(
    request: SimulationRequest,
    steps: str,
    trace: Callable[[], object],
    picture: Callable[[Path], None],
) -> str:
    """Writes the files that are asked for; returns a line on each."""
    text = ""
    if request.trace is not None:
        with writing(request.trace):
            request.trace.write_text(json.dumps(trace()), encoding="utf-8")
        text += (
            f"trace of the first {steps}: {request.trace} (open it in https://ui.perfetto.dev)\n"
        )
    if request.png is not None:
        with writing(request.png):
            picture(request.png)
        text += f"picture of the first {steps}: {request.png}\n"
    return text
