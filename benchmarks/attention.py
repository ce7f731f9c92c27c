"""Every way to split attention: exact, balanced, what it sends, what it takes.

`python -m benchmarks.attention [--quick] [--json FILE]`, on gloo ranks of this machine.

    worst_relative_error   over all `cases`: an attention layer in float64 by every lowering,
                           against the plain layer: loss, output, gradients of the input, of q, k
                           and v and of all weights, each relative to its own largest element
    zigzag_imbalance       of causal (query, key) pairs: the fullest rank's over the mean, minus 1,
                           counted at 64 and more positions a rank; `in_order_imbalance`: without
    wire_bytes_off         bytes handed to torch.distributed in these cases less the formula's: the
                           profile's, where the ranks divide the length (and the heads, if these
                           are split) and keys go all the way round (`wire_cases` so many); the
                           exact one of rings' messages and hybrids' swaps, at every length
    saved_bytes_off        of the bytes a rank keeps for backward in a ring times the ranks: the
                           relative spread at 2, 4 and 8; `saved_share_of_8`: a rank's of eight
    crossover_error        median of |predicted - measured| / measured over the lengths at which
                           two ways cross (one rank alone is a way), of those 10% apart either way
                           at the ends of the range. Where none cross: `longest_ratio_error`, and
                           `crossovers` is 0
    crossovers_missed      measured ones that the prediction does not have in the range
    crossovers_invented    clear predicted ones that were not measured
    longest_ratio_error    median relative error of the ratio of two ways' seconds at the longest
                           length, of the number of ranks where it is larger

Seconds are the slowest rank's by the clock on the wall, the lower quartile of the rounds; ranks
have one thread each and share the machine's cores, also with whatever else runs on it. The
prediction is calibrated on the spot.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor

import torch

from benchmarks.attention_times import (
    Crossover,
    Plan,
    Times,
    crossovers,
    error_of,
    ratio_error,
    times_of,
)
from benchmarks.harness import Cell, parser, print_table, timed, write_report
from dcpc.passes.sharding.attention_ways import LOWERINGS
from tests.exact.attention import Case, Job, cases_of, drawn_lengths, saved_by_ranks
from tests.exact.attention_counts import imbalance, worst_imbalance
from tests.exact.attention_layer import KINDS

WORKERS = 2
WORLDS = (2, 4)  # that are timed
MOST_RANKS = 16  # for which pairs are counted
EXACT = 1e-10
QUICK = Plan(lengths=(64, 256, 1024, 2048), rounds=3, limit_s=1.0, budget_s=1.5)
FULL = Plan(
    lengths=(64, 128, 256, 512, 1024, 2048, 4096, 8192), rounds=9, limit_s=90.0, budget_s=20.0
)
# In the quick run the other layers run at some worlds only.
QUICK_WORLDS = {
    "4 heads, causal": (2, 3, 4), "GQA 8:1, causal": (4,), "MQA 8:1, packed": (4,),
    "6 heads, causal": (4,), "1 head, causal": (2, 4), "4 heads, window": (3,),
    "MQA, all keys": (2,),
}  # fmt: skip


def jobs(quick: bool) -> list[Job]:
    """Returns the layers to compare, those that take longest first."""
    if quick:
        return [
            Job(kind, worlds, LOWERINGS, tuple(drawn_lengths(p, 6, 100) for p in worlds))
            for kind, worlds in QUICK_WORLDS.items()
        ]
    return [
        Job(kind, worlds, LOWERINGS, tuple(drawn_lengths(p, 24, 300) for p in worlds))
        for kind in KINDS
        for worlds in ((5, 8), (2, 3, 4))
    ]


def all_cases(found: Sequence[Job]) -> list[Case]:
    """Returns the cases of all jobs, of which two run at a time."""
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(WORKERS, context) as pool:
        return [case for cases in pool.map(cases_of, found) for case in cases]


def summary(cases: Sequence[Case]) -> list[tuple[Cell, ...]]:
    """Lines by layer and number of ranks: cases, the worst error, bytes off."""
    groups: dict[str, list[Case]] = {}
    for case in cases:
        groups.setdefault(case.group, []).append(case)
    return [
        (
            name, len(mine), ", ".join(dict.fromkeys(c.lowering for c in mine)),
            f"{max(c.error for c in mine):.1e}", max(c.bytes_off for c in mine),
        )
        for name, mine in groups.items()
    ]  # fmt: skip


def balance() -> list[tuple[Cell, ...]]:
    """Lines by length and ranks: imbalance of causal pairs in order and zigzag, in percent."""
    points = [(64 * p + off, p) for p in (2, 3, 4, 8) for off in (0, 1)] + [(300, 4), (8192, 8)]
    return [
        (f"{n:,}", p, *(100 * imbalance(n, p, zigzag) for zigzag in (False, True)))
        for n, p in points
    ]


def figures_of(
    cases: Sequence[Case], saved: Mapping[int, int], times: Sequence[Times]
) -> dict[str, Cell]:
    """Returns the benchmark's figures, as its docstring says."""
    crossed = [c for t in times for c in crossovers(t)]
    error = error_of(crossed)
    shares = [saved[p] * p for p in (2, 4, 8)]
    return {
        "worst_relative_error": max(c.error for c in cases), "cases": len(cases),
        "zigzag_imbalance": worst_imbalance(MOST_RANKS, zigzag=True),
        "in_order_imbalance": worst_imbalance(MOST_RANKS, zigzag=False),
        "wire_bytes_off": max(c.bytes_off for c in cases),
        "wire_cases": sum(c.by_profile for c in cases),
        "saved_bytes_off": max(shares) / min(shares) - 1, "saved_share_of_8": saved[8] / saved[1],
        "crossover_error": max(map(ratio_error, times)) if error is None else error,
        "crossovers": sum(c.error is not None for c in crossed),
        "crossovers_missed": sum(c.measured is not None and c.predicted is None for c in crossed),
        "crossovers_invented": sum(c.measured is None for c in crossed),
        "longest_ratio_error": max(map(ratio_error, times)),
    }  # fmt: skip


