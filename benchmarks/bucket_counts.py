"""What buckets cost against their number: padding, predicted seconds of a batch, time to plan.

Lengths are those of `benchmarks.lengths`, up to the longest that fits. Buckets are chosen for all
of them by `Buckets.from_lengths`, and beside these doubled from 128 on, as one writes them by hand.
A batch of 512 samples is then planned from the plan table of a GPT with 8 layers of width 1024 in
bfloat16 on 8 H200s (predicted seconds): at the length of each micro-batch's longest sample, as the
loader does, and padded to buckets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from statistics import mean, median

from benchmarks import lengths
from benchmarks.harness import Cell, parser, print_table, timed, write_report
from benchmarks.plans import MEMORY, TOKENS, gpt
from dcpc.api import plan
from dcpc.buckets import BATCH, Bucket, Buckets
from dcpc.ir import PlanRow
from dcpc.plan.planning import Planned
from dcpc.runtime.planner.own_lengths import BatchLengths, OwnLengths
from dcpc.runtime.planner.step_planner import plan_step
from dcpc.runtime.planner.table import PlanTable, make_table

LONGEST, WORLD, MULTIPLE = 131072, 8, 64
COUNTS = (2, 4, 6, 8, 12, 16, 24, 32, 48, 64)


def main() -> None:
    """Prints a row for each number of buckets."""
    args = parser("bucket_counts", str(__doc__).partition("\n")[0]).parse_args()
    found = lengths.read(lengths.SHARED) if lengths.SHARED.is_dir() else lengths.generate()
    batches = [
        [n for n in batch.lens if n <= LONGEST]
        for batch in found
        if batch.family == "wikipedia_192k"
    ][: 3 if args.quick else None]
    every = [n for batch in batches for n in batch]
    made = {str(count): Buckets.from_lengths(TOKENS, every, count=count)
            for count in (COUNTS[1::3] if args.quick else COUNTS)}  # fmt: skip
    doubled = [128 * 2**i for i in range(11)]
    made["doubled"] = Buckets(TOKENS, [{"seq": n} for n in doubled])
    figures: dict[str, Cell] = {}
    rows: list[list[Cell]] = []
    for name, buckets in made.items():
        row = _measured(buckets, batches)
        figures |= {f"{key}_{name}": value for key, value in row.items()}
        rows.append([name, len(buckets), *row.values()])
    header = ["buckets", "number", "planning them, s"]
    for way in ("", " (padded to buckets)"):
        header += [f"{what}{way}" for what in (
            "padding share", "seconds of a batch", "its gap to the bound", "planning a batch, s"
        )]  # fmt: skip
    print_table("Buckets against their number", header, rows)
    write_report("bucket_counts", figures, args.json)


def _measured(buckets: Buckets, batches: list[list[int]]) -> dict[str, float]:
    model, _ = gpt()
    with timed() as planning:
        planned = plan(
            model, buckets, device="h200", world=WORLD, memory=MEMORY["gpt", "h200"]
        )  # fmt: skip
    table = make_table(planned.tables, WORLD)
    own = OwnLengths(
        lambda bucket, sizes: True, _SecondsAt(planned), lambda bucket: {"seq": 2}, MULTIPLE
    )
    found = {"plan_buckets_s": planning.elapsed_s}
    for name, lengths_own in (("", own), ("padded_", None)):
        each = _planned(buckets, batches, table, lengths_own)
        found |= {f"{name}{key}": value for key, value in each.items()}
    return found


@dataclass(frozen=True, slots=True)
class _SecondsAt:
    """Predicts what a row takes for some samples of some lengths, as a compiled model does."""

    planned: Planned

    def __call__(self, bucket: Bucket, row: PlanRow, sizes: Mapping[str, int], count: int) -> float:
        priced = self.planned.by_bucket[bucket].priced
        placement = priced.placement({**bucket.sizes, BATCH: row.micro_batch}, row.sp)
        return priced.at(placement).predict(row.menu_step, {**sizes, BATCH: count}).seconds_s


def _planned(
    buckets: Buckets, batches: list[list[int]], table: PlanTable, own: OwnLengths | None
) -> dict[str, float]:
    """Returns padding, predicted seconds and the planner's seconds of all batches."""
    ran, seconds, gaps, solves = 0, [], [], []
    for batch in batches:
        homes = [buckets.holding({"seq": n}) for n in batch]
        samples = [(i, bucket) for i, bucket in enumerate(homes) if bucket is not None]
        dims = {i: (("seq", n),) for i, n in enumerate(batch)}
        with timed() as solving:
            step = plan_step(samples, table, lengths=BatchLengths(own, dims) if own else None)
        for mb in step.micro_batches:
            ran += len(mb.sample_ids) * prod(n for _, n in mb.shape.shape_key)
        seconds.append(step.makespan_s)
        gaps.append(step.gap)
        solves.append(solving.elapsed_s)
    return {
        "padding_share": 1 - sum(map(sum, batches)) / ran, "batch_s": mean(seconds),
        "gap": mean(gaps), "plan_step_s": median(solves),
    }  # fmt: skip


if __name__ == "__main__":
    main()
