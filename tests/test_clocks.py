"""No test reads a clock: what it would assert of it fails on a busy machine.

Count messages, calls or steps instead, or assert what a wait was for.
"""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
READS = ("time", "monotonic", "perf_counter", "process_time", "thread_time")
CLOCKS = {f"time.{name}{unit}" for name in READS for unit in ("", "_ns")}
CLOCKS |= {"datetime.now", "datetime.utcnow", "datetime.today", "timeit"}
CLOCKS |= {"benchmarks.harness.timed"}
# They run for as long as they are asked to, or say how long something took, and are no tests.
MAY = {
    *("tests/fuzz/run.py", "tests/fuzz/runs/hunt.py", "tests/fuzz/pairs/hunt.py"),
    *("tests/faults/memory.py", "tests/faults/ranks.py", "tests/faults/soak.py"),
    "tests/mutants/run.py",
}


def clocks_in(source: str) -> set[str]:
    """Returns the clocks of `CLOCKS` that a module names."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            found |= {node.module or "", *(f"{node.module}.{a.name}" for a in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Attribute):
            found.add(".".join(ast.unparse(node).split(".")[-2:]))
    return found & CLOCKS


def test_no_test_reads_a_clock():
    files = {f.relative_to(ROOT).as_posix(): f for f in (ROOT / "tests").rglob("*.py")}
    found = {name for name, file in files.items() if clocks_in(file.read_text())}
    assert found == MAY


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import time\ntime.sleep(1)", set()),
        ("import time\ntime.monotonic()", {"time.monotonic"}),
        ("from time import perf_counter_ns as now", {"time.perf_counter_ns"}),
        ("import datetime\ndatetime.datetime.now()", {"datetime.now"}),
        ("from timeit import timeit", {"timeit"}),
        ("from benchmarks.harness import timed", {"benchmarks.harness.timed"}),
        ("step.seconds_s < 3", set()),
    ],
)
def test_clocks_are_found(source, found):
    assert clocks_in(source) == found
