"""Baselines and dcpc: each gives the optimizer steps of an epoch by a model's rows.

All train the same samples. Those that plan a global batch get the same batches; those that fill a
step by their own rules (padded buckets, VideoSys) draw from all of them.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from dcpc.buckets import Bucket
from dcpc.commands.simulate import videosys
from dcpc.commands.simulate.model_rows import ModelCosts, SimRow, cheapest, run_of
from dcpc.commands.simulate.packers import best_fit
from dcpc.commands.simulate.sharded import fixed_degree, flexsp_rounds
from dcpc.commands.simulate.workload import Epoch
from dcpc.runtime.planner.deal import assign, cuts
from dcpc.runtime.planner.plans import PlannedMicroBatch, StepPlan, step_plan
from dcpc.runtime.planner.step_planner import plan_step
from dcpc.runtime.planner.table import make_table

System = Callable[[ModelCosts, Epoch], Iterator[StepPlan]]


def dcpc_auto(costs: ModelCosts, epoch: Epoch) -> Iterator[StepPlan]:
    """Yields dcpc's own plans."""
    tables = {b.bucket: b.least for b in costs.buckets}
    table = make_table(tables, costs.world, costs.node_ranks)
    table = replace(table, block=costs.block)
    for samples in epoch.batches:
        yield plan_step(samples, table)


def padded_bucket(costs: ModelCosts, epoch: Epoch) -> Iterator[StepPlan]:
    """Yields steps of one micro-batch a replica, at one sp for all, with all recomputed.

    A replica's micro-batch is of a random bucket, as random as its samples are many.
    """
    sp = costs.fixed_degree()
    rows = {b.bucket: row for b in costs.buckets if (row := b.row(b.full, sp)) is not None}
    draw = random.Random(0)
    pool = videosys.Pool.of(epoch.samples, draw)
    waiting = []
    for bucket in list(pool.left):
        while bucket in pool.left:
            waiting.append((bucket, pool.take(bucket, rows[bucket].micro_batch)))
    draw.shuffle(waiting)
    replicas = costs.world // sp
    for i in range(0, len(waiting), replicas):
        placed = [
            _micro_batch(costs.of(bucket).full, sp, bucket, ids, range(r * sp, r * sp + sp))
            for r, (bucket, ids) in enumerate(waiting[i : i + replicas])
        ]
        yield step_plan(placed, costs.world)


def packing(costs: ModelCosts, epoch: Epoch) -> Iterator[StepPlan]:
    """Yields sequences end to end up to the longest bucket's tokens, at one sp, best fit.

    Generous: documents are masked from each other at no cost, nothing is padded, and packs of a
    step are dealt longest first.
    """
    packs = costs.packing
    assert packs is not None, "packing needs sequences of one length"
    for samples in epoch.batches:
        waiting = []
        for places in best_fit([epoch.tokens[i] for i, _ in samples], packs.cap_tokens):
            numbers = [samples[place][0] for place in places]
            seconds_s = packs.fixed_s + sum(packs.sample_s(epoch.tokens[i]) for i in numbers)
            waiting.append(
                PlannedMicroBatch(
                    packs.bucket, packs.sp, (), tuple(numbers), seconds_s, 0, packs.menu_step
                )
            )
        yield assign(waiting, costs.world)


def best_homogeneous(costs: ModelCosts, epoch: Epoch) -> Iterator[StepPlan]:
    """Yields each batch at the one sp that is best for it, dealt longest first.

    Raises:
        PlanError: at no sp all buckets fit.
    """
    costs.fixed_degree(least=True)
    degrees = sorted({row.sp for b in costs.buckets for row in b.least})
    settings = [found for sp in degrees if (found := _settings(costs, sp))]
    rows = {b.bucket: b.least for b in costs.buckets}

    def price(mb: PlannedMicroBatch) -> PlannedMicroBatch:
        return _micro_batch(rows[mb.bucket], mb.sp, mb.bucket, mb.sample_ids, mb.ranks)

    for samples in epoch.batches:
        plans = (p for found in settings for p in cuts(samples, found, costs.world, price))
        yield min(plans, key=lambda plan: plan.makespan_s)


