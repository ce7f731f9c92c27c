"""Seconds of an attention layer by every way to split it, measured and predicted, by length."""

from __future__ import annotations

import itertools
import os
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import dcpc
from benchmarks.harness import Cell
from dcpc.codegen import bind_group
from dcpc.commands.calibrate import calibrate
from dcpc.commands.calibrate.fit import scaled
from dcpc.commands.calibrate.links import time_collectives
from dcpc.commands.check.split import SplitModel
from dcpc.passes.sharding.attention_ways import LOWERINGS
from dcpc.plan.traced import group_name
from dcpc.runtime.groups.groups import Groups
from dcpc.runtime.groups.local_ranks import run_ranks
from dcpc.symbolic_profile import Device, Fits, calibrated, evaluator, find
from dcpc.verify.inputs import example_inputs
from tests.exact.attention import used
from tests.exact.attention_counts import clear, crossing

ALONE = "one rank"
HEADS, WIDTH = 4, 64
DIM = HEADS * WIDTH
INPUTS = {"x": f"float32[batch, seq, {DIM}]"}
TIMEOUT_S = 600.0
SHARE = 0.1  # two ways cross clearly if either is faster by so much at one end of the lengths

FEWEST_ROUNDS = 3

Key = tuple[str, int]  # how it is split, length


