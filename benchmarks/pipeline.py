"""Pipelines of variable micro-batches: exactness, planning, simulated and measured seconds.

Simulated: DynaPipe's GPT by roofline (`pipeline_models.py`). Run: four gloo ranks, stages
that sleep as long as they would compute (`pipeline_runs.py`), so that two cores do not decide the
order. The race against packing and DynaPipe is at the tag `races-2026-11`.
"""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from statistics import mean

from benchmarks.harness import Cell, parser, print_table, write_report
from benchmarks.pipeline_models import RooflinePipeline, documents, gpt, tasks
from benchmarks.pipeline_runs import (
    candidates,
    predicted_s,
    run_all,
    run_fuzz,
    scaled,
    wrong_pairs,
)
from dcpc.commands.simulate.pipeline import draw_pipeline, pipeline_trace
from dcpc.errors import PlanError
from dcpc.runtime.pipeline.replicas import PlannedPipeline, plan_replicas
from dcpc.runtime.pipeline.schedule import (
    PipelineReplay,
    PipelineWork,
    check,
    one_f_one_b,
    replay,
)
from tests.exact.pipeline import run_exact
from tests.fuzz.pipelines import random_schedule, random_work, runs, spoiled

SECONDS, QUICK_SECONDS = 1.5, 0.5  # of dcpc's schedule where stages sleep


def wasted(found: PipelineReplay, work: PipelineWork) -> float:
    """Share of the stages' seconds that is idle or recompute."""
    useful_s = sum(work.busy_s(s, row) for s, row in enumerate(work.fastest))
    return 1.0 - useful_s / (found.makespan_s * work.stages)


def one_f_one_b_of(own: PlannedPipeline) -> PipelineReplay:
    """Replay of 1F1B on dcpc's micro-batches, with the first recompute setting that fits them all.

    Raises:
        PlanError: none fits.
    """
    work = own.work
    for setting in range(len(work.costs[0][0])):
        rows = ((setting,) * work.micro_batches,) * work.stages
        found = replay(work, one_f_one_b(range(work.micro_batches), rows))
        if all(a <= b for a, b in zip(found.peak_bytes, work.memory_bytes, strict=True)):
            return found
    raise PlanError("1F1B: got no setting that fits; expected one; take shorter samples")


def bubbles(cost: RooflinePipeline, quick: bool) -> dict[str, Cell]:
    batches = documents()
    if not batches:
        print("no ../shared/data: bubble shares are of GENERATED lengths of mixed tasks")
        batches = {"tasks": tasks(9, samples=512)}
    rows: list[list[Cell]] = []
    for name, lengths in list(batches.items())[:: 4 if quick else 1]:
        (own,) = plan_replicas(lengths, cost, 1, split=True)
        mine, plain = own.found.replay, one_f_one_b_of(own)
        rows.append(
            [name, mine.makespan_s, plain.makespan_s, wasted(mine, own.work),
             wasted(plain, own.work), mine.bubble_share, plain.bubble_share, own.found.gap]
        )  # fmt: skip
    keys = ("seconds", "seconds_1f1b", "bubble_share", "bubble_share_1f1b",
            "idle_share", "idle_share_1f1b", "gap_to_bound")  # fmt: skip
    print_table(
        "GPT on real lengths; bubble: share of stage-seconds beyond dcpc's micro-batches once",
        ["batch", *keys], rows,
    )  # fmt: skip
    return {key: mean(float(row[n + 1] or 0.0) for row in rows) for n, key in enumerate(keys)}


def plan_seconds(repeats: int) -> dict[str, Cell]:
    """Processor seconds to plan 512 samples on 4 stages: split, recompute, schedule, check."""
    lengths, cost, taken = tasks(1, samples=512), gpt(), []
    plan_replicas(lengths[:32], cost, 1, split=True)  # imports and first calls
    for _ in range(repeats):
        begin_s = time.process_time()
        plan_replicas(lengths, cost, 1, split=True)
        taken.append(time.process_time() - begin_s)
    return {"plan_s_512": min(taken)}