def first_fit(costs: ModelCosts, epoch: Epoch) -> Iterator[StepPlan]:
    """Yields each bucket at its least sp; micro-batches in the order their samples came."""
    for samples in epoch.batches:
        by_bucket: dict[Bucket, list[int]] = {}
        for number, bucket in samples:
            by_bucket.setdefault(bucket, []).append(number)
        waiting = []
        for bucket, numbers in by_bucket.items():
            own = costs.of(bucket)
            row = own.row(own.least, min(r.sp for r in own.least))
            assert row is not None, "a bucket has a row at its least degree"
            size = row.micro_batch
            parts = [numbers[i : i + size] for i in range(0, len(numbers), size)]
            waiting += [_micro_batch(own.least, row.sp, bucket, ids, range(0)) for ids in parts]
        yield _first_free(waiting, costs.world)


def videosys_mode(mode: videosys.Mode) -> System:
    """Returns VideoSys' system of this mode."""
    return lambda costs, epoch: videosys.steps(costs, epoch.samples, mode)


DCPC = "dcpc"
PACKING = "packing, fixed SP"
PADDED = "padded bucket, fixed SP"
FIXED_FSDP = "fixed SP, FSDP"
FLEXSP = "FlexSP's rounds, ZeRO-3"
# In every round they sum their gradients: nothing is left to sum at the end of a step.
SHARDED = (FIXED_FSDP, FLEXSP)
SYSTEMS: dict[str, System] = {
    PADDED: padded_bucket,
    PACKING: packing,
    "best homogeneous SP per batch": best_homogeneous,
    "VideoSys intra": videosys_mode("intra"),
    "VideoSys inter": videosys_mode("inter"),
    "VideoSys inter + PAC": videosys_mode("pac"),
    "first fit": first_fit,
    FIXED_FSDP: fixed_degree,
    FLEXSP: flexsp_rounds,
    DCPC: dcpc_auto,
}


def _settings(costs: ModelCosts, sp: int) -> dict[Bucket, SimRow]:
    """Returns the fastest row of every bucket at one sp; nothing if a bucket does not fit."""
    if costs.world % sp:
        return {}
    rows = {b.bucket: row for b in costs.buckets if (row := cheapest(b.least, sp)) is not None}
    return rows if len(rows) == len(costs.buckets) else {}


def _micro_batch(
    rows: Sequence[SimRow], sp: int, bucket: Bucket, ids: Sequence[int], ranks: Sequence[int]
) -> PlannedMicroBatch:
    """Returns a micro-batch on the smallest row that holds it."""
    row, seconds_s = run_of(rows, sp, len(ids))
    return PlannedMicroBatch(
        bucket, sp, tuple(ranks), tuple(ids), seconds_s, row.micro_batch, row.menu_step
    )


def _first_free(waiting: Sequence[PlannedMicroBatch], world: int) -> StepPlan:
    """Each micro-batch, in the order given, on the aligned block that is free first.

    A heap for each degree; an entry that is older than its block's last micro-batch is put right
    when it comes up.
    """
    free_s = [0.0] * world
    heaps: dict[int, list[tuple[float, int]]] = {}
    placed = []
    for mb in waiting:
        sp = mb.sp
        heap = heaps.setdefault(sp, [(0.0, i) for i in range(0, world - sp + 1, sp)])
        while True:
            known_s, first = heap[0]
            begin_s = max(free_s[first : first + sp])
            if begin_s <= known_s:
                break
            heapq.heapreplace(heap, (begin_s, first))
        end_s = begin_s + mb.seconds_s
        free_s[first : first + sp] = [end_s] * sp
        heapq.heapreplace(heap, (end_s, first))
        placed.append(replace(mb, ranks=tuple(range(first, first + sp))))
    return step_plan(placed, world)
