"""Bytes of shared out parameters: at rest, at the peak of a step, and on the wire.

All by the eager backend. A peak is that of `train_step`, of which each rank runs three
micro-batches, above what it holds before; predicted is what a plan counts for it: parameters,
gradients and the optimizer's state of a rank, and the profile's peak.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist

import dcpc
from dcpc.buckets import BATCH
from dcpc.codegen import wire_log
from dcpc.codegen.collectives.rows import rows_shape
from dcpc.plan.prices.studies import Study
from dcpc.runtime.data.steps import Step
from dcpc.runtime.groups.local_ranks import run_ranks
from dcpc.runtime.planner.plans import rounds
from dcpc.symbolic_profile import evaluator
from examples.allocator import measured_peak_bytes
from models.gpt import GPT, GPTConfig
from tests.exact.parameters_steps import (
    ADAM,
    TEXT,
    Work,
    bucket_of,
    menu_step,
    rest_bytes,
    run,
    state_bytes,
    step_of,
    study_of,
)

VOCABULARY = 256
MICRO_BATCHES = 3
MODES = ("whole", "step", "pull", "rounds")
LIMIT_S = 900.0


@dataclass(frozen=True, slots=True)
class Bytes:
    """What is measured, on how many ranks.

    Attributes:
        world: ranks.
        model: sizes of the GPT.
        lengths: of the buckets.
        recompute: shares of the steps of recompute.
    """

    world: int
    model: GPTConfig
    lengths: tuple[int, ...]
    recompute: tuple[float, ...]

    def alike(self) -> list[tuple[Work, ...]]:
        """Returns steps in which all micro-batches are alike: first of single ranks."""
        every = [(r,) for r in range(self.world)]
        pairs = [(r, r + 1) for r in range(0, self.world, 2)]
        return [
            tuple(Work(seq, 2, ranks, share) for _ in range(MICRO_BATCHES) for ranks in groups)
            for groups in (every, pairs)
            for seq in self.lengths
            for share in self.recompute
        ]

    def mixed(self) -> list[tuple[Work, ...]]:
        """Returns steps of mixed lengths, degrees and recompute, with rounds some ranks sit out."""
        short, long, last = min(self.lengths), max(self.lengths), self.world - 1
        both = (0, 1)
        return [
            (Work(long, 2, both, 1.0), Work(short, 1, (0,)), Work(short, 3, (0,))),
            (Work(long, 1, (0,)), Work(short, 4, (last,), 1.0), Work(short, 1, (last,))),
            (Work(short, 2, (last,)), Work(long, 2, both), Work(short, 2, (0,), 1.0)),
        ]


def jobs(quick: bool) -> list[Bytes]:
    """Returns what is measured."""
    small = GPTConfig(VOCABULARY, dim=128, n_layers=2, n_heads=4)
    if quick:
        return [Bytes(2, small, (32,), (0.0, 1.0))]
    lengths, recompute = (48, 128, 384), (0.0, 0.5, 0.7, 1.0)
    larger = GPTConfig(VOCABULARY, dim=256, n_layers=4, n_heads=8)
    return [Bytes(2, larger, lengths, recompute), Bytes(4, small, (32, 128), (0.0, 1.0))]


@dataclass(frozen=True, slots=True)
class Peak:
    """One comparison on one rank.

    Attributes:
        setting: in words.
        predicted_bytes: parameters, gradients, optimizer's state and the peak of a micro-batch.
        measured_bytes: the same.
    """

    setting: str
    predicted_bytes: int
    measured_bytes: int

    @property
    def error(self) -> float:
        """Relative; below 0 where the prediction is too small."""
        return self.predicted_bytes / self.measured_bytes - 1


@dataclass(frozen=True, slots=True)
class Sent:
    """Bytes of a step on one rank's wire.

    Attributes:
        setting: in words.
        predicted_bytes: by the profiles of what ran.
        measured_bytes: counted.
    """

    setting: str
    predicted_bytes: int
    measured_bytes: int


@dataclass(frozen=True, slots=True)
class RankBytes:
    """What one rank found.

    Attributes:
        rest: mode -> bytes at rest.
        ideal_bytes: all bytes of the whole model, over the ranks.
        peaks: of mode "rounds".
        sent: the same.
    """

    rest: dict[str, int]
    ideal_bytes: float
    peaks: list[Peak]
    sent: list[Sent]


def wire_of(compiled: dcpc.CompiledModel, step: Step, every: Sequence[Work]) -> int:
    """Returns the bytes that this rank sends in a step, by the profiles.

    In a round all gather again what any of them does. A rank without a micro-batch
    sends what one sends that a single rank runs: nothing but parameters and gradients.
    """
    rank, total = compiled.groups.rank, 0
    for numbers in rounds([mb.ranks for mb in step.plan.micro_batches], compiled.groups.world):
        works = {n: every[n] for n in numbers}
        sets = {n: _gathered_again(compiled, w) for n, w in works.items()}
        own = next((n for n, w in works.items() if rank in w.ranks), None)
        alone = Work(every[0].seq, every[0].batch, (rank,))  # it gathers nothing again
        runs, itself = (alone, frozenset()) if own is None else (works[own], sets[own])
        total += _sent(study_of(compiled, runs), runs, compiled)
        total += _gathers(compiled, frozenset().union(*sets.values()) - itself)
    return total


def _gathered_again(compiled: dcpc.CompiledModel, work: Work) -> frozenset[int]:
    priced = compiled.planned.by_bucket[bucket_of(compiled, work.seq)].priced
    placement = priced.placement({"seq": work.seq, BATCH: work.batch}, len(work.ranks))
    return priced.gathered_again(placement, menu_step(compiled, work))


def _sent(study: Study, work: Work, compiled: dcpc.CompiledModel) -> int:
    place = work.ranks.index(compiled.groups.rank)
    local = study.local_sizes({"seq": work.seq, BATCH: work.batch}, place)
    return int(evaluator(study.profile(menu_step(compiled, work))).wire_bytes(local))


def _gathers(compiled: dcpc.CompiledModel, numbers: frozenset[int]) -> int:
    """Returns the bytes that a gather of some units sends."""
    traced = compiled.planned.traces[0].traced
    units, tensors = traced.units, traced.tensors()
    assert units is not None, "in rounds"
    whole = [tensors[name] for k in numbers for name in units.units[k]]
    rows = (rows_shape(p.shape, units.ranks) for p in whole)
    sizes = (prod(shape) * p.itemsize for shape, p in zip(rows, whole, strict=True))
    return (units.ranks - 1) * sum(sizes)


def on_rank(rank: int, job: Bytes) -> RankBytes:
    """Runs everything on one rank."""
    warnings.simplefilter("ignore")
    rest: dict[str, int] = {}
    peaks: list[Peak] = []
    sent: list[Sent] = []
    ideal = 0.0
    for mode in MODES:
        torch.manual_seed(0)
        model = GPT(job.model)
        ideal = state_bytes(model) / job.world
        buckets = dcpc.Buckets(TEXT, [{"seq": n} for n in job.lengths])
        compiled = dcpc.compile(
            model, buckets, backend="eager", parameters=mode, optimizer=ADAM, verify="off"
        )
        optimizer = ADAM(compiled.parameters())
        short = tuple(Work(min(job.lengths), 1, (r,)) for r in range(job.world))
        for index in range(2):
            compiled.train_step(step_of(compiled, short, VOCABULARY, index))
            optimizer.step()
            rest[mode] = rest_bytes(compiled, optimizer, gradients=True)
            optimizer.zero_grad()
        if mode == "rounds":
            peaks = [_peak(compiled, optimizer, every) for every in job.alike()]
            steps = [*job.alike()[:: len(job.recompute)], *job.mixed()]
            sent = [_wire(compiled, optimizer, every) for every in steps]
    return RankBytes(rest, ideal, peaks, sent)


def _peak(
    compiled: dcpc.CompiledModel, optimizer: torch.optim.Optimizer, every: Sequence[Work]
) -> Peak:
    step = step_of(compiled, every, VOCABULARY)
    run(compiled, optimizer, step)  # compiles, and makes what is made once
    at_rest = rest_bytes(compiled, optimizer, gradients=False)
    measured = at_rest + measured_peak_bytes(lambda: compiled.train_step(step))
    optimizer.zero_grad()
    work = next(w for w in every if compiled.groups.rank in w.ranks)
    study = study_of(compiled, work)
    place = work.ranks.index(compiled.groups.rank)
    local = study.local_sizes({"seq": work.seq, BATCH: work.batch}, place)
    peak = evaluator(study.profile(menu_step(compiled, work))).peak_bytes(local)
    predicted = compiled.planned.request.resident_bytes + int(peak)
    return Peak(_words(every[:1], compiled), predicted, measured)


def _wire(
    compiled: dcpc.CompiledModel, optimizer: torch.optim.Optimizer, every: Sequence[Work]
) -> Sent:
    step = step_of(compiled, every, VOCABULARY)
    before = wire_log.total_bytes()
    compiled.train_step(step)
    measured = wire_log.total_bytes() - before
    optimizer.zero_grad()
    return Sent(_words(every, compiled), wire_of(compiled, step, every), measured)


def _words(every: Sequence[Work], compiled: dcpc.CompiledModel) -> str:
    parts = [f"{w.batch} x {w.seq} sp {len(w.ranks)} recompute {w.recompute:.0%}" for w in every]
    shown = dict.fromkeys(parts)
    return f"{dist.get_world_size()} ranks, " + "; ".join(shown)


def measure(job: Bytes) -> list[RankBytes]:
    """Returns what each rank found."""
    return run_ranks(on_rank, job.world, job, timeout_s=LIMIT_S)
