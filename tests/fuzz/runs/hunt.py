"""Many runs in a row, alone or by ranks that are started once; what fails is made smaller."""

from __future__ import annotations

import itertools
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch.distributed as dist

from dcpc.runtime.groups.local_ranks import RanksError, run_ranks
from tests.fuzz.judge import Outcome
from tests.fuzz.runs.draw import PER_SETUP, Run, generate
from tests.fuzz.runs.judge import judge
from tests.fuzz.shrink import descend

TIMEOUT_S = 60.0
WORLDS = (1, 1, 2, 1, 3)


def outcomes(runs: Sequence[Run], each_s: float = 3.0) -> list[Outcome]:
    """Returns what becomes of runs of one world size; a crash of ranks ends the list.

    Args:
        runs: that the same ranks run one after the other.
        each_s: seconds that a run may take, on average.
    """
    world = runs[0].world
    if world == 1:
        return [judge(run) for run in runs]
    try:
        return list(
            run_ranks(_judged, world, list(runs), timeout_s=TIMEOUT_S + each_s * len(runs))[0]
        )
    except RanksError as error:
        told = re.search(r"AssertionError: run (\d+), (wrong|crash): (.*)", str(error))
        if told is None:
            return [Outcome("crash", str(error), "ranks")]
        found = Outcome(told[2], told[3], told[3].split(":")[0])
        return [*[Outcome("right")] * int(told[1]), found]


def _judged(rank: int, runs: list[Run]) -> list[Outcome]:
    found: list[Outcome] = []
    for number, run in enumerate(runs):
        mine = judge(run)
        if mine.kind in ("wrong", "crash"):
            # Peers may go on with the run, or wait in it: what comes after is not compared.
            raise AssertionError(f"run {number}, {mine.kind}: {mine.text}")
        every: list[Any] = [None] * run.world
        dist.all_gather_object(every, mine.kind)
        if len(set(every)) > 1:
            raise AssertionError(f"run {number}, crash: ranks end as {every}")
        found.append(mine)
    return found


def smallest(run: Run, found: Outcome, most: int = 60) -> Run:
    """Returns a simpler run that fails in the same way; at most so many are tried."""

    def fails(simpler: Run) -> bool:
        now = outcomes([simpler])[0]
        return (now.kind, now.alike) == (found.kind, found.alike)

    return descend(run, _simpler, fails, most)


def _simpler(run: Run) -> Iterator[Run]:
    for half in (run.lengths[::2], run.lengths[1::2], run.lengths[:-1], run.lengths[1:]):
        if 0 < len(half) < len(run.lengths):
            yield replace(run, lengths=half)
    for name in ("options", "then", "setup"):
        own = getattr(run, name)
        yield from (replace(run, **{name: less}) for less in _plainer(own))
    yield from _plainer(run)


def _plainer(x: Any) -> Iterator[Any]:
    """Yields it with one field as it is by default."""
    for f in fields(x):
        plain = getattr(type(x)(), f.name)
        fixed = f.name in ("world", "lengths", "sizes", "body", "loss", "packing")
        if getattr(x, f.name) != plain and not fixed and not is_dataclass(plain):
            yield replace(x, **{f.name: plain})


def hunt(seconds: float, seed: int, refused: bool = False) -> Counter[str]:
    """Prints what is wrong among runs from a seed until the time is over; returns counts.

    Args:
        seconds: to go on for.
        seed: of the first run; runs of one setup begin at multiples of `PER_SETUP`.
        refused: print what is refused, too.
    """
    counts: Counter[str] = Counter()
    end = time.monotonic() + seconds
    first = seed - seed % PER_SETUP
    for world in itertools.cycle(WORLDS):
        if time.monotonic() > end:
            return counts
        runs = [generate(s, world) for s in range(first, first + (5 - world) * PER_SETUP)]
        for number, (run, found) in enumerate(zip(runs, outcomes(runs), strict=False)):
            counts[f"{found.kind} at {world}"] += 1
            if found.kind in ("wrong", "crash"):
                run = smallest(run, found, most=60 if world == 1 else 12)
            elif found.kind != "refused" or not refused:
                continue
            print(f"\n# seed {first + number}, world {world}: {found.kind}: {found.text}")
            print(run.text(), flush=True)
        first += len(runs)
    return counts
