"""The planner that trains, on batches of sequence lengths: predicted seconds, bound, solve time.

Packed micro-batches at 24 capacities, and unpacked ones in 24 buckets at their own lengths, beside
others' planners in the same run (`planner_others.py`); `--quick`: three batches of each family.
Model times by the cost table of FlexSP (GPT-7B, 64 A100-40GB), as other planners
do. `--lengths DIR` reads a folder of {"lens": [tokens, ...], "cost": {overrides}}.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count, takewhile
from pathlib import Path
from statistics import mean, median

import numpy as np

from benchmarks.harness import Cell, parser, print_table, timed, write_report
from benchmarks.lengths import SHARED, Batch, generate, read
from benchmarks.planner_others import PLANNERS, QUICK_PLANNERS
from dcpc.buckets import Bucket
from dcpc.buckets.choosing import best_shapes
from dcpc.commands.simulate.formula import (
    MOST_CAPACITIES,
    TOKENS,
    LinearCost,
    Recompute,
    dcpc_plan,
)
from dcpc.commands.simulate.packers import best_homogeneous, first_fit, fixed_sp, random_fill
from dcpc.ir import PlanRow
from dcpc.runtime.planner.own_lengths import BatchLengths
from dcpc.runtime.planner.plans import StepPlan
from dcpc.runtime.planner.step_planner import plan_step
from dcpc.runtime.planner.table import PlanTable, make_table

MIB = 2**20
# GB/s as FlexSP fitted them, its "GB" being 1000 MiB
BANDWIDTH = {2: 119.54, 4: 104.07, 8: 96.5, 16: 10.33, 32: 5.94, 64: 4.87}
FIXED = Recompute("as FlexSP", 4.480441895 * MIB)
MORE = Recompute("more recompute", 2.669 * MIB, 1.3)
DEFAULTS = {"cluster": 64.0, "memory_gib": 30.0, "param_b": 7.8498687744140625}
DEGREES = (*range(1, 17), 24, 32, 40, 48, 56, 64)
EVOLVES_S = 1.2  # planning and a second more
REACHED_S = 45.0  # what a search of this length finds counts as reachable
# Batches of a family in `--quick`.
QUICK_BATCHES = 3

Planner = Callable[[Sequence[int], LinearCost], StepPlan]
OTHERS: dict[str, Planner] = {
    "fixed SP, all ranks, best fit": lambda lens, cost: fixed_sp(lens, cost, cost.ranks),
    "best homogeneous SP per batch": best_homogeneous, "first fit at the least degree": first_fit,
    "random fill (VideoSys)": random_fill,
}  # fmt: skip


def flexsp_cost(
    overrides: dict[str, float], joint: bool = False, ranks: int | None = None
) -> LinearCost:
    """FlexSP's cost table.

    Args:
        overrides: a batch file's "cost".
        joint: whether recompute is free.
        ranks: instead of the table's.
    """
    value = {**DEFAULTS, **overrides}
    unknown = set(value) - set(DEFAULTS)
    if unknown:
        raise SystemExit(f"cost: got {sorted(unknown)}, expected some of {sorted(DEFAULTS)}")
    state_mib = value["param_b"] * 16 * 1024 / 64
    world = ranks or int(value["cluster"])
    return LinearCost(
        ranks=world, fixed_s=0.6293563, quadratic_s=5.128e-9, linear_s=0.1839576e-3,
        comm_bytes=16 * 32 * 4096,
        bandwidth_bytes_per_s={d: gb * 1e3 * MIB for d, gb in BANDWIDTH.items()},
        memory_bytes=(value["memory_gib"] * 1024 - state_mib) * MIB,
        recompute=(FIXED, MORE) if joint else (FIXED,),
        degrees=tuple(sorted({d for d in (*DEGREES, 128, 256, 512, world) if d <= world})),
    )  # fmt: skip


def solve(
    batches: list[Batch], planner: Planner, joint: bool, repeats: int
) -> tuple[list[StepPlan], list[float]]:
    """Plans, and the median seconds that each took."""
    plans, seconds = [], []
    for batch in batches:
        cost = flexsp_cost(batch.cost, joint)
        taken = []
        for _ in range(repeats):
            with timed() as watch:
                plan = planner(batch.lens, cost)
            taken.append(watch.elapsed_s)
        plans.append(plan)
        seconds.append(median(taken))
    return plans, seconds


def evolved(batch: Batch, seconds_s: float = EVOLVES_S) -> StepPlan:
    """The plan of mode "evolve" after so many seconds, a first plan's included."""
    end_s = time.perf_counter() + seconds_s
    turns = takewhile(lambda _: time.perf_counter() < end_s, count())
    return dcpc_plan(batch.lens, flexsp_cost(batch.cost), turns)


