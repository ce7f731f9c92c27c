"""Faults of every kind while ranks train: do the others say so, and does training go on?

Each injection strikes at a random point of a random step (seeds are printed). The ranks that live
must raise one error that names the rank and the cause. Then the job is started again, in the same
world or another, and goes on from its newest whole checkpoint: losses and samples are compared with
those of a run that never stopped.

`KINDS` is the table: a kind that strikes one rank is a row of it. `SURVIVED` are those after which
the same ranks train on (`faults_memory.py`). What needs ranks of its own (`_damaged`,
`_unwritable`) adds its outcomes in `main`.
"""

import argparse
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.faults_memory import MODES, Found, inject_shortage, inject_slowness
from benchmarks.faults_ranks import (
    Injection,
    Trained,
    cannot_write,
    hit,
    resumed,
    straight,
)
from benchmarks.faults_soak import HELD, grows, growth, soak
from benchmarks.harness import parser, print_table, write_report
from dcpc.runtime.groups.local_ranks import RanksError, run_ranks

LEAST, QUICK = 20, 1
SAME = 1e-10
LIMIT_S = 120.0


@dataclass(frozen=True)
class Kind:
    """A fault that strikes a rank.

    Attributes:
        name: in the table.
        how: what happens, see `Trap.strike`.
        where: it happens, see `Trap`.
        error: what the other ranks' error says, a regular expression.
        victim: which rank; None: the last.
        everywhere: whether it strikes all ranks: each raises its own error.
    """

    name: str
    how: str
    where: str
    error: str
    victim: int | None = None
    everywhere: bool = False


LOST = r"rank {rank} is lost: got the end of its process"
KINDS = (
    Kind("kill -9 at any instant", "kill", "instant", LOST),
    Kind("kill -9 while it saves", "kill", "save", LOST),
    Kind("segmentation fault in a collective", "segfault", "collective", LOST),
    Kind("exception in a collective", "raise", "collective", "rank {rank} failed: got ValueError"),
    # In rounds a step of four samples runs on ranks 0 and 1.
    Kind("exception in the model", "raise", "model", "rank {rank} failed: got ValueError: injecte",
         victim=1),
    Kind("exception in a dataset", "raise", "dataset", "rank {rank}.*ValueError: injected",
         victim=1),
    Kind("exception in every dataset", "raise", "dataset", "ValueError.*injected|injected",
         everywhere=True),
    Kind("exception between steps", "raise", "between", "rank {rank} failed: got ValueError: inj"),
    Kind("Ctrl-C", "interrupt", "between", "rank {rank} failed: got KeyboardInterrupt"),
    Kind("exception in the planner", "raise", "plan", "planner of rank 0.*injected", victim=0),
    Kind("plan too late", "late", "plan", "rank [1-9].*nothing within 1 s|nothing within 1 s",
         victim=0),
    Kind("plan damaged on its way", "damage", "message", "got a message whose checksum", victim=0),
)  # fmt: skip

# Name -> one job of its own: (seed, ranks) -> what was found.
SURVIVED: dict[str, Callable[[int, int], Found]] = {
    "out of memory in a rank alone": lambda n, ranks: inject_shortage(n, ranks, MODES[n % 3]),
    "out of memory in an SP group": lambda n, ranks: inject_shortage(n, ranks, sp=2),
    "slow rank": lambda n, ranks: inject_slowness(n, ranks),
}


@dataclass
class Outcome:
    """What came of an injection.

    Attributes:
        kind: its name.
        seed: of its random numbers.
        problem: why it was not survived; "": it was.
        detection_s: seconds until the last rank that lives raised; 0: nothing was to be noticed.
        lost: samples that nobody trained.
        repeated: samples that were trained twice.
        difference: largest of losses to those of a run that never stopped, relative.
        damaged: whether a checkpoint was, and the one before it was taken.
    """

    kind: str
    seed: int
    problem: str = ""
    detection_s: float = 0.0
    lost: int = 0
    repeated: int = 0
    difference: float = 0.0
    damaged: bool = False


def compare(outcome: Outcome, straight: Trained, done: int, found: Trained) -> None:
    """Compares what followed a checkpoint with the same steps of a run that never stopped."""
    wanted = {n: v for n, v in straight.items() if n > done}
    for n, (loss, _) in found.items():
        if n in wanted:
            relative = abs(loss / wanted[n][0] - 1)
            outcome.difference = max(outcome.difference, relative)
    before = [i for n, (_, ids) in straight.items() if n <= done for i in ids]
    trained = before + [i for _, ids in found.values() for i in ids]
    every = {i for _, ids in straight.values() for i in ids}
    outcome.lost += len(every - {*trained})
    outcome.repeated += len(trained) - len({*trained})
    if outcome.difference > SAME or outcome.lost or outcome.repeated:
        outcome.problem = outcome.problem or "training went on otherwise"


