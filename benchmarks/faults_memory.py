"""Ranks out of memory, and slow ones: do they train on? What strikes is in `tests/faults`."""

import argparse
import sys

from benchmarks.harness import parser, print_table, write_report
from tests.faults.memory import MODES, inject_shortage, inject_slowness


def main(arguments: argparse.Namespace) -> int:
    """Runs some of each kind; returns whether all survived, as an exit code."""
    count = 1 if arguments.quick else 20
    found = [inject_shortage(seed, 2, MODES[seed % 3]) for seed in range(count)]
    found += [inject_shortage(seed, 2, sp=2) for seed in range(count)]
    found += [] if arguments.quick else [inject_shortage(s, 4, sp="auto") for s in range(count)]
    found += [inject_slowness(seed) for seed in range(1 if arguments.quick else 3)]
    print_table(
        "out of memory and slow ranks",
        ["kind", "ops without memory", "survived", "loss difference", "smaller plans", "speeds"],
        [[f.kind, f.injected, str(f.survived), f.loss_difference, f.replans, str(f.speeds)]
         for f in found],
    )  # fmt: skip
    for f in found:
        if f.text:
            print(f.text, file=sys.stderr)
    figures = {
        "injections": sum(f.injected for f in found), "runs": len(found),
        "survived": sum(f.survived for f in found),
        "worst_loss_difference": max(f.loss_difference for f in found),
        "samples_lost": sum(f.samples_lost for f in found),
        "samples_repeated": sum(f.samples_repeated for f in found),
    }  # fmt: skip
    write_report("faults_memory", figures, arguments.json)
    return int(figures["survived"] < len(found))


if __name__ == "__main__":
    sys.exit(main(parser("faults_memory", "Ranks out of memory, and slow ones.").parse_args()))
