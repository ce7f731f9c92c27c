"""Faults of every kind while ranks train: do the others say so, and does training go on?

Each injection strikes at a random point of a random step (seeds are printed). The ranks that live
must raise one error that names the rank and the cause. Then the job is started again, in the same
world or another, and goes on from its newest whole checkpoint: losses and samples are compared with
those of a run that never stopped.

`KINDS` of `tests/faults/injections.py` is the table: a kind that strikes one rank is a row of it.
`SURVIVED` are those after which the same ranks train on (`tests/faults/memory.py`).
"""

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.harness import parser, print_table, write_report
from dcpc.runtime.groups.local_ranks import run_ranks
from tests.faults.injections import (
    KINDS,
    LIMIT_S,
    SURVIVED,
    Outcome,
    damaged,
    left_behind,
    restart,
    strike,
    trains_on,
    unwritable,
)
from tests.faults.ranks import Injection, straight
from tests.faults.soak import HELD, grows, growth, soak

LEAST, QUICK = 20, 1


def main(argv: Sequence[str] | None = None) -> int:
    """Runs all kinds; returns 1 where one was not survived."""
    p: argparse.ArgumentParser = parser("faults", __doc__.splitlines()[0])
    p.add_argument("--only", default="", help="kinds whose name has this text")
    p.add_argument("--seed", type=int, default=0, help="the first; others follow")
    p.add_argument("--soak-s", type=float, default=3600.0, help="seconds of the long run")
    args = p.parse_args(argv)
    count, worlds = (QUICK, (2,)) if args.quick else (LEAST, (2, 4))
    torch.set_num_threads(1)
    shared = {*os.listdir("/dev/shm")}
    scratch = Path(tempfile.mkdtemp(prefix="dcpc faults "))
    try:
        straight(0, "whole", None)  # what ranks are copies of has imported everything
        whole = scratch / "whole"
        (expected, _) = run_ranks(straight, 2, "whole", str(whole), fork=True, timeout_s=LIMIT_S)
        outcomes: list[Outcome] = []
        waiting: list[tuple[Outcome, Path, int, str]] = []

        def seeds(number: int) -> range:
            # One of each kind: modes and the ways to start again take turns over the kinds.
            first = args.seed + (number % 3 if args.quick else 0)
            return range(first, first + count)

        for number, kind in enumerate(KINDS):
            for seed in seeds(number):
                if args.only not in kind.name:
                    continue
                world, mode = worlds[seed % len(worlds)], ("whole", "rounds")[seed % 3 == 1]
                victim = kind.victim if kind.victim is not None else world - 1
                injection = Injection(
                    kind.name, kind.how, kind.where, seed, world, mode,
                    None if kind.everywhere else victim,
                )  # fmt: skip
                folder = scratch / f"{kind.name} {seed}"
                folder.mkdir()
                outcome = strike(kind, injection, folder)
                outcomes.append(outcome)
                again = {0: (world, mode), 1: (2, "whole"), 2: (1, "whole")}[seed % 3]
                waiting.append((outcome, folder, *again))
                print(f"{kind.name}, seed {seed}, {world} ranks, {mode}: "
                      f"{outcome.problem or 'named'}, {outcome.detection_s:.2f} s",
                      flush=True)  # fmt: skip
        for number, name in enumerate(SURVIVED):
            for seed in seeds(number):
                if args.only not in name:
                    continue
                outcomes.append(trains_on(name, seed, worlds[seed % len(worlds)]))
                print(f"{name}, seed {seed}: {outcomes[-1].problem or 'trained on'}", flush=True)
        if not args.only:
            hurt = damaged(count, whole, scratch)
            waiting += hurt
            outcomes += [o for o, *_ in hurt]
            outcomes += unwritable(count, scratch, expected)
        restart(waiting, expected)
        orphans = left_behind(shared)
        steps, held = (63, 60.0) if args.quick or args.only else (10**9, args.soak_s)
        done, samples = max(
            run_ranks(soak, 2 if args.quick else 4, steps, held, str(scratch / "soak"), fork=True,
                      timeout_s=held + 300.0)
        )  # fmt: skip
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return report(outcomes, orphans, done, samples, args.json)


def report(
    outcomes: list[Outcome], orphans: int, steps: int, samples: list[tuple[int, ...]],
    json_path: Path | None,
) -> int:  # fmt: skip
    """Prints the table and writes the figures."""
    rows = []
    for name in dict.fromkeys(o.kind for o in outcomes):
        mine = [o for o in outcomes if o.kind == name]
        rows.append([
            name, len(mine), sum(not o.problem for o in mine), max(o.detection_s for o in mine),
            sum(o.lost for o in mine), sum(o.repeated for o in mine),
            f"{max(o.difference for o in mine):.1e}",
        ])  # fmt: skip
    header = ["kind", "injections", "survived", "noticed within s", "lost", "repeated", "loss"]
    print_table("Faults", header, rows, digits=2)
    for o in outcomes:
        if o.problem:
            print(f"NOT SURVIVED: {o.kind}, seed {o.seed}: {o.problem}")
    grown = growth(samples)
    print_table("Soak", ["held", "at the end", "growth"],
                [[n, samples[-1][i], grown[n]] for i, n in enumerate(HELD)])  # fmt: skip
    survived = sum(not o.problem for o in outcomes)
    figures = {
        "kinds": len(rows), "injections": len(outcomes), "survived": survived,
        "samples_lost": sum(o.lost for o in outcomes),
        "samples_repeated": sum(o.repeated for o in outcomes),
        "worst_detection_s": max(o.detection_s for o in outcomes),
        "worst_loss_difference": max(o.difference for o in outcomes),
        "checkpointsdamaged_and_recovered": sum(o.damaged and not o.problem for o in outcomes),
        "orphans": orphans, "soak_steps": steps, "soak_growth": grows(grown, samples[-1][0]),
        **{f"soak_growth_{name}": by for name, by in grown.items()},
    }  # fmt: skip
    write_report("faults", figures, json_path)
    return int(survived < len(outcomes) or orphans > 0)


if __name__ == "__main__":
    sys.exit(main())