def unpacked(batches: list[Batch]) -> Planner:
    """Returns the planner of samples at their own lengths, in 24 buckets of these batches."""
    counts: dict[tuple[int, ...], int] = {}
    for batch in batches:
        for tokens in batch.lens:
            counts[tokens,] = counts.get((tokens,), 0) + 1
    shapes = best_shapes(counts, [1], MOST_CAPACITIES, None)
    assert shapes is not None, "there are lengths"
    buckets = [Bucket(((TOKENS, n),)) for (n,) in shapes.shapes]

    def plan(lens: Sequence[int], cost: LinearCost) -> StepPlan:
        table, own = _unpacked_table(buckets, cost), cost.prices().own
        samples = [
            (i, next(b for b in buckets if b[TOKENS] >= tokens)) for i, tokens in enumerate(lens)
        ]
        dims = {i: ((TOKENS, tokens),) for i, tokens in enumerate(lens)}
        return plan_step(samples, table, "auto", None, BatchLengths(own, dims))

    return plan


def _unpacked_table(buckets: list[Bucket], cost: LinearCost) -> PlanTable:
    """Rows of each bucket: powers of two, micro-batches two fifths apart up to the memory's."""
    tables = {}
    for bucket in buckets:
        tokens, rows = bucket[TOKENS], []
        for degree in (d for d in cost.degrees if d & (d - 1) == 0):
            most = cost.tokens() * degree // tokens
            sizes = {most, *(int(1.4**k) for k in range(40) if 1.4**k < most)}
            for number in sorted(m for m in sizes if m > 0):
                seconds_s = cost.fixed_s + number * cost.load_s(tokens, degree)
                rows.append(PlanRow(degree, number, 0, seconds_s))
        tables[bucket] = rows
    return make_table(tables, cost.ranks, cost.node_ranks)


def solve_large(batches: list[Batch]) -> tuple[float, StepPlan]:
    """Seconds for 1,024 ranks and 8,192 sequences drawn from all batches, and the plan."""
    pool = np.concatenate([batch.lens for batch in batches])
    lens = np.random.default_rng(0).choice(pool, 8192).tolist()
    with timed() as watch:
        plan = dcpc_plan(lens, flexsp_cost({}, ranks=1024))
    return watch.elapsed_s, plan


def by_family(batches: list[Batch], values: list[float]) -> dict[str, float]:
    """Mean by family."""
    out: dict[str, list[float]] = {}
    for batch, value in zip(batches, values, strict=True):
        out.setdefault(batch.family, []).append(value)
    return {family: mean(v) for family, v in out.items()}


def batches_of(folder: Path | None) -> list[Batch]:
    """The batches asked for, the shared ones, or generated ones; says which."""
    if folder is None and not SHARED.is_dir():
        print("no --lengths and no ../shared: batches are GENERATED, figures are not comparable")
        return generate()
    print(f"batches of {folder or SHARED}")
    return read(folder or SHARED)


