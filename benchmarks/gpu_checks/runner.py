"""The steps of the checks, each in a process of its own with a bound in seconds.

Steps that time nothing run beside each other, as many as `jobs` says: tracing takes a core each and
leaves the GPU idle. The others run alone. A step that exceeds its bound is ended with all its
processes, and keeps the rows that it had yielded.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu_checks import costs
from benchmarks.gpu_checks.attention import attention
from benchmarks.gpu_checks.exact import exact
from benchmarks.gpu_checks.mixed import mixed
from benchmarks.gpu_checks.ranks import nccl, sp2
from benchmarks.gpu_checks.rows import Row, Setting, not_run
from benchmarks.gpu_checks.speeds import speeds

LOG_CHARS = 4000  # of what a step printed last
SLOWER = 3  # times its bound a step has on a CPU and on a stub, whose machines have few cores


@dataclass(frozen=True, slots=True)
class CheckStep:
    """One step.

    Attributes:
        name: of the step.
        about: what it checks, for the page.
        run: yields its rows.
        bound_s: seconds after which it is ended.
        alone: whether nothing may run beside it, as it times.
    """

    name: str
    about: str
    run: Callable[[Setting], Iterator[Row]]
    bound_s: int
    alone: bool = False


# With all of the first six beside each other at most 590 s.
STEPS = (
    CheckStep("exact_stdit", "STDiT against float64", partial(exact, "stdit"), 170),
    CheckStep("exact_gpt", "GPT against float64", partial(exact, "gpt"), 150),
    CheckStep("exact_llama", "transformers' Llama against float64", partial(exact, "llama"), 150),
    CheckStep("attention", "attention kernels against float64", attention, 90),
    CheckStep("sp2", "two ranks on one device, gloo", sp2, 120),
    CheckStep("nccl", "NCCL, one rank", nccl, 60),
    CheckStep("peaks", "peaks and seconds of a GPT", costs.peaks, 80, alone=True),
    CheckStep("pyramid", "peaks, seconds, pyramid of an STDiT", costs.pyramid, 100, alone=True),
    CheckStep("compiled", "Inductor and torch.compile", costs.compiled, 100, alone=True),
    CheckStep("speeds", "speed of attention", speeds, 30, alone=True),
    CheckStep("mixed", "mixed lengths: dcpc, padding, packing", mixed, 110, alone=True),
)


@dataclass(frozen=True, slots=True)
class Asked:
    """What the command line asks of the runner.

    Attributes:
        arguments: that each step's process is given, too.
        jobs: steps that run beside each other.
        limit_s: seconds of all steps together.
        slower: times its bound that a step may take.
    """

    arguments: tuple[str, ...]
    jobs: int
    limit_s: float
    slower: int


def run_steps(
    steps: Sequence[CheckStep], asked: Asked, done: Callable[[dict[str, Any]], None]
) -> None:
    """Runs steps; `done` is given each one's result as it ends."""
    end_s = time.monotonic() + asked.limit_s
    steps = [replace(step, bound_s=step.bound_s * asked.slower) for step in steps]
    with ThreadPoolExecutor(asked.jobs) as pool:
        beside = [s for s in steps if not s.alone]
        for result in pool.map(lambda s: run_step(s, asked.arguments, end_s), beside):
            done(result)
    for step in steps:
        if step.alone:
            done(run_step(step, asked.arguments, end_s))


def run_step(step: CheckStep, arguments: Sequence[str], end_s: float) -> dict[str, Any]:
    """Returns a step's rows, seconds, and how it ended; no later than `end_s`."""
    begun_s = time.monotonic()
    bound_s = min(step.bound_s, end_s - begun_s)
    if bound_s < 1:
        return _result(step, [not_run(step.name, "the time of all steps is over")], 0.0, "", True)
    with tempfile.TemporaryDirectory() as folder:
        rows, log = Path(folder) / "rows", Path(folder) / "log"
        rows.touch()
        command = [sys.executable, "-m", "benchmarks.gpu_checks", *arguments]
        with log.open("w") as out:
            process = subprocess.Popen(
                [*command, "--step", step.name, "--rows", str(rows)],
                stdout=out, stderr=out, start_new_session=True,
            )  # fmt: skip
            try:
                ended = f"exit code {process.wait(bound_s)}"
            except subprocess.TimeoutExpired:
                ended = f"ended after its bound of {bound_s:.0f} s"
            finally:
                _end(process)
        found = [json.loads(line) for line in rows.read_text().splitlines() if line.endswith("}")]
        seconds_s = time.monotonic() - begun_s
        if ended != "exit code 0":
            found.append({"check": step.name, "status": "failed", "error": ended})
        failed = any(row["status"] == "failed" for row in found)
        told = log.read_text(errors="replace")[-LOG_CHARS:] if failed else ""
        return _result(step, found, seconds_s, told, False)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends what is left of a step: its process, ranks and compilers are one session."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def _result(
    step: CheckStep, rows: list[Row], seconds_s: float, log: str, left_out: bool
) -> dict[str, Any]:
    found = {"name": step.name, "about": step.about, "seconds_s": round(seconds_s, 1), "rows": rows}
    return found | ({"left_out": True} if left_out else {}) | ({"log": log} if log else {})


def be_step(step: CheckStep, setting: Setting, rows: Path) -> None:
    """Runs a step in this process and writes each row as it comes."""
    with rows.open("a") as out:
        for row in step.run(setting):
            out.write(json.dumps(row) + "\n")
            out.flush()
