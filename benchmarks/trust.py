"""Whether numbers can be trusted: fresh random programs on dcpc against the plain model.

Each program is a random module of `tests/fuzz/`, run in float64 on one rank and, in one process, on
2 to 4, with values made again or not, at sizes on either side of its constants. `silent_wrong` are
those whose loss or some gradient differs by over 1e-10 with nothing said, `crashes` those that end
in an error that is no DcpcError, `refused_share` those that dcpc refuses by name. Programs that the
plain model itself cannot run, or whose numbers hang on the last bit, are not counted. Seeds are
fresh, and printed; `--seed` repeats a run.

Then faults are planted in every phase (`benchmarks.mutants`; some of them with `--quick`), of which
verification has to see `caught_by_verify`, and the share of a compile that it takes is measured
(`benchmarks.verify_share`).
"""

from __future__ import annotations

import os
import random
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context

import torch

from benchmarks.harness import Cell, parser, print_table, timed, write_report
from benchmarks.mutants import chosen, plant_all
from benchmarks.verify_share import share_figures, shares
from tests.fuzz.generate import generate
from tests.fuzz.judge import settings
from tests.fuzz.run import outcome, tried_at

QUICK, FULL = 300, 2000
CHUNK = 10  # programs a task
MOST_SPARE = 1.2  # programs drawn for each that is to be counted: some are void


def judged(first: int, count: int, quick: bool) -> list[tuple[int, str, str]]:
    """Returns seed, kind and text of what becomes of some programs."""
    torch.set_num_threads(1)
    found = []
    for seed in range(first, first + count):
        program = generate(seed, 1 if quick else 5)
        tried = settings(random.Random(seed), 1) if quick else tried_at(seed)
        if quick:
            tried = random.Random(seed).sample(tried, 1)
        result = outcome(program, tried, seed)
        found.append((seed, result.kind, result.text))
    return found


@dataclass(frozen=True)
class Tried:
    """Programs that processes of their own try, a task for each `CHUNK` of seeds."""

    tasks: Sequence[tuple[int, Future[list[tuple[int, str, str]]]]]
    wanted: int

    @staticmethod
    def by(pool: Executor, first: int, quick: bool) -> Tried:
        """Hands the programs to a pool."""
        wanted = QUICK if quick else FULL
        starts = range(first, first + int(MOST_SPARE * wanted), CHUNK)
        return Tried([(s, pool.submit(judged, s, CHUNK, quick)) for s in starts], wanted)

    def outcomes(self) -> Iterator[tuple[int, str, str]]:
        """Yields outcomes until so many programs counted; a process that dies is a crash."""
        count = 0
        for start, task in self.tasks:
            if count >= self.wanted:
                task.cancel()
                continue
            try:
                results = task.result()
            except BrokenProcessPool:
                yield start, "crash", f"a process died at one of the seeds from {start} on"
                return
            yield from results
            count += sum(kind != "void" for _, kind, _ in results)

    def figures(self) -> dict[str, Cell]:
        """Returns the figures of random programs, and prints what failed."""
        counts: Counter[str] = Counter()
        for seed, kind, text in self.outcomes():
            counts[kind] += 1
            if kind in ("wrong", "crash"):
                last = text.strip().splitlines()[-1]
                print(f"seed {seed}: {kind}: {last[:150]}", flush=True)
        counted = sum(counts.values()) - counts["void"]
        return {
            "programs": counted,
            "silent_wrong": counts["wrong"],
            "crashes": counts["crash"],
            "refused_share": counts["refused"] / counted,
            "void": counts["void"],
        }


def main() -> None:
    """Runs programs, prints and writes the figures; ends with 1 where a promise is broken."""
    p = parser("trust", (__doc__ or "").splitlines()[0])
    p.add_argument("--seed", type=int, default=None, help="of the first program; default: fresh")
    args = p.parse_args()
    first = random.SystemRandom().randrange(10**9) if args.seed is None else args.seed
    print(f"seeds from {first} on")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    # Forked before this process runs anything of torch: they need not import it again.
    forked = ProcessPoolExecutor(os.cpu_count() or 1, mp_context=get_context("fork"))
    with timed() as watch, forked as pool:
        tried = Tried.by(pool, first, args.quick)
        caught = plant_all(chosen(args.quick)[:: 2 if args.quick else 1]).figures()
        figures = tried.figures()
    figures |= {"first_seed": first, "fuzz_and_plant_s": watch.elapsed_s}
    # As a user's process would: what ran here before has warmed torch's caches for the compile.
    one = {"initializer": torch.set_num_threads, "initargs": (1,)}
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), **one) as fresh:
        figures |= caught | share_figures(fresh.submit(shares, args.quick).result())
    print_table("Random programs and planted faults", ["", "figure"], list(figures.items()))
    write_report("trust", figures, args.json)
    broken = figures["silent_wrong"] or figures["crashes"] or figures["refused_share"] >= 0.05
    if broken or float(caught["caught_by_verify"] or 0) < 0.95:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