def main() -> None:
    """Plans every batch, prints tables, writes the figures."""
    p = parser("planner", __doc__.splitlines()[0])
    p.add_argument("--lengths", type=Path, metavar="DIR", help="folder of batches")
    args = p.parse_args()
    batches = batches_of(args.lengths)
    if args.quick:
        seen: dict[str, list[Batch]] = {}
        for batch in batches:
            seen.setdefault(batch.family, []).append(batch)
        batches = [batch for own in seen.values() for batch in own[:QUICK_BATCHES]]
    dcpc_plan(batches[0].lens, flexsp_cost(batches[0].cost))  # first calls import and warm up
    plans, solve_s = solve(batches, dcpc_plan, False, 1 if args.quick else 3)
    joint, _ = solve(batches, dcpc_plan, True, 1)
    family_mean = partial(by_family, batches)
    rows, others_s = {}, {}
    for name, planner in {**OTHERS, **(QUICK_PLANNERS if args.quick else PLANNERS)}.items():
        theirs, taken_s = solve(batches, planner, False, 1)
        rows[name], others_s[name] = family_mean([x.makespan_s for x in theirs]), mean(taken_s)
    rows["dcpc"] = family_mean([plan.makespan_s for plan in plans])
    rows["dcpc, recompute free"] = family_mean([plan.makespan_s for plan in joint])
    rows["lower bound"] = family_mean([plan.bound_s for plan in plans])
    figures: dict[str, Cell] = {f"{f}_mean_s": s for f, s in rows["dcpc"].items()}
    heavy = [s for f, s in rows["dcpc"].items() if f.startswith("heavytail")]
    if heavy:
        figures["heavytail_mean_s"] = mean(heavy)
        tails = [(b, p) for b, p in zip(batches, plans, strict=True) if "heavytail" in b.family]
        further = [evolved(batch) for batch, _ in tails]
        figures["evolve_heavytail_mean_s"] = mean(plan.makespan_s for plan in further)
        left_s = sum(plan.makespan_s - plan.bound_s for _, plan in tails)
        gained_s = sum(
            p.makespan_s - f.makespan_s for (_, p), f in zip(tails, further, strict=True)
        )
        figures["evolve_heavytail_gap_closed"] = gained_s / left_s
        if not args.quick:
            reached_s = [p.makespan_s - evolved(b, REACHED_S).makespan_s for b, p in tails]
            figures["evolve_reached_gap_closed"] = sum(reached_s) / left_s
            figures["evolve_closes_of_reachable"] = gained_s / max(sum(reached_s), 1e-9)
    for short_name, name in (("megatron", "dynamic context parallelism (Megatron)"), ("fcp", "FCP"),
                             ("flexsp", "FlexSP")):  # fmt: skip
        figures |= {f"{short_name}_{f}_mean_s": s for f, s in rows[name].items()}
        figures[f"{short_name}_solve_s"] = others_s[name]
    figures |= {f"joint_{f}_mean_s": s for f, s in rows["dcpc, recompute free"].items()}
    figures |= {f"bound_{f}_mean_s": s for f, s in rows["lower bound"].items()}
    gaps = [plan.gap for plan in plans]
    figures |= {"median_solve_s": median(solve_s), "max_solve_s": max(solve_s)}
    figures |= {"mean_gap": mean(gaps), "worst_gap": max(gaps)}
    short = [batch for batch in batches if batch.family == "wikipedia_192k"]
    if short:
        alone, alone_s = solve(short, unpacked(short), False, 1)
        figures["unpacked_192k_mean_s"] = mean(plan.makespan_s for plan in alone)
        figures["unpacked_192k_gap"] = mean(plan.gap for plan in alone)
        figures["unpacked_192k_solve_s"] = median(alone_s)
    figures["solve_1024_ranks_s"], large = solve_large(batches)
    figures["gap_1024_ranks"] = large.gap
    families = sorted(rows["dcpc"])
    print_table(
        "Seconds a step (model), mean of the family", ["planner", *families],
        [[name, *(row.get(f) for f in families)] for name, row in rows.items()],
    )  # fmt: skip
    print_table("Figures", ["figure", "value"], [[k, v] for k, v in figures.items()], digits=4)
    print("slowest batch:", max(plans, key=lambda plan: plan.makespan_s).binds)
    write_report("planner", figures, args.json)


if __name__ == "__main__":
    main()
