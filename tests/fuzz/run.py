"""`make fuzz SECONDS=600`: fresh programs until the time is over; what fails becomes a case.

python -m tests.fuzz.run --seconds 600 [--seed N] [--refused]     # a fifth of it training runs
python -m tests.fuzz.run --runs --seconds 600 [--seed N]           # training runs alone
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from pathlib import Path

from tests.fuzz.generate import generate
from tests.fuzz.judge import MENU, Outcome, Setting, judge, settings
from tests.fuzz.program import Program
from tests.fuzz.runs.hunt import hunt
from tests.fuzz.shrink import alive, shrink

CASES = Path(__file__).parent / "cases"


def outcome(program: Program, tried: list[Setting], seed: int) -> Outcome:
    """Returns what becomes of a program."""
    try:
        model = program.model()
    except Exception as error:  # a step that cannot even be written down is the generator's fault
        return Outcome("void", repr(error))
    return judge(model, program.inputs, program.points, tried, seed, program.layout)


def smallest(
    program: Program, found: Outcome, seed: int, most: int = 150
) -> tuple[Program, Outcome]:
    """Returns a small program that fails as this one does, and how."""
    last = [found]

    def fails(p: Program) -> bool:
        now = outcome(p, tried, seed)
        same = now.kind == found.kind and now.alike == found.alike
        if same:
            last[0] = now
        return same

    tried = [found.setting] if found.setting is not None else [Setting()]
    if not fails(alive(program)):
        return program, found
    return shrink(alive(program), fails, most), last[0]


def tried_at(seed: int) -> list[Setting]:
    """Returns the settings for a program: now and then a plan's own recompute."""
    rng = random.Random(seed)
    return [*settings(rng, 2), *([rng.choice(MENU)] if rng.random() < 0.2 else [])]


def write(program: Program, found: Outcome, seed: int) -> Path:
    """Writes a program as a case; returns the file."""
    file = CASES / f"{found.kind}_{seed}.py"
    file.write_text(program.source(f"Seed {seed}, {found.text}"))
    return file


def main() -> None:
    """Runs programs until the time is over."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.run", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=None, help="of the first program")
    parser.add_argument("--refused", action="store_true", help="show what is refused, too")
    parser.add_argument("--dry", action="store_true", help="write no case")
    parser.add_argument("--runs", action="store_true", help="random training runs, no programs")
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(10**9) if options.seed is None else options.seed
    print(f"first seed {seed}", flush=True)
    runs_s = options.seconds * (1.0 if options.runs else 0.2)
    print(dict(hunt(runs_s, seed, options.refused)))
    options.seconds -= runs_s
    counts: Counter[str] = Counter()
    end = time.monotonic() + options.seconds
    while time.monotonic() < end:
        program = generate(seed)
        found = outcome(program, tried_at(seed), seed)
        counts[found.kind] += 1
        if found.kind in ("wrong", "crash") or (options.refused and found.kind == "refused"):
            program, found = smallest(program, found, seed)
            print(f"\n# seed {seed}: {found.kind}: {found.text}\n# at {program.points}")
            print(program.module_source(), flush=True)
            if not options.dry and found.kind != "refused":
                write(program, found, seed)
        seed += 1
    print(dict(counts))


if __name__ == "__main__":
    main()