class TimedLayer(nn.Module):
    """Projections, causal attention of 4 heads of 64, a projection; the loss is the mean square."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v, self.out = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Returns the loss of float32 `[batch, seq, dim]`."""
        q, k, v = (
            f(x).unflatten(-1, (-1, WIDTH)).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2)).square().mean()


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured.

    Attributes:
        lengths: ascending.
        rounds: at most; every round runs every way at every length.
        limit_s: no round begins later than this after the first, but for `FEWEST_ROUNDS`.
        budget_s: of calibrating, on each number of ranks.
    """

    lengths: tuple[int, ...]
    rounds: int
    limit_s: float
    budget_s: float


@dataclass(frozen=True, slots=True)
class Times:
    """Of one number of ranks.

    Attributes:
        p: ranks.
        measured_s: of the slowest rank, the lower quartile of the rounds: other processes only
            ever make it longer.
        predicted_s: by the calibrated device.
        rounds: that were measured.
    """

    p: int
    measured_s: Mapping[Key, float]
    predicted_s: Mapping[Key, float]
    rounds: int

    @property
    def ways(self) -> tuple[str, ...]:
        """In the order of the columns."""
        return tuple(dict.fromkeys(way for way, _ in self.measured_s))

    @property
    def lengths(self) -> tuple[int, ...]:
        """Ascending."""
        return tuple(sorted({n for _, n in self.measured_s}))

    def column(self, way: str, predicted: bool = False) -> list[float]:
        """Returns the seconds of one way, by length."""
        table = self.predicted_s if predicted else self.measured_s
        return [table[way, n] for n in self.lengths]

    def rows(self) -> list[tuple[Cell, ...]]:
        """Lines of the table: milliseconds measured, and predicted."""
        return [
            (f"{n:,}", *(self._cell(way, n) for way in self.ways), min(
                self.ways, key=lambda way: self.measured_s[way, n]
            ), min(self.ways, key=lambda way: self.predicted_s[way, n]))
            for n in self.lengths
        ]  # fmt: skip

    def _cell(self, way: str, n: int) -> str:
        return f"{1e3 * self.measured_s[way, n]:.1f} ({1e3 * self.predicted_s[way, n]:.1f})"


@dataclass(frozen=True, slots=True)
class Crossover:
    """Two ways of which one is faster at short lengths and the other at long ones.

    Attributes:
        p: ranks.
        ways: both.
        measured: length; None where neither end is clear by `SHARE`.
        predicted: length; None where the same way is predicted to be faster at both ends.
        predicted_clear: whether the prediction is, at both ends.
    """

    p: int
    ways: tuple[str, str]
    measured: float | None
    predicted: float | None
    predicted_clear: bool

    @property
    def error(self) -> float | None:
        """|predicted - measured| / measured."""
        if self.measured is None or self.predicted is None:
            return None
        return abs(self.predicted - self.measured) / self.measured


def crossovers(times: Times) -> list[Crossover]:
    """Returns the pairs that cross clearly, as measured or as predicted."""
    found = []
    for a, b in itertools.combinations(times.ways, 2):
        measured, predicted = (
            [times.column(way, which) for way in (a, b)] for which in (False, True)
        )
        c = Crossover(
            times.p, (a, b),
            crossing(times.lengths, *measured) if clear(*measured, SHARE) else None,
            crossing(times.lengths, *predicted), clear(*predicted, SHARE),
        )  # fmt: skip
        if c.measured is not None or c.predicted_clear:
            found.append(c)
    return found


def ratio_error(times: Times) -> float:
    """Returns the median relative error of the predicted ratios of two ways at the longest."""
    n = times.lengths[-1]
    return median(
        abs(
            times.predicted_s[a, n] / times.predicted_s[b, n]
            / (times.measured_s[a, n] / times.measured_s[b, n]) - 1
        )
        for a, b in itertools.combinations(times.ways, 2)
    )  # fmt: skip


def shared(fits: Fits, p: int, cores: int) -> Fits:
    """Returns the fits of ranks that share cores: a call takes as often as long.

    Calibration on the CPU takes the seconds that a thread computed, which do not know how many
    ranks wanted the core meanwhile. Collectives are measured by the clock, among all ranks.
    """
    share = max(1.0, p / cores)
    return replace(fits, classes=scaled(fits.classes, share, share), launch_s=fits.launch_s * share)


class Prepared:
    """The layer traced once, and lowered in every way for each number of ranks."""

    def __init__(self, worlds: Sequence[int], plan: Plan) -> None:
        self.plan = plan
        self.layer = TimedLayer()
        self.buckets = dcpc.Buckets(INPUTS, [{"seq": n, "batch": 1} for n in plan.lengths])
        sizes = {"batch": 1, "seq": plan.lengths[-1]}
        first = SplitModel(self.layer, self.buckets, sizes, "eager", sp=1)
        self.splits: dict[int, dict[str, SplitModel]] = {}
        for p in worlds:
            self.splits[p] = {ALONE: first}
            for lowering in LOWERINGS:
                split = first.of("eager", p, lowering)
                if used(split) == {lowering}:
                    self.splits[p][lowering] = split
            for split in self.splits[p].values():
                for n in plan.lengths:
                    split.ready({"batch": 1, "seq": n})

    def predicted_s(self, split: SplitModel, length: int, device: Device) -> float:
        """Returns the seconds of the first rank."""
        at = evaluator(split.study.profile(0))
        sizes = split.study.local_sizes({"batch": 1, "seq": length})
        return float(at.seconds(sizes, device))

    def call(self, split: SplitModel, length: int, rank: int) -> None:
        """Runs forward and backward on one rank."""
        sizes = {"batch": 1, "seq": length}
        variant, integers = split.runnable.variant(split.placement, 0, sizes, rank)
        inputs = example_inputs(self.buckets, sizes)
        named = {**split.held(), **{p: inputs[n] for p, n in split.program.inputs.items()}}
        self.layer.zero_grad()
        variant([named[p] for p in variant.placeholders], integers).backward()


def on_rank(rank: int, prepared: Prepared, known: Fits | None) -> tuple[Times, Fits]:
    """Calibrates, then measures and predicts every way at every length.

    Args:
        rank: which of the group.
        prepared: the layer.
        known: what calls take, where that was measured before; collectives are measured anew.
    """
    warnings.simplefilter("ignore")
    world, plan = dist.group.WORLD, prepared.plan
    assert world is not None
    p = world.size()
    splits = prepared.splits[p]
    bind_group(group_name(p), world)
    fits = _calibrated(prepared, known)
    keys = [(way, n) for way in splits for n in plan.lengths]
    rounds: list[list[float]] = []
    begin_s = time.perf_counter()
    while len(rounds) <= plan.rounds:
        late = torch.tensor(float(time.perf_counter() - begin_s > plan.limit_s))
        dist.all_reduce(late, dist.ReduceOp.MAX)
        if late.item() and len(rounds) > FEWEST_ROUNDS:
            break
        rounds.append([_seconds(prepared, splits[way], n, rank) for way, n in keys])
    spent = torch.tensor(rounds[1:], dtype=torch.float64)  # the first warms up
    dist.all_reduce(spent, dist.ReduceOp.MAX)
    low = spent.sort(dim=0).values[len(spent) // 4]
    measured = dict(zip(keys, low.tolist(), strict=True))
    cores = os.cpu_count() or 1
    predicted = {}
    for way, n in keys:
        device = calibrated(find("cpu"), shared(fits, splits[way].sp, cores))
        predicted[way, n] = prepared.predicted_s(splits[way], n, device)
    return Times(p, measured, predicted, len(spent)), fits


def _calibrated(prepared: Prepared, known: Fits | None) -> Fits:
    """Returns what calls and these ranks' collectives take."""
    budget_s = prepared.plan.budget_s
    if known is None:
        return calibrate(prepared.layer, prepared.buckets, backend="eager", budget_s=budget_s).fits
    links = time_collectives(Groups.default(), budget_s / 2)
    return replace(known, collectives=links)


def _seconds(prepared: Prepared, split: SplitModel, length: int, rank: int) -> float:
    """Returns the seconds that passed on this rank; where one rank runs alone, others wait."""
    dist.barrier()
    start_s = time.perf_counter()
    if rank >= split.sp:
        return 0.0
    prepared.call(split, length, rank)
    return time.perf_counter() - start_s


def times_of(worlds: Sequence[int], plan: Plan) -> list[Times]:
    """Returns the seconds of each number of ranks, which have one thread each."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    prepared = Prepared(worlds, plan)
    found, fits = [], None
    for p in worlds:
        times, fits = run_ranks(on_rank, p, prepared, fits, timeout_s=TIMEOUT_S, fork=True)[0]
        found.append(times)
    return found


def error_of(found: Sequence[Crossover]) -> float | None:
    """Returns the median error over the crossovers that are measured and predicted; None: none."""
    errors = [c.error for c in found if c.error is not None]
    return median(errors) if errors else None
