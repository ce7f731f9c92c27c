"""Names a step's parts for torch's profiler, and joins the traces of all ranks in one file."""

from __future__ import annotations

import json
import os
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.autograd import profiler
from torch.profiler import profile, record_function

from dcpc.buckets import path_of
from dcpc.errors import DataError
from dcpc.runtime.data.steps import MicroBatch
from dcpc.runtime.groups.groups import Groups
from dcpc.runtime.planner.protocol import Compiled

PROCESSES = 64  # of a rank in a trace: its own and its GPUs
_NO_NAME = nullcontext()
Event = dict[str, Any]  # of a Chrome trace


def named(name: Callable[[], str]) -> AbstractContextManager[Any]:
    """Returns a context that names its work where a profiler runs; else `name` is not called."""
    return record_function(name()) if profiler._is_profiler_enabled else _NO_NAME


def name_of(mb: MicroBatch, rank: int) -> str:
    """Returns a micro-batch's name in traces."""
    size = len(mb.rows) or len(mb.samples)
    return f"micro-batch {mb.number}: {size} x {mb.bucket}, sp {mb.sp}, rank {rank}"


@contextmanager
def timeline(compiled: Compiled, file: str | Path) -> Iterator[profile]:
    """Records the work of all ranks within a `with` block in one file for Perfetto or Chrome.

    Each step, micro-batch (with its bucket, degree and rank) and sum of gradients has its name, on
    the CPU and on the GPUs; below them are torch's own ops and kernels. A rank is a process of the
    trace. Ranks on several hosts are as far apart as the clocks of these are. Collective over all
    ranks; nothing is written where the block raises.

    Example:
        with dcpc.timeline(compiled, "steps.json"):
            for step in itertools.islice(loader, 3):
                compiled.train_step(step)

    Args:
        compiled: compiled model, whose ranks take part.
        file: path of the JSON file, which rank 0 writes.

    Yields:
        This rank's `torch.profiler.profile`.

    Raises:
        DataError: a profiler runs already, or `file` is no path that can be written.
    """
    path = path_of(file, DataError, "dcpc.timeline")
    if profiler._is_profiler_enabled:
        raise DataError(
            f"dcpc.timeline({str(file)!r}): got a profiler that runs already; expected none, as "
            "torch has one at a time; end it first: it sees the same names"
        )
    groups = compiled.groups
    with profile() as running:
        yield running
    parts = _parts(running, groups)
    if groups.rank == 0:
        events = _joined(json.loads(zlib.decompress(part)) for part in parts)
        try:
            path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
        except OSError as error:
            raise DataError(
                f"dcpc.timeline({str(file)!r}): got {error}; expected a file to write to; make "
                "its folder, or pass another path"
            ) from error


def _parts(running: profile, groups: Groups) -> list[bytes]:
    """Returns start (ns) and events of each rank's trace, as JSON; collective over all ranks."""
    with tempfile.TemporaryDirectory() as folder:
        own = Path(folder) / "trace.json"
        running.export_chrome_trace(str(own))
        trace = json.loads(own.read_text())
    part = trace.get("baseTimeNanoseconds", 0), _of_rank(trace["traceEvents"], groups)
    found = zlib.compress(json.dumps(part).encode())
    every = [found] * groups.world
    wire = groups.control(groups.world)
    if wire is not None:
        dist.all_gather_object(every, found, group=wire)
    return every


def _of_rank(events: Iterable[Event], groups: Groups) -> list[Event]:
    """Returns the events of this rank, as those of processes that no other rank has."""
    title, first = f"rank {groups.rank}", groups.rank * PROCESSES
    numbers = {os.getpid(): first}
    found: list[Event] = []
    for event in events:
        pid, about_process = event.get("pid"), str(event.get("name")).startswith("process_")
        if isinstance(pid, int) and not about_process:  # the rest are torch's own summaries
            event["pid"] = numbers.setdefault(pid, first + len(numbers))
            if "id" in event:  # an arrow from one event to another
                event["id"] = f"{groups.rank}.{event['id']}"
            found.append(event)
    for pid, number in numbers.items():
        name = title if number == first else f"{title}, GPU {pid}"
        found.append({"ph": "M", "pid": number, "name": "process_name", "args": {"name": name}})
    return found


def _joined(parts: Iterable[tuple[int, list[Event]]]) -> list[Event]:
    """Returns all ranks' events on rank 0's axis of time, in microseconds from its start."""
    joined: list[Event] = []
    starts_ns = list[int]()
    for start_ns, events in parts:
        starts_ns.append(start_ns)
        for event in events:
            if "ts" in event:
                event["ts"] += (start_ns - starts_ns[0]) / 1e3
        joined += events
    return joined
