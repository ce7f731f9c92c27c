"""`python -m benchmarks.gpu_checks`: everything that a GPU is to show, in one command."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
import warnings
from datetime import date
from pathlib import Path
from typing import Any, NoReturn

import torch

from benchmarks import harness
from benchmarks.gpu_checks.page import counted, write
from benchmarks.gpu_checks.rows import Setting
from benchmarks.gpu_checks.runner import SLOWER, STEPS, Asked, be_step, run_steps

LIMIT_S = 660.0
PACKAGES = ("torch", "triton", "transformers", "flash-attn", "numpy")


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    p = argparse.ArgumentParser(prog="python -m benchmarks.gpu_checks", description=__doc__)
    p.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: tiny models")
    p.add_argument("--quick", action="store_true", help="fewer widths and rounds")
    p.add_argument("--json", type=Path, metavar="FILE", help="results, written after each step")
    names = ", ".join(step.name for step in STEPS)
    p.add_argument("--only", metavar="NAME,...", help=f"steps: {names}")
    p.add_argument(
        "--no-numbers", action="store_true",
        help="compare bytes alone, measure nothing: for a stub of a GPU (tests/gpu_stub)",
    )  # fmt: skip
    p.add_argument(
        "--limit-s", type=float,
        help=f"seconds of all steps together: {LIMIT_S:g}, {SLOWER} times that on a CPU or a stub",
    )  # fmt: skip
    p.add_argument("--jobs", type=int, help="steps that time nothing beside each other")
    p.add_argument("--commit", help="of the tree, where git is not at hand")
    p.add_argument(
        "--page", type=Path, nargs="+", metavar="FILE", help="write the JSON of runs into the page"
    )
    p.add_argument("--step", help=argparse.SUPPRESS)
    p.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    return p


def main() -> int:
    """Runs the command; returns its exit code: 1 where a check failed."""
    p = parser()
    args = p.parse_args()
    if args.page is not None:
        write([json.loads(file.read_text()) for file in args.page])
        return 0
    if args.device == "cuda" and not torch.cuda.is_available():
        p.error(
            "torch sees no GPU; nothing was run. --device cpu runs the same steps on tiny models, "
            "which shows that they work and nothing of a GPU"
        )
    if args.step is not None:
        _be(args)
    steps = STEPS
    if args.only is not None:
        asked = args.only.split(",")
        unknown = set(asked) - {step.name for step in STEPS}
        if unknown:
            p.error(f"--only: got {', '.join(sorted(unknown))}; see --help for the steps")
        steps = tuple(step for step in STEPS if step.name in asked)
    report = _report(args)
    begun_s = time.monotonic()

    def done(result: dict[str, Any]) -> None:
        report["steps"].append(result)
        report["seconds_s"] = round(time.monotonic() - begun_s, 1)
        _tell(result)
        if args.json is not None:
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text(json.dumps(report, indent=1) + "\n")

    run_steps(steps, _asked(args), done)
    rows = [row for step in report["steps"] for row in step["rows"]]
    print(f"{report['device']}: {counted(rows)}, {report['seconds_s']:.0f} s", flush=True)
    return int(any(row["status"] == "failed" for row in rows))


def _asked(args: argparse.Namespace) -> Asked:
    arguments = ["--device", args.device]
    arguments += ["--quick"] * args.quick + ["--no-numbers"] * args.no_numbers
    small = args.device == "cpu" or args.no_numbers
    cores = len(os.sched_getaffinity(0))
    jobs = args.jobs or max(1, min(6, cores // 2))
    slower = SLOWER if small else 1
    return Asked(tuple(arguments), jobs, args.limit_s or slower * LIMIT_S, slower)


def _be(args: argparse.Namespace) -> NoReturn:
    """Runs one step in this process, and ends it."""
    warnings.simplefilter("ignore")
    device = torch.device("cuda", 0) if args.device == "cuda" else torch.device("cpu")
    step = next(step for step in STEPS if step.name == args.step)
    setting = Setting(device, args.quick, not args.no_numbers)
    setting.choose_kernels()
    be_step(step, setting, args.rows)
    # torch's autograd thread frees a GPU's graph after `backward` has returned, for which it takes
    # Python's lock; where Python is ending by then, that aborts the process.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _report(args: argparse.Namespace) -> dict[str, Any]:
    gpu = args.device == "cuda"
    device = torch.cuda.get_device_name(0) if gpu else "CPU, tiny models"
    return {
        "name": "gpu_checks", "device": f"{device} (a stub)" if args.no_numbers else device,
        "gpu": gpu, "numbers": not args.no_numbers, "date": date.today().isoformat(),
        "commit": args.commit or _commit(),
        "command": shlex.join(["python", "-m", "benchmarks.gpu_checks", *sys.argv[1:]]),
        "versions": harness.versions(PACKAGES), "machine": harness.machine(), "seconds_s": 0.0,
        "steps": [],
    }  # fmt: skip


def _commit() -> str:
    """Returns the commit of the tree; "unknown" where it is no repository, as on a lent machine."""
    command = ["git", "describe", "--always", "--dirty"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "unknown"
    return found.stdout.strip() or "unknown"


def _tell(result: dict[str, Any]) -> None:
    print(f"{result['name']}: {counted(result['rows'])}, {result['seconds_s']} s", flush=True)
    for row in result["rows"]:
        if row["status"] == "failed":
            told = {n: v for n, v in row.items() if n not in ("check", "status", "where")}
            print(f"  FAILED {row['check']}: {told}", flush=True)
    print(result.get("log", ""), end="", flush=True)


if __name__ == "__main__":
    sys.exit(main())