def run(quick: bool) -> dict[str, Cell]:
    """Measured on four ranks: the order of schedules, and what dcpc's plan gains over 1F1B."""
    cost, lengths = gpt(), tasks(3, samples=96)
    (own,) = plan_replicas(lengths, cost, 1, split=True)
    factor = (QUICK_SECONDS if quick else SECONDS) / own.found.replay.makespan_s
    work = scaled(own.work, factor)
    orders = candidates(work, own.found.schedule)
    jobs = [(work, schedule) for schedule in orders.values()]
    measured_s, told_s = run_all(jobs, 2 if quick else 3), predicted_s(jobs)
    rows: list[list[Cell]] = [[*row] for row in zip(orders, told_s, measured_s, strict=True)]
    print_table(
        "Four gloo ranks, stages that sleep", ["schedule", "predicted s", "measured s"], rows
    )
    by_name = dict(zip(orders, measured_s, strict=True))
    wrong, pairs = wrong_pairs(told_s, measured_s)
    ratios = [m / p for p, m in zip(told_s, measured_s, strict=True)]
    return {
        "measured_speedup_over_1f1b": by_name["1F1B"] / by_name["dcpc"],
        "pairs_in_wrong_order": wrong, "pairs": pairs, "measured_over_predicted_max": max(ratios),
    }  # fmt: skip


def fuzz(simulated: int, ran: int) -> dict[str, Cell]:
    """Random schedules: those that pass the check and then block, simulated by queues and run."""
    blocks = 0
    for seed in range(simulated):
        rng = random.Random(seed)
        count = rng.randrange(1, 7)
        work = random_work(rng, rng.randrange(1, 5), count)
        schedule = random_schedule(rng, work)
        schedule = spoiled(rng, schedule) if rng.random() < 0.3 else schedule
        try:
            check(schedule, count)
        except PlanError:
            blocks += runs(schedule, count)  # refused though it runs
            continue
        blocks += not runs(schedule, count)
    ended = run_fuzz(ran)
    return {
        "deadlocks": blocks + ran - ended, "simulated_schedules": simulated, "run_schedules": ended,
    }  # fmt: skip


def exact(quick: bool) -> dict[str, Cell]:
    """Loss, gradients and state of `dcpc.compile(pipeline=)`; a case is a step of a model."""
    found = run_exact(quick)
    rows: list[list[Cell]] = [
        [r.model, r.ranks, r.stages, r.sp,
         " ".join(str(sum(n[:: r.stages * r.sp])) for n in r.counts),
         r.shapes, r.apart, f"{r.worst:.1e}", f"{r.peak:.1e}"]
        for r in found
    ]  # fmt: skip
    header = ["model", "ranks", "stages", "sp", "micro-batches of each step", "shapes",
              "in two parts", "worst error", "error of bytes"]  # fmt: skip
    print_table("Exactness", header, rows)
    return {
        "worst_relative_error": max(r.worst for r in found),
        "max_error_peak": max(r.peak for r in found if r.sp == 1),
        "max_error_peak_sp": max((r.peak for r in found if r.sp > 1), default=None),
        "cases": sum(len(r.counts) for r in found),
        "backwards_in_two_parts": sum(r.apart for r in found),
    }


def main() -> None:
    """Runs all parts, prints tables, writes the figures."""
    p = parser("pipeline", __doc__.splitlines()[0])
    p.add_argument("--png", type=Path, metavar="FILE", help="a step of GPT as a picture")
    p.add_argument("--trace", type=Path, metavar="FILE", help="the same for ui.perfetto.dev")
    args = p.parse_args()
    if args.png or args.trace:
        (shown,) = plan_replicas(tasks(0), gpt(), 1, split=True)
        if args.png:
            draw_pipeline(shown.work, shown.found, args.png)
        if args.trace:
            args.trace.write_text(json.dumps(pipeline_trace(shown.work, shown.found, "gpt")))
    quick = args.quick
    figures = {
        **exact(quick), **plan_seconds(1 if quick else 3), **bubbles(gpt(), quick), **run(quick),
    }  # fmt: skip
    figures |= fuzz(1_000 if quick else 10_000, 20 if quick else 60)
    rows: list[list[Cell]] = [[key, value] for key, value in figures.items()]
    print_table("Figures", ["figure", "value"], rows, digits=4)
    write_report("pipeline", figures, args.json)


if __name__ == "__main__":
    main()
