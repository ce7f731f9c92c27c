"""The global-batch planner on batches of sequence lengths: predicted seconds, bound, solve time.

Model times by the cost table of FlexSP (GPT-7B, 64 A100-40GB), as other planners do.
`--lengths DIR` reads a folder of {"lens": [tokens, ...], "cost": {overrides}}.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean, median

import numpy as np

from benchmarks.harness import Cell, parser, print_table, timed, write_report
from benchmarks.lengths import SHARED, Batch, generate, read
from dcpc.commands.simulate.barriers import BatchPlan, LinearCost, Recompute, plan_batch
from dcpc.commands.simulate.barriers.baselines import BASELINES, fixed_sp

MIB = 2**20
# GB/s as FlexSP fitted them, its "GB" being 1000 MiB
BANDWIDTH = {2: 119.54, 4: 104.07, 8: 96.5, 16: 10.33, 32: 5.94, 64: 4.87}
FIXED = Recompute("as FlexSP", 4.480441895 * MIB)
MORE = Recompute("more recompute", 2.669 * MIB, 1.3)
DEFAULTS = {"cluster": 64.0, "memory_gib": 30.0, "param_b": 7.8498687744140625}
MUST_BE_THERE = (
    "wikipedia_384k_mean_s", "wikipedia_192k_mean_s", "heavytail_1_s", "heavytail_2_s",
    "heavytail_3_s", "median_solve_s", "max_solve_s", "mean_gap", "solve_1024_ranks_s",
    "joint_384k_mean_s", "joint_192k_mean_s",
)  # fmt: skip

Planner = Callable[[Sequence[int], LinearCost], BatchPlan]


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
    return LinearCost(
        ranks=ranks or int(value["cluster"]),
        fixed_s=0.6293563,
        quadratic_s=5.128e-9,
        linear_s=0.1839576e-3,
        comm_bytes=16 * 32 * 4096,
        bandwidth_bytes_per_s={d: gb * 1e3 * MIB for d, gb in BANDWIDTH.items()},
        memory_bytes=(value["memory_gib"] * 1024 - state_mib) * MIB,
        recompute=(FIXED, MORE) if joint else (FIXED,),
    )


def solve(batches: list[Batch], joint: bool, repeats: int) -> tuple[list[BatchPlan], list[float]]:
    """Plans, and the median seconds that each took."""
    plans, seconds = [], []
    for batch in batches:
        cost = flexsp_cost(batch.cost, joint)
        taken = []
        for _ in range(repeats):
            with timed() as watch:
                plan = plan_batch(batch.lens, cost)
            taken.append(watch.elapsed_s)
        plans.append(plan)
        seconds.append(median(taken))
    return plans, seconds


def solve_large(batches: list[Batch]) -> tuple[float, BatchPlan]:
    """Seconds for 1,024 ranks and 8,192 sequences drawn from all batches, and the plan."""
    pool = np.concatenate([batch.lens for batch in batches])
    lens = np.random.default_rng(0).choice(pool, 8192).tolist()
    with timed() as watch:
        plan = plan_batch(lens, flexsp_cost({}, ranks=1024))
    return watch.elapsed_s, plan


def by_family(batches: list[Batch], values: list[float]) -> dict[str, float]:
    """Mean by family, and heavy-tail batches one by one."""
    out: dict[str, list[float]] = {}
    for batch, value in zip(batches, values, strict=True):
        out.setdefault(batch.family, []).append(value)
        if batch.family.startswith("heavytail"):
            out.setdefault(f"heavytail {batch.number}", []).append(value)
    return {family: mean(v) for family, v in out.items()}


def figures_of(
    batches: list[Batch], plans: list[BatchPlan], joint: list[BatchPlan], solve_s: list[float]
) -> dict[str, Cell]:
    """What issue 5 asks for, and the mean of any further family."""
    figures: dict[str, Cell] = dict.fromkeys(MUST_BE_THERE)
    for family, value in by_family(batches, [p.seconds_s for p in plans]).items():
        name = f"{family}_mean_s" if " " not in family else f"{family.replace(' ', '_')}_s"
        figures[name] = value
    for family, value in by_family(batches, [p.seconds_s for p in joint]).items():
        short = family.removeprefix("wikipedia_").replace(" ", "_")
        figures[f"joint_{short}{'_s' if ' ' in family else '_mean_s'}"] = value
    figures["median_solve_s"] = median(solve_s)
    figures["max_solve_s"] = max(solve_s)
    figures["mean_gap"] = mean(p.gap for p in plans)
    return figures


def compare(batches: list[Batch], plans: list[BatchPlan], joint: list[BatchPlan]) -> None:
    """Prints every planner's mean seconds by family."""
    rows: dict[str, dict[str, float]] = {}

    def add(name: str, found: list[float]) -> None:
        rows[name] = by_family(batches, found)

    def fixed(lens: Sequence[int], cost: LinearCost) -> BatchPlan:
        return fixed_sp(lens, cost, cost.ranks)

    planners: dict[str, Planner] = {"fixed SP, all ranks, best fit": fixed, **BASELINES}
    for name, planner in planners.items():
        add(name, [planner(b.lens, flexsp_cost(b.cost)).seconds_s for b in batches])
    add("dcpc", [p.seconds_s for p in plans])
    add("dcpc, recompute free", [p.seconds_s for p in joint])
    add("lower bound", [p.bound_s for p in plans])
    add("lower bound, recompute free", [p.bound_s for p in joint])
    families = sorted(rows["dcpc"])
    print_table(
        "Seconds a step (model), mean of the family",
        ["planner", *families],
        [[name, *(row[f] for f in families)] for name, row in rows.items()],
    )


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
    repeats = 1 if args.quick else 3
    solve(batches[:1], False, 1)  # first calls import and warm up
    plans, solve_s = solve(batches, False, repeats)
    joint, _ = solve(batches, True, 1)
    compare(batches, plans, joint)
    figures = figures_of(batches, plans, joint, solve_s)
    figures["solve_1024_ranks_s"], large = solve_large(batches)
    figures["gap_1024_ranks"] = large.gap
    missing = math.nan
    rows: list[list[Cell]] = [[k, v if v is not None else missing] for k, v in figures.items()]
    print_table("Figures", ["figure", "value"], rows, digits=4)
    print("slowest batch:", max(plans, key=lambda plan: plan.seconds_s).binds)
    write_report("planner", figures, args.json)


if __name__ == "__main__":
    main()