def strike(kind: Kind, injection: Injection, folder: Path) -> Outcome:
    """Runs ranks one of which is hit; returns what the others raised, and how soon."""
    outcome = Outcome(kind.name, injection.seed)
    world = injection.world
    victims = range(world) if injection.victim is None else [injection.victim]
    try:
        found = run_ranks(
            hit, world, injection, str(folder), fork=True, may_die=victims, timeout_s=LIMIT_S
        )
    except RanksError as e:
        outcome.problem = f"{e}"[-300:]
        return outcome
    text = kind.error.replace("{rank}", str(injection.victim))
    struck_s = float((folder / "struck").read_text()) if (folder / "struck").exists() else 0.0
    if not struck_s:
        outcome.problem = "it was never struck"
        return outcome
    for rank, each in enumerate(found):
        if rank in victims and not kind.everywhere:
            continue
        if each is None or not re.search(text, each[2], re.DOTALL):
            outcome.problem = f"rank {rank} said: {each and each[1:3]}"
        else:
            outcome.detection_s = max(outcome.detection_s, each[3] - struck_s)
    return outcome


def _restart(waiting: list[tuple[Outcome, Path, int, str]], expected: Trained) -> None:
    """Goes on from what the struck jobs left, many in one launch."""
    for world, mode in sorted({(w, m) for _, _, w, m in waiting}):
        mine = [(o, f) for o, f, w, m in waiting if (w, m) == (world, mode)]
        try:
            folders = [str(f) for _, f in mine]
            (found, *_) = run_ranks(resumed, world, mode, folders, fork=True, timeout_s=600.0)
        except RanksError as e:
            for outcome, _ in mine:
                outcome.problem = outcome.problem or f"not started again: {e}"[-300:]
            continue
        for (outcome, _), (done, after) in zip(mine, found, strict=True):
            compare(outcome, expected, done, after)


def _damaged(count: int, whole: Path, scratch: Path) -> list[tuple[Outcome, Path, int, str]]:
    """Returns copies of a job's folder, of each the newest checkpoint damaged somewhere."""
    found = []
    for name in ("a bit of a checkpoint flipped", "a checkpoint cut off", "a file of one missing"):
        for seed in range(count):
            numbers = Injection(name, "", "", seed, 0, "", None).random()
            folder = scratch / f"{name} {seed}"
            shutil.copytree(whole, folder)
            newest = max(folder.glob("step-*"))
            names = [f for f in sorted(newest.iterdir()) if f.name != ".metadata"]
            file = numbers.choice(names)
            content = bytearray(file.read_bytes())
            at = numbers.randrange(len(content))
            if name.startswith("a bit"):
                content[at] ^= 1 << numbers.randrange(8)
                file.write_bytes(bytes(content))
            elif name.startswith("a checkpoint"):
                file.write_bytes(bytes(content[:at]))
            else:
                file.unlink()
            found.append((Outcome(name, seed, damaged=True), folder, 2, "whole"))
    return found


def _unwritable(count: int, scratch: Path, expected: Trained) -> list[Outcome]:
    """Returns what came of files that end at a random byte, as on a full disk."""
    found = []
    runs = run_ranks(
        cannot_write, 2, range(count), str(scratch / "unwritable"), fork=True, timeout_s=600.0
    )
    for seed, each in enumerate(zip(*runs, strict=True)):
        outcome = Outcome("disk full at any byte of a checkpoint", seed)
        for error, newest, trained in each:
            if error and "Error" not in error:
                outcome.problem = f"said: {error}"
            if error and newest != 0:
                outcome.problem = "what could not be written was taken"
            compare(outcome, expected, 0, trained)
        if len({bool(error) for error, *_ in each}) > 1:
            outcome.problem = "ranks disagree about it"
        found.append(outcome)
    return found


def trains_on(name: str, seed: int, world: int) -> Outcome:
    """Returns what came of a fault after which the same ranks train on, in a job of its own."""
    found = SURVIVED[name](seed, world)
    problem = found.text[-300:] if found.text else "" if found.survived else "other numbers"
    if not problem and not found.injected:
        problem = "it was never struck"
    return Outcome(
        name, seed, problem, lost=found.samples_lost, repeated=found.samples_repeated,
        difference=found.loss_difference,
    )  # fmt: skip


def left_behind(before: set[str]) -> int:
    """Returns the processes and files of shared memory that were left."""
    children = [p for p in multiprocessing.active_children() if p.is_alive()]
    stays, group = 0, os.getpgid(0)
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            try:
                state, parent, its_group = (
                    (entry / "stat").read_text().rsplit(")", 1)[1].split()[:3]
                )
            except (OSError, ValueError):
                continue
            ours = int(its_group) == group and int(parent) in (1, os.getpid())
            stays += ours and state != "Z" and b"faults" in (entry / "cmdline").read_bytes()
    return len(children) + stays + len({*os.listdir("/dev/shm")} - before)


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
            damaged = _damaged(count, whole, scratch)
            waiting += damaged
            outcomes += [o for o, *_ in damaged]
            outcomes += _unwritable(count, scratch, expected)
        _restart(waiting, expected)
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
        "kinds": len(rows),
        "injections": len(outcomes),
        "survived": survived,
        "samples_lost": sum(o.lost for o in outcomes),
        "samples_repeated": sum(o.repeated for o in outcomes),
        "worst_detection_s": max(o.detection_s for o in outcomes),
        "worst_loss_difference": max(o.difference for o in outcomes),
        "checkpoints_damaged_and_recovered": sum(o.damaged and not o.problem for o in outcomes),
        "orphans": orphans,
        "soak_steps": steps,
        "soak_growth": grows(grown, samples[-1][0]),
        **{f"soak_growth_{name}": by for name, by in grown.items()},
    }
    write_report("faults", figures, json_path)
    return int(survived < len(outcomes) or orphans > 0)


if __name__ == "__main__":
    sys.exit(main())
