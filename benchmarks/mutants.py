"""Plants faults in dcpc, one at a time, and asks whether translation validation sees each.

    python -m benchmarks.mutants [--quick] [--json F] [--only TEXT]

A fault counts where it is *effective*: without verification a loss or a gradient of what runs
differs from plain torch's by more than 1e-6. It is caught where `verify="auto"` raises before a
number would reach the user, or where the check of masks drops the shortcut. A fault whose numbers
are right, or that crashes anyway, is listed and does not count.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from benchmarks import harness
from tests.mutants.graphs import ATTENTION, CACHES, DERIVATIVES, RUNTIME, SCHEDULE
from tests.mutants.layers import LAYERS
from tests.mutants.plant import PHASES, Mutant
from tests.mutants.run import (
    CAUGHT,
    DROPPED,
    ESCAPED,
    MISPLANTED,
    REFUSED,
    STOPPED,
    Verdict,
    run_mutant,
)
from tests.mutants.split import LOWERING, PLACEMENT, RULES
from tests.mutants.trace import MASKS, TRACE

MUTANTS: tuple[Mutant, ...] = (
    *TRACE, *MASKS, *RULES, *PLACEMENT, *LOWERING, *DERIVATIVES, *SCHEDULE, *ATTENTION, *CACHES,
    *RUNTIME, *LAYERS,
)  # fmt: skip

ENDS = (CAUGHT, REFUSED, DROPPED, STOPPED, ESCAPED)


@dataclass(frozen=True)
class Caught:
    """What became of planted faults.

    Attributes:
        verdicts: one each.
        spent_s: seconds of all.
    """

    verdicts: tuple[Verdict, ...]
    spent_s: float

    def count(self, *ends: str, phase: str = "") -> int:
        """Returns how many ended so, of a phase or of all."""
        mine = (v for v in self.verdicts if not phase or v.mutant.phase == phase)
        return sum(v.end in ends for v in mine)

    def figures(self) -> dict[str, harness.Cell]:
        """Returns the figures of a report."""
        effective = sum(v.effective for v in self.verdicts)
        caught = self.count(CAUGHT, REFUSED, DROPPED)
        return {
            "mutants": effective, "mutants_caught": caught,
            "mutants_by_other_errors": self.count(REFUSED), "mutants_dropped": self.count(DROPPED),
            "mutants_stopped": self.count(STOPPED),
            "caught_by_verify": caught / effective if effective else 0.0,
            "mutants_without_place": self.count(MISPLANTED),
            "mutants_ineffective": len(self.verdicts) - effective,
            "mutants_spent_s": round(self.spent_s, 1),
        }  # fmt: skip


def plant_all(mutants: Iterable[Mutant]) -> Caught:
    """Plants faults one after the other."""
    with harness.timed() as watch:
        verdicts = tuple(run_mutant(mutant) for mutant in mutants)
    return Caught(verdicts, watch.elapsed_s)


def chosen(quick: bool, only: str = "") -> list[Mutant]:
    """Returns the faults of a run: some of every phase if quick."""
    return [m for m in MUTANTS if (m.quick or not quick) and only in f"{m.phase}: {m.name}"]


def show(caught: Caught, every: bool = False) -> None:
    """Prints a table by phase, and by name what escaped or did not count."""
    rows: list[Sequence[harness.Cell]] = []
    for phase in PHASES:
        row = [caught.count(e, phase=phase) for e in ENDS]
        rows.append((phase, sum(row), *row))
    harness.print_table("planted faults", ("phase", "effective", *ENDS), rows)
    for v in caught.verdicts:
        if every or v.end not in (CAUGHT, REFUSED, DROPPED):
            said = v.said.splitlines()[0][:160] if v.said else ""
            what = f"{v.mutant.phase}: {v.mutant.name} ({v.mutant.setting})"
            print(f"{v.end:12} {v.error:8.1e} {v.spent_s:5.2f} s  {what}  {said}")


def main() -> None:
    """Runs the faults and writes the figures."""
    arguments = harness.parser("mutants", "Plants faults and counts what verification catches.")
    arguments.add_argument("--only", default="", help="faults whose phase or name has this text")
    arguments.add_argument("--every", action="store_true", help="a line for each fault")
    given = arguments.parse_args()
    torch.set_num_threads(1)
    caught = plant_all(chosen(given.quick, given.only))
    show(caught, given.every)
    figures = caught.figures()
    harness.finish("mutants", figures, given.json)


if __name__ == "__main__":
    main()
