"""Pipelines of variable micro-batches: exactness, planning, simulated and measured seconds.

Simulated: DynaPipe's two models by roofline (`pipeline_models.py`), against packing, 1F1B and
DynaPipe itself (`pipeline_others.py`). Run: four gloo ranks, stages that sleep as long as they
would compute (`pipeline_runs.py`), so that two cores do not decide the order.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from benchmarks.harness import Cell, parser, print_table, write_report
from benchmarks.pipeline_exact import run_exact
from benchmarks.pipeline_models import (
    LONGEST,
    RooflinePipeline,
    any_split_s,
    documents,
    gpt,
    t5,
    tasks,
)
from benchmarks.pipeline_others import (
    dynapipe,
    packing,
    padded_1f1b,
    split_1f1b,
)
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
from dcpc.runtime.pipeline.planning import PlannedPipeline, plan_pipeline
from dcpc.runtime.pipeline.schedule import (
    PipelineReplay,
    PipelineWork,
    check,
)
from tests.fuzz.pipelines import random_schedule, random_work, runs, spoiled

SECONDS, QUICK_SECONDS = 1.5, 0.5  # of dcpc's schedule where stages sleep

Rows = dict[str, PipelineReplay]


def wasted(found: PipelineReplay, work: PipelineWork) -> float:
    """Share of the stages' seconds that is idle or recompute."""
    useful_s = sum(work.busy_s(s, row) for s, row in enumerate(work.fastest))
    return 1.0 - useful_s / (found.makespan_s * work.stages)


def compare(lengths: Sequence[int], cost: RooflinePipeline) -> tuple[PlannedPipeline, Rows]:
    """dcpc's plan, and what every other system takes."""
    own = plan_pipeline(lengths, cost, split=True)
    return own, {
        "dcpc": own.found.replay,
        "dcpc, whole backwards": plan_pipeline(lengths, cost).found.replay,
        "DynaPipe": dynapipe(lengths, cost),
        "1F1B, dcpc's micro-batches": split_1f1b(lengths, own.batches, cost),
        "1F1B, padded": padded_1f1b(lengths, cost)[2],
        "packing": packing(lengths, cost, LONGEST),
    }


def simulate(quick: bool) -> dict[str, Cell]:
    """Speed-ups on mixed tasks, bubbles on real lengths; prints both."""
    figures: dict[str, Cell] = {}
    for name, cost in (("t5", t5()), ("gpt", gpt())):
        found = [compare(tasks(seed), cost) for seed in range(1 if quick else 4)]
        bounds_s = [any_split_s(tasks(seed), cost) for seed in range(len(found))]
        suffix = "" if name == "t5" else f"_{name}"
        for key, other in (("packing", "packing"), ("1f1b_padded", "1F1B, padded"),
                           ("dynapipe", "DynaPipe")):  # fmt: skip
            figures[f"speedup_over_{key}{suffix}"] = mean(
                rows[other].makespan_s / rows["dcpc"].makespan_s for _, rows in found
            )
            figures[f"speedup_over_{key}{suffix}_bound"] = mean(
                rows[other].makespan_s / bound_s
                for (_, rows), bound_s in zip(found, bounds_s, strict=True)
            )
        figures[f"speedup_over_packing{suffix}_whole_backwards"] = mean(
            rows["packing"].makespan_s / rows["dcpc, whole backwards"].makespan_s
            for _, rows in found
        )
        table = [
            [system, mean(rows[system].makespan_s for _, rows in found),
             mean(rows[system].bubble_share for _, rows in found)]
            for system in found[0][1]
        ]  # fmt: skip
        table.append(["no split, no schedule is faster", mean(bounds_s), None])
        print_table(
            f"{name}: mixed tasks (GENERATED), seconds a step", ["system", "s", "idle"], table
        )
    figures |= _bubbles(gpt(), quick)
    return figures


