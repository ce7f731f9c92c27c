"""Whether numbers can be trusted: fresh random programs on dcpc against the plain model.

Each program is a random module of `tests/fuzz/`, run in float64 on one rank and, in one process, on
2 to 4, with values made again or not, at sizes on either side of its constants. `silent_wrong` are
those whose loss or some gradient differs by over 1e-10 with nothing said, `crashes` those that end
in an error that is no DcpcError, `refused_share` those that dcpc refuses by name. Programs that the
plain model itself cannot run, or whose numbers hang on the last bit, are not counted. Seeds are
fresh, and printed; `--seed` repeats a run. `pairs` of them are training runs on two ranks with two
options of `dcpc.compile`, the loader or `train_step` at once (`tests/fuzz/pairs`).

Then faults are planted in every phase (`benchmarks.mutants`; some of them with `--quick`), of which
verification has to see `caught_by_verify`, and the share of a compile that it takes is measured
(`benchmarks.verify_share`). At last what two ranks hold after 2 and after 20 compiles is counted.
"""

from __future__ import annotations

import os
import random
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import chain, zip_longest
from multiprocessing import get_context
from resource import RUSAGE_SELF, getrusage

import torch

from benchmarks.harness import Cell, finish, parser, timed
from benchmarks.mutants import chosen, plant_all
from benchmarks.verify_share import share_figures, shares
from tests.faults.leaks import FIRST, LAST, leak_figures
from tests.fuzz.generate import generate
from tests.fuzz.judge import settings
from tests.fuzz.pairs import hunt
from tests.fuzz.run import outcome, tried_at

QUICK, FULL = 280, 2600
QUICK_PAIRS, FULL_PAIRS = 20, 400
CHUNK = 10  # programs a task
MUCH_KB = 500_000  # of memory, by which a program that raises the process's most is told
MOST_SPARE = 1.2  # programs drawn for each that is to be counted: some are void


def judged(first: int, count: int, quick: bool) -> list[tuple[int, str, str]]:
    """Returns seed, kind and text of what becomes of some programs."""
    torch.set_num_threads(1)
    found = []
    for seed in range(first, first + count):
        before_kb = getrusage(RUSAGE_SELF).ru_maxrss
        deep = not quick and seed % 2 == 0  # every other one: a program costs half its trace
        program = generate(seed, 1 if quick else 5 if deep else 3)
        tried = tried_at(seed) if deep else settings(random.Random(seed), 1)
        if quick:
            tried = random.Random(seed).sample(tried, 1)
        result = outcome(program, tried, seed)
        found.append((seed, result.kind, result.text))
        more_kb = getrusage(RUSAGE_SELF).ru_maxrss - before_kb
        if more_kb > MUCH_KB:
            print(f"seed {seed}: {result.kind}, took {more_kb / 1e6:.1f} GB more", flush=True)
    return found


Outcomes = list[tuple[int, str, str]]


@dataclass(frozen=True)
class Tried:
    """Programs that processes of their own try: tasks of some programs, and of some pairs.

    Attributes:
        tasks: first seed and outcomes of each.
        pairs: whether each is of pairs.
        wanted: programs and pairs that are to count.
    """

    tasks: Sequence[tuple[int, Future[Outcomes]]]
    pairs: Sequence[bool]
    wanted: tuple[int, int]

    @staticmethod
    def by(pool: Executor, first: int, quick: bool) -> Tried:
        """Hands the programs to a pool, pairs among them from the beginning on."""
        wanted = (QUICK, QUICK_PAIRS) if quick else (FULL, FULL_PAIRS)
        alone = [(s, False) for s in range(first, first + int(MOST_SPARE * wanted[0]), CHUNK)]
        even = first - first % 2  # two neighbours share a compile
        both = [(s, True) for s in range(even, even + int(MOST_SPARE * wanted[1]), hunt.EACH)]
        each = -(-len(alone) // len(both))
        rows = zip_longest(both, *(alone[i::each] for i in range(each)))
        order = [task for task in chain.from_iterable(rows) if task is not None]
        tasks = [
            (s, pool.submit(hunt.tried, s, hunt.EACH) if pair
             else pool.submit(judged, s, CHUNK, quick))
            for s, pair in order
        ]  # fmt: skip
        return Tried(tasks, [pair for _, pair in order], wanted)

    def outcomes(self, end_s: float) -> Iterator[tuple[bool, int, str, str]]:
        """Yields outcomes until so many programs counted; a process that dies is a crash.

        Args:
            end_s: of the monotonic clock, after which nothing more is begun.
        """
        counts = [0, 0]
        for (start, task), pair in zip(self.tasks, self.pairs, strict=True):
            if counts[pair] >= self.wanted[pair] or time.monotonic() > end_s:
                task.cancel()
                continue
            try:
                results = task.result()
            except BrokenProcessPool:
                yield pair, start, "crash", f"a process died at one of the seeds from {start} on"
                return
            for seed, kind, text in results:
                yield pair, seed, kind, text
                counts[pair] += kind != "void"

    def figures(self, end_s: float) -> dict[str, Cell]:
        """Returns the figures of random programs, and prints what failed.

        Args:
            end_s: as of `outcomes`.
        """
        counts: Counter[str] = Counter()
        pairs = 0
        for pair, seed, kind, text in self.outcomes(end_s):
            counts[kind] += 1
            pairs += pair
            if kind in ("wrong", "crash"):
                lines = text.strip().splitlines() or [""]
                print(f"{'pair' if pair else 'seed'} {seed}: {kind}: {lines[-1][:150]}", flush=True)
                print(text if pair else "", end="", flush=True)
        counted = sum(counts.values()) - counts["void"]
        return {
            "programs": counted, "pairs": pairs, "silent_wrong": counts["wrong"],
            "crashes": counts["crash"], "refused_share": counts["refused"] / counted,
            "void": counts["void"],
        }  # fmt: skip


def main() -> None:
    """Runs programs, prints and writes the figures; ends with 1 where a promise is broken."""
    p = parser("trust", (__doc__ or "").splitlines()[0])
    p.add_argument("--seed", type=int, default=None, help="of the first program; default: fresh")
    p.add_argument("--seconds", type=float, default=float("inf"), help="for programs, at most")
    p.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="that try programs")
    args = p.parse_args()
    first = random.SystemRandom().randrange(10**9) if args.seed is None else args.seed
    print(f"seeds from {first} on")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    end_s = time.monotonic() + args.seconds
    # Forked before this process runs anything of torch: they need not import it again.
    forked = ProcessPoolExecutor(args.processes, mp_context=get_context("fork"))
    with timed() as watch, forked as pool:
        tried = Tried.by(pool, first, args.quick)
        caught = plant_all(chosen(args.quick)[:: 2 if args.quick else 1]).figures()
        figures = tried.figures(end_s)
    figures |= {"first_seed": first, "fuzz_and_plant_s": watch.elapsed_s}
    # As a user's process would: what ran here before has warmed torch's caches for the compile.
    one = {"initializer": torch.set_num_threads, "initargs": (1,)}
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), **one) as fresh:
        figures |= caught | share_figures(fresh.submit(shares, args.quick).result())
    figures |= leak_figures()
    finish("trust", figures, args.json)
    broken = figures["silent_wrong"] or figures["crashes"] or figures["refused_share"] >= 0.05
    for name in ("threads", "descriptors"):
        few, many = (figures[f"{name}_after_{n}_compiles"] for n in (FIRST, LAST))
        broken = broken or many != few
    if broken or float(caught["caught_by_verify"] or 0) < 0.95:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
