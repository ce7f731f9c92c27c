"""Training over real text against what one does today: `python -m benchmarks.throughput`.

Two gloo ranks train a small GPT on the standard library's functions and classes. dcpc and four
baselines run the same steps from the same weights, one step each in turn; a figure is the median
over the repeats of all steps. The baselines are in `examples/baselines.py` and `packing.py`:

    padded buckets   fixed SP 2 with full recompute: what makes the longest sample fit
    packing          the same setting, samples end to end up to the longest bucket's length,
                     attention inside each sample alone (the same numbers, no padding)
    ddp              DistributedDataParallel, batches of 4 padded to their longest; no memory limit
    ddp unpadded     the same with batches of 1: nothing to pad
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks import harness
from examples.baselines import Dcpc, FixedSp, PlainDdp, System
from examples.launch import launch
from examples.packing import PackedSp
from examples.race import Entrant, Lap, repeats, replica
from examples.stdlib_source import StdlibSource
from examples.workload import DEMO, QUICK, Workload

WORLD = 2
DDP_BATCH = 4


@dataclass(frozen=True, slots=True)
class Run:
    """How much is run.

    Attributes:
        workload: model, buckets, memory.
        steps: the first so many of an epoch.
        repeats: at most; the steps are the same in each.
        limit_s: no repeat but the first begins later than this after the ranks have started.
    """

    workload: Workload
    steps: int
    repeats: int
    limit_s: float


@dataclass(frozen=True, slots=True)
class Total:
    """All steps of one repeat by one system.

    Attributes:
        seconds_s: measured.
        busy_s: processor seconds, in each step of the rank that spent most.
        wire_bytes: of all ranks, gradients included.
    """

    seconds_s: float
    busy_s: float
    wire_bytes: int


@dataclass(frozen=True, slots=True)
class Measured:
    """What came of it.

    Attributes:
        totals: key of a system -> one total a repeat.
        steps: in a repeat.
        longest: length of the longest bucket.
        tokens: of all steps, padding left out.
        imbalance: measured mean idle share of dcpc's ranks.
        predicted_imbalance: what its plans said.
        padding_share: padding's share of the tokens that dcpc ran, 0 to 1.
        compile_s: `dcpc.compile`.
    """

    totals: dict[str, list[Total]]
    steps: int
    longest: int
    tokens: int
    imbalance: float
    predicted_imbalance: float
    padding_share: float
    compile_s: float


def on_rank(run: Run) -> Measured:
    """Runs the race on one rank of the group."""
    start_s = time.monotonic()
    warnings.simplefilter("ignore")
    workload = run.workload
    dataset = StdlibSource(workload.longest)
    model = workload.make_model()
    with harness.timed() as compiling:
        compiled = workload.compile(model, dataset)
    ours = Dcpc(compiled, workload.loader(dataset, compiled))
    systems: dict[str, System] = {
        "dcpc": ours, "padded_bucket": FixedSp(compiled, replica(model), workload, dataset, WORLD),
        "packing": PackedSp(replica(model), dataset, ours, workload.longest, WORLD),
        "ddp": PlainDdp(replica(model), dataset, ours, DDP_BATCH),
        "ddp_unpadded": PlainDdp(replica(model), dataset, ours, 1),
    }  # fmt: skip
    for system in systems.values():
        system.load(run.steps)
    entrants = [Entrant(s, workload.make_optimizer(s.model)) for s in systems.values()]
    for entrant in entrants:
        entrant.lap(_shortest(ours))  # a variant compiles when it is first used
    ours.imbalances.clear()
    laps = repeats(entrants, run.steps, run.repeats, start_s + run.limit_s)
    return Measured(
        totals=totals_of(laps, {s.name: key for key, s in systems.items()}, run.steps),
        steps=run.steps, longest=workload.longest, tokens=sum(step.tokens for step in ours.steps),
        imbalance=sum(ours.imbalances) / len(ours.imbalances),
        predicted_imbalance=sum(s.plan.imbalance for s in ours.steps) / len(ours.steps),
        padding_share=ours.loader.stats().padding_share, compile_s=compiling.elapsed_s,
    )  # fmt: skip


def _shortest(system: Dcpc) -> int:
    return min(range(len(system.steps)), key=lambda i: system.steps[i].plan.makespan_s)


def totals_of(laps: Sequence[Lap], keys: dict[str, str], steps: int) -> dict[str, list[Total]]:
    """Returns each system's totals, one a repeat."""
    found: dict[str, list[Total]] = {}
    for name, key in keys.items():
        mine = [(lap.seconds_s, lap.busy_s, lap.wire_bytes) for lap in laps if lap.system == name]
        whole = [mine[i : i + steps] for i in range(0, len(mine), steps)]
        found[key] = [Total(*map(sum, zip(*repeat, strict=True))) for repeat in whole]
    return found


def figures_of(measured: Measured) -> dict[str, harness.Cell]:
    """Returns the benchmark's figures: ratios are medians of the ratios of each repeat."""
    ours = measured.totals["dcpc"]

    def speedup(key: str) -> float:
        theirs = measured.totals[key]
        return median(b.seconds_s / a.seconds_s for a, b in zip(ours, theirs, strict=True))

    figures: dict[str, harness.Cell] = {
        "speedup_over_padded_bucket": speedup("padded_bucket"),
        "speedup_over_packing": speedup("packing"), "speedup_over_ddp": speedup("ddp"),
        "speedup_over_ddp_unpadded": speedup("ddp_unpadded"),
        "wire_bytes_ratio": measured.totals["padded_bucket"][0].wire_bytes / ours[0].wire_bytes,
        "imbalance_measured": measured.imbalance,
        "imbalance_predicted": measured.predicted_imbalance,
        "padding_share": measured.padding_share, "compile_s": measured.compile_s,
        "repeats": len(ours), "steps": measured.steps, "longest_bucket": measured.longest,
    }  # fmt: skip
    for key, totals in measured.totals.items():
        seconds_s = median(t.seconds_s for t in totals)
        figures[f"{key}_s"] = seconds_s
        figures[f"{key}_tokens_per_s"] = measured.tokens / seconds_s
        figures[f"{key}_wire_bytes"] = totals[0].wire_bytes
    return figures


def main() -> None:
    """Runs the benchmark."""
    args = harness.parser("throughput", __doc__.partition("\n")[0]).parse_args()
    run = Run(DEMO, steps=12, repeats=5, limit_s=900.0)
    if args.quick:
        run = Run(QUICK, steps=3, repeats=3, limit_s=20.0)
    measured = launch(on_rank, WORLD, run)[0]
    figures = figures_of(measured)
    harness.finish("throughput", figures, args.json)


if __name__ == "__main__":
    main()