def _bubbles(cost: RooflinePipeline, quick: bool) -> dict[str, Cell]:
    batches = documents()
    if not batches:
        print("no ../shared/data: bubble shares are of GENERATED lengths of mixed tasks")
        batches = {"tasks": tasks(9, samples=512)}
    rows: list[list[Cell]] = []
    for name, lengths in list(batches.items())[:: 4 if quick else 1]:
        own, found = compare(lengths, cost)
        mine, published = found["dcpc"], found["DynaPipe"]
        plain = found["1F1B, dcpc's micro-batches"]
        rows.append(
            [name, mine.makespan_s, plain.makespan_s, published.makespan_s,
             wasted(mine, own.work), wasted(plain, own.work),
             1.0 - (1.0 - wasted(mine, own.work)) * mine.makespan_s / published.makespan_s,
             mine.bubble_share, plain.bubble_share, published.bubble_share, own.found.gap]
        )  # fmt: skip
    keys = ("seconds", "seconds_1f1b", "seconds_dynapipe",
            "bubble_share", "bubble_share_1f1b", "bubble_share_dynapipe",
            "idle_share", "idle_share_1f1b", "idle_share_dynapipe", "gap_to_bound")  # fmt: skip
    print_table(
        "GPT on real lengths; bubble: share of stage-seconds beyond dcpc's micro-batches once",
        ["batch", *keys], rows,
    )  # fmt: skip
    return {key: mean(float(row[n + 1] or 0.0) for row in rows) for n, key in enumerate(keys)}


def plan_seconds(repeats: int) -> dict[str, Cell]:
    """Processor seconds to plan 512 samples on 4 stages: split, recompute, schedule, check."""
    lengths, cost, taken = tasks(1, samples=512), gpt(), []
    plan_pipeline(lengths[:32], cost, split=True)  # imports and first calls
    for _ in range(repeats):
        begin_s = time.process_time()
        plan_pipeline(lengths, cost, split=True)
        taken.append(time.process_time() - begin_s)
    return {"plan_s_512": min(taken)}


def run(quick: bool) -> dict[str, Cell]:
    """Measured on four ranks: the order of schedules, and what dcpc's plan gains over 1F1B."""
    cost, lengths = gpt(), tasks(3, samples=96)
    own, padded = plan_pipeline(lengths, cost, split=True), padded_1f1b(lengths, cost)
    factor = (QUICK_SECONDS if quick else SECONDS) / own.found.replay.makespan_s
    work = scaled(own.work, factor)
    orders = candidates(work, own.found.schedule)
    jobs = [(work, schedule) for schedule in orders.values()]
    jobs.append((scaled(padded[0], factor), padded[1]))
    measured_s, told_s = run_all(jobs, 2 if quick else 3), predicted_s(jobs)
    names = [*orders, "1F1B, padded"]
    rows: list[list[Cell]] = [[*row] for row in zip(names, told_s, measured_s, strict=True)]
    print_table(
        "Four gloo ranks, stages that sleep", ["schedule", "predicted s", "measured s"], rows
    )
    by_name = dict(zip(names, measured_s, strict=True))
    wrong, pairs = wrong_pairs(told_s, measured_s)
    ratios = [m / p for p, m in zip(told_s, measured_s, strict=True)]
    return {
        "measured_speedup_over_1f1b": by_name["1F1B"] / by_name["dcpc"],
        "measured_speedup_over_1f1b_padded": by_name["1F1B, padded"] / by_name["dcpc"],
        "pairs_in_wrong_order": wrong,
        "pairs": pairs,
        "measured_over_predicted_max": max(ratios),
    }


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
        "deadlocks": blocks + ran - ended,
        "simulated_schedules": simulated,
        "run_schedules": ended,
    }


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
        shown = plan_pipeline(tasks(0), gpt(), split=True)
        if args.png:
            draw_pipeline(shown.work, shown.found, args.png)
        if args.trace:
            args.trace.write_text(json.dumps(pipeline_trace(shown.work, shown.found, "gpt")))
    quick = args.quick
    figures = {**exact(quick), **plan_seconds(1 if quick else 3), **simulate(quick), **run(quick)}
    figures |= fuzz(1_000 if quick else 10_000, 20 if quick else 60)
    rows: list[list[Cell]] = [[key, value] for key, value in figures.items()]
    print_table("Figures", ["figure", "value"], rows, digits=4)
    write_report("pipeline", figures, args.json)


if __name__ == "__main__":
    main()
