"""The simulator against published figures: FlexSP's cost table and what planners make of it.

Every planner of `dcpc.commands.simulate` that there is a published figure for plans the shared
batches, its timeline is simulated, and the mean step is compared. FlexSP's own planner is not run:
its seconds are published ones, on the same cost table, and the ratios are compared with its paper's
figure. VideoSys' figure is compared in `benchmarks.video`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import mean

from benchmarks.harness import Cell, parser, print_table, timed, write_report
from benchmarks.lengths import SHARED, read
from benchmarks.planner import flexsp_cost
from dcpc.commands.simulate.formula import LinearCost, dcpc_plan
from dcpc.commands.simulate.outcome import of_batches
from dcpc.commands.simulate.packers import best_homogeneous, fixed_sp
from dcpc.runtime.planner.plans import StepPlan

# Source: each planner run apart on FlexSP's cost table: mean seconds of the 12 batches of
# Wikipedia lengths, caps of 384K and 192K.
TABLE = {
    "fixed SP 64, packing": {"wikipedia_384k": 7.56, "wikipedia_192k": 6.87},
    "best homogeneous": {"wikipedia_384k": 6.01, "wikipedia_192k": 5.21},
}
FLEXSP = {"wikipedia_384k": 4.85, "wikipedia_192k": 4.15}
# Source: FlexSP's paper (ASPLOS 2025): FlexSP over static Ulysses with packing (Wikipedia, 7B,
# 192K), and over the best homogeneous SP of each batch (at most 1.41, typically 1.1 to 1.4).
PUBLISHED = {"fixed SP 64, packing": 1.72, "best homogeneous": 1.41}

Planner = Callable[[Sequence[int], LinearCost], StepPlan]
PLANNERS: dict[str, Planner] = {
    "fixed SP 64, packing": lambda lens, cost: fixed_sp(lens, cost, cost.ranks),
    "best homogeneous": best_homogeneous, "dcpc": dcpc_plan,
}  # fmt: skip


def simulated(count: int) -> dict[str, dict[str, float]]:
    """Returns planner -> family -> mean simulated seconds, of the first batches of each family."""
    found: dict[str, dict[str, list[float]]] = {}
    taken: dict[str, int] = {}
    for batch in read(SHARED):
        if batch.family not in FLEXSP or taken.get(batch.family, 0) >= count:
            continue
        taken[batch.family] = taken.get(batch.family, 0) + 1
        cost = flexsp_cost(batch.cost)
        for name, planner in PLANNERS.items():
            outcome = of_batches(name, [(planner(batch.lens, cost), batch.lens)], cost.comm_bytes)
            found.setdefault(name, {}).setdefault(batch.family, []).append(outcome.seconds_s)
    return {n: {f: mean(v) for f, v in row.items()} for n, row in found.items()}


def main() -> None:
    """Simulates, prints deviations, writes the figures."""
    args = parser("simulator", __doc__.splitlines()[0]).parse_args()
    if not SHARED.is_dir():
        raise SystemExit(f"{SHARED} is absent: there is nothing published to compare with")
    with timed() as watch:
        found = simulated(12)
    figures: dict[str, Cell] = {}
    rows: list[list[Cell]] = []
    for name, by_family in TABLE.items():
        for family, published in by_family.items():
            ours = found[name][family]
            key = f"{name.replace(',', '').replace(' ', '_')}_{family.removeprefix('wikipedia_')}"
            figures[f"{key}_s"] = ours
            figures[f"{key}_deviation"] = ours / published - 1
            rows.append([f"{name}, {family}", published, ours, ours / published - 1])
    header = ["mean step, s", "published", "simulated", "deviation"]
    print_table("Planners on FlexSP's cost table", header, rows)
    rows = []
    for name, published in PUBLISHED.items():
        ratio = found[name]["wikipedia_192k"] / FLEXSP["wikipedia_192k"]
        key = f"flexsp_over_{name.replace(',', '').replace(' ', '_')}"
        figures[f"{key}_ratio"], figures[f"{key}_deviation"] = ratio, ratio / published - 1
        dcpc = found[name]["wikipedia_192k"] / found["dcpc"]["wikipedia_192k"]
        figures[f"dcpc_over_{name.replace(',', '').replace(' ', '_')}_ratio"] = dcpc
        rows.append([f"over {name}", published, ratio, ratio / published - 1, dcpc])
    header = [
        "Wikipedia 192K", "FlexSP's figure", "FlexSP simulated", "deviation", "dcpc simulated",
    ]  # fmt: skip
    print_table("Ratios (FlexSP's own seconds are published ones)", header, rows)
    print(f"simulated in {watch.elapsed_s:.0f} s")
    write_report("simulator", figures, args.json)


if __name__ == "__main__":
    main()
