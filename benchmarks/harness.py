"""What every benchmark shares: arguments, the machine and versions, a table, the JSON report."""

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from rich.console import Console
from rich.table import Table

PACKAGES = ("dcpc", "torch", "numpy", "scipy", "sympy")

Cell = str | int | float | None


def parser(name: str, description: str) -> argparse.ArgumentParser:
    """An argument parser with `--quick` and `--json FILE`, to which a benchmark adds its own.

    Args:
        name: the module's name below `benchmarks`.
        description: one sentence for `--help`.
    """
    p = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=description)
    p.add_argument("--quick", action="store_true", help="the same figures in under a minute")
    p.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    return p


def machine() -> dict[str, Cell]:
    """The machine the figures were taken on: processor, cores, load, system."""
    return {
        "processor": _processor(), "cores": os.cpu_count(),
        "load_1min": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.release()}", "architecture": platform.machine(),
    }  # fmt: skip


def versions(packages: Sequence[str] = PACKAGES) -> dict[str, Cell]:
    """Python's version and that of each installed package; null where one is absent."""
    found: dict[str, Cell] = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def write_report(name: str, figures: Mapping[str, Cell], json_path: Path | None) -> None:
    """Writes `{"name", "figures", "machine", "versions"}` as JSON; nothing if `json_path` is None.

    Args:
        name: the benchmark's name.
        figures: flat, every unit in its name (`median_solve_s`).
        json_path: the file; its folder is made if need be.
    """
    if json_path is None:
        return
    report = {
        "name": name, "figures": dict(figures), "machine": machine(), "versions": versions(),
    }  # fmt: skip
    json_path.parent.mkdir(parents=True, exist_ok=True)
    json_path.write_text(json.dumps(report, indent=2, sort_keys=False) + "\n")


def finish(name: str, figures: Mapping[str, Cell], json_path: Path | None, digits: int = 3) -> None:
    """Prints the figures, and writes the report."""
    print_table(name, ("figure", "value"), list(figures.items()), digits)
    write_report(name, figures, json_path)


def print_table(
    title: str, header: Sequence[str], rows: Sequence[Sequence[Cell]], digits: int = 3
) -> None:
    """Prints one table, numbers right-aligned with `digits` decimals."""
    table = Table(title=title, title_justify="left")
    for i, column in enumerate(header):
        table.add_column(column, justify="left" if i == 0 else "right")
    for row in rows:
        table.add_row(*(_text(cell, digits) for cell in row))
    width = None if sys.stdout.isatty() else 120
    Console(width=width).print(table)


@dataclass(slots=True)
class Stopwatch:
    """Seconds of a `with timed() as t:` block, in `t.elapsed_s` once it has ended."""

    elapsed_s: float = 0.0


@contextmanager
def timed() -> Iterator[Stopwatch]:
    """Times its block by the wall clock."""
    watch = Stopwatch()
    start_s = time.perf_counter()
    try:
        yield watch
    finally:
        watch.elapsed_s = time.perf_counter() - start_s


def interleaved(
    calls: Mapping[str, Callable[[], object]],
    turns: int,
    between: Callable[[], object] = lambda: None,
) -> dict[str, list[float]]:
    """Returns the processor seconds of each call in each turn: one after the other, in turns.

    A turn before them is not counted: it compiles. Who begins changes.
    """
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(turns + 1):
        for name in sorted(calls, reverse=bool(turn % 2)):
            start_s = time.process_time()
            calls[name]()
            if turn:
                taken[name].append(time.process_time() - start_s)
            between()
    return taken


def _text(cell: Cell, digits: int) -> str:
    if cell is None:
        return "-"
    return f"{cell:,.{digits}f}" if isinstance(cell, float) else str(cell)


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"
