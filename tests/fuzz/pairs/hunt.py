"""Pairs of options on two ranks, which are started once for many of them."""

from __future__ import annotations

import argparse
import random
import re
import time
from collections import Counter
from collections.abc import Sequence

from tests.fuzz.judge import Outcome
from tests.fuzz.pairs.draw import PER_SETUP, REFUSED, generate
from tests.fuzz.runs.draw import Run
from tests.fuzz.runs.hunt import outcomes

EACH = 20  # runs for which ranks are started once
EACH_S = 30.0  # that one may take: Inductor compiles some, beside other work


def judged(drawn: Sequence[tuple[tuple[str, str], Run]]) -> list[Outcome]:
    """Returns what becomes of runs; ranks are started anew after one that is wrong or crashes."""
    found: list[Outcome] = []
    while len(found) < len(drawn):
        rest = drawn[len(found) :]
        some = outcomes([run for _, run in rest], EACH_S)
        if len(rest) > 1 and [o.alike for o in some] == ["ranks"]:  # which of them is it?
            some = [outcomes([run], EACH_S)[0] for _, run in rest]
        pairs = zip(rest, some, strict=False)
        found += [expected(pair, outcome) for (pair, _), outcome in pairs]
    return found


def expected(pair: tuple[str, str], found: Outcome) -> Outcome:
    """Returns the outcome of a run; a refusal that the pair does not have to expect is a crash."""
    if found.kind != "refused":
        return found
    if pair in REFUSED and re.search(REFUSED[pair], found.text, re.S):
        return found
    return Outcome("crash", f"{' and '.join(pair)}: nobody expects {found.text}", found.alike)


def tried(first: int, count: int) -> list[tuple[int, str, str]]:
    """Returns seed, kind and text of what becomes of the runs of some seeds."""
    seeds = range(first, first + count)
    drawn = [generate(seed) for seed in seeds]
    found = judged(drawn)
    return [
        (seed, o.kind, f"{' and '.join(pair)}: {o.text}\n{run.text()}" if o.text else "")
        for seed, (pair, run), o in zip(seeds, drawn, found, strict=True)
    ]


def main() -> None:
    """Runs pairs until the time is over."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.pairs.hunt", description=__doc__)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--seed", type=int, default=None, help="of the first run")
    parser.add_argument("--refused", action="store_true", help="show what is refused, too")
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(10**9) if options.seed is None else options.seed
    first = seed - seed % PER_SETUP
    print(f"first seed {first}", flush=True)
    counts: Counter[str] = Counter()
    end = time.monotonic() + options.seconds
    while time.monotonic() < end:
        for number, kind, text in tried(first, EACH):
            counts[kind] += 1
            if kind in ("wrong", "crash") or (options.refused and kind == "refused"):
                print(f"\n# seed {number}: {kind}: {text}", flush=True)
        first += EACH
    print(dict(counts))


if __name__ == "__main__":
    main()
