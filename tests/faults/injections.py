"""Faults that strike ranks while they train, and what became of each."""

import multiprocessing
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dcpc.runtime.groups.local_ranks import RanksError, run_ranks
from tests.faults.memory import MODES, Found, inject_shortage, inject_slowness
from tests.faults.ranks import Injection, Trained, cannot_write, hit, resumed

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


def restart(waiting: list[tuple[Outcome, Path, int, str]], expected: Trained) -> None:
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


def damaged(count: int, whole: Path, scratch: Path) -> list[tuple[Outcome, Path, int, str]]:
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


def unwritable(count: int, scratch: Path, expected: Trained) -> list[Outcome]:
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
