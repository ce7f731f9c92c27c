"""The zoo's graphs and plans under several hash seeds: every process must find the same.

Python orders sets of strings otherwise in every process, and ranks are processes. Each seed is a
process that traces all models, plans them for two ranks and lowers what was planned. `--only` takes
models with a text in their name, `--more` the other architectures too.
"""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import sys
import warnings

from torch import nn

import dcpc
from benchmarks.harness import Cell, parser, print_table, write_report

SEEDS = ("0", "1", "2", "3")
WORLD = 2


def fingerprint(model: nn.Module, buckets: dcpc.Buckets) -> str:
    """Returns what all ranks must agree on: hashes of the traces, of the plan, of the graphs."""
    planned = dcpc.api.plan(model, buckets, world=WORLD, device="h200", backend="eager")
    traces = " ".join(v.traced.program.graph_hash for v in planned.traces)
    rows = [repr((str(b), planned.tables[b], planned.plans[b])) for b in buckets]
    graphs = []
    for bucket in buckets:
        runnable = planned.by_bucket[bucket]
        joint = runnable.traced.lowering(runnable.priced.placement(bucket.sizes, WORLD)).joint
        graphs.append(f"{joint.gm.code} {joint.primals} {[*map(str, joint.guards)]}")
    return f"{traces} {_hash(rows)} {_hash(graphs)}"


def _hash(texts: list[str]) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]


def run(arguments: list[str], seed: str, timeout_s: float) -> dict[str, str]:
    """Returns what a module prints under a seed: name -> fingerprint, a line each."""
    env = {**os.environ, "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", *arguments]
    made = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=timeout_s, check=True
    )
    lines = (line.partition(": ") for line in made.stdout.splitlines())
    return {name: found for name, mark, found in lines if mark}


def _print_all(only: str, tables: list[str]) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    from benchmarks.zoo import table
    from tests.zoo.models import DEPTH

    DEPTH["layers"] = 2
    for which in tables:
        for name, model in table(which).items():
            if only.lower() not in name.lower():
                continue
            try:
                found = fingerprint(model.make(), model.buckets)
            except dcpc.DcpcError as error:  # refused: it must be so under every seed
                found = f"refused {type(error).__name__}"
            print(f"{name}: {found}", flush=True)


def main() -> None:
    p = parser("zoo_seeds", __doc__ or "")
    p.add_argument("--more", action="store_true", help="other architectures too")
    p.add_argument("--only", metavar="TEXT", default="", help="models with this in their name")
    p.add_argument("--print", action="store_true", help="under this process' own seed alone")
    args = p.parse_args()
    if args.print:
        _print_all(args.only, ["named", "more"] if args.more else ["named"])
        return
    own = ["benchmarks.zoo_seeds", "--print", "--only", args.only]
    own += ["--more"] if args.more else []
    seeds = SEEDS[:2] if args.quick else SEEDS
    each = [run(own, seed, 7200.0) for seed in seeds]
    differing = [n for n, found in each[0].items() if any(e.get(n) != found for e in each)]
    rows: list[list[Cell]] = [[n, *(e.get(n, "-") for e in each)] for n in differing]
    print_table("models whose graphs or plans differ", ["model", *seeds], rows)
    figures = {"models": len(each[0]), "seeds": len(seeds), "differing": len(differing)}
    write_report("zoo_seeds", figures, args.json)
    if differing:
        sys.exit(1)


if __name__ == "__main__":
    main()