def print_times(times: Times) -> None:
    """Prints the table of one number of ranks, and where its ways cross."""
    cores = os.cpu_count()
    print_table(
        f"{times.p} gloo ranks of one thread on {cores} cores: ms of forward and backward "
        f"(predicted), lower quartile of {times.rounds} rounds, load {os.getloadavg()[0]:.1f}",
        ("length", *times.ways, "fastest", "predicted"),
        times.rows(),
    )
    print_table(
        f"{times.p} ranks: lengths from which on the second way is faster, or slower",
        ("ways", "measured", "predicted", "error %"), [_crossing(c) for c in crossovers(times)],
        digits=0,
    )  # fmt: skip


def _crossing(c: Crossover) -> tuple[Cell, ...]:
    error = None if c.error is None else 100 * c.error
    return (" / ".join(c.ways), c.measured or "not in the range", c.predicted or "not", error)


def main() -> None:
    """Runs the benchmark."""
    args = parser("attention", __doc__.partition("\n")[0]).parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a process whose autograd has GPUs cannot be forked
    with timed() as watch:
        cases = all_cases(jobs(args.quick))
        print_table(
            "against the plain layer, float64",
            ("layer", "cases", "lowerings", "worst error", "bytes off"), summary(cases),
        )  # fmt: skip
        times = times_of(WORLDS, QUICK if args.quick else FULL)
        for t in times:
            print_times(t)
        header = ("length", "ranks", "in order %", "zigzag %")
        print_table("causal pairs of the fullest rank above the mean", header, balance())
        saved = saved_by_ranks((1, 2, 4, 8), 512)
        header = ("ranks", "bytes kept for backward", "times the ranks")
        rows = [(p, f"{n:,}", f"{n * p:,}") for p, n in saved.items()]
        print_table("a ring of 512 positions", header, rows)
    figures = {**figures_of(cases, saved, times), "seconds": watch.elapsed_s}
    shown = [(k, f"{v:.1e}" if k == "worst_relative_error" else v) for k, v in figures.items()]
    print_table("attention", ("figure", "value"), shown, digits=4)
    write_report("attention", figures, args.json)
    bad = [c for c in cases if not c.error < EXACT or c.bytes_off]
    for case in bad[:20]:
        print(f"{case.name}: error {case.error:.1e}, {case.bytes_off} bytes off", flush=True)
    if bad:
        sys.exit(1)


if __name__ == "__main__":
    main()
