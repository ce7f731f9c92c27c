"""Times each collective over the real process groups: seconds of an empty one, and a byte's.

As in a model each comes after some work: ranks do not end it at the same time, and the caches hold
other data. A rank's wait for the others is part of the seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from dcpc.codegen import bind_group
from dcpc.codegen.collectives.collectives import DimSplit
from dcpc.commands.calibrate.fit import TimedCall, line
from dcpc.runtime.groups.groups import Groups
from dcpc.symbolic_profile import CollectiveFit

WIDTH = 64  # elements of a row
ROWS = (16, 256, 2048, 16384, 65536)  # of what a rank holds: 4 kB to 16 MB of float32
FEWEST_ROUNDS, MOST_ROUNDS = 3, 9
WORK_S = 5e-3  # before each collective
FEATURES = 256  # of what the work multiplies
ROUNDS_OF_WORK = 8  # that are timed to know how much it is


def time_collectives(groups: Groups, budget_s: float) -> tuple[CollectiveFit, ...]:
    """Returns alpha and seconds a byte of each collective and group size; every rank calls this."""
    found: list[CollectiveFit] = []
    degrees = groups.degrees[1:]
    if not degrees:
        return ()
    work = _work(groups)
    for sp in degrees:
        pg = groups.of(sp)
        assert pg is not None, f"degree {sp} has no group"
        name = f"calibrate{sp}"
        bind_group(name, pg)
        share_s = budget_s / (len(degrees) * len(_CALLS))
        for op, call in _CALLS.items():
            samples = _samples(call, sp, name, groups, work, share_s)
            found.append(_fitted(op, sp, samples))
    return tuple(found)


def _work(groups: Groups) -> Callable[[], None]:
    """Returns a function that takes each rank about `WORK_S`, the same on all ranks."""
    x = torch.randn(2 * FEATURES, FEATURES, device=groups.device)
    weight = torch.randn(FEATURES, FEATURES, device=groups.device)

    def run(times: int) -> None:
        for _ in range(times):
            torch.nn.functional.gelu(x @ weight)
        _synchronise(groups.device)

    run(1)
    start_s = time.perf_counter()
    run(ROUNDS_OF_WORK)
    spent = torch.tensor(time.perf_counter() - start_s, dtype=torch.float64)
    dist.all_reduce(spent, group=groups.control(groups.world))
    mean_s = spent.item() / groups.world / ROUNDS_OF_WORK
    return partial(run, max(1, round(WORK_S / mean_s)))


def _samples(
    call: Callable[[Tensor, int, str], int],
    sp: int,
    name: str,
    groups: Groups,
    work: Callable[[], None],
    budget_s: float,
) -> list[TimedCall]:
    """Returns a sample for each size of message; its bytes are those that a rank sends."""
    control = groups.control(groups.world)
    tensors = [torch.randn(rows * sp, WIDTH, device=groups.device) for rows in ROWS]
    spent = torch.zeros(len(ROWS), MOST_ROUNDS, dtype=torch.float64)
    sent = [call(x, sp, name) for x in tensors]  # the first call connects
    rounds = 0
    begin_s = time.perf_counter()
    for rounds in range(MOST_ROUNDS):
        late = torch.tensor(float(time.perf_counter() - begin_s > budget_s))
        dist.all_reduce(late, dist.ReduceOp.MAX, group=control)  # the ranks stop together
        if rounds >= FEWEST_ROUNDS and late.item():
            break
        for i, x in enumerate(tensors):
            dist.barrier(group=control)
            work()
            start_s = time.perf_counter()
            call(x, sp, name)
            _synchronise(groups.device)
            spent[i, rounds] = time.perf_counter() - start_s
    else:
        rounds = MOST_ROUNDS
    dist.all_reduce(spent, group=control)
    typical = spent[:, :rounds].median(dim=1).values / groups.world
    return [
        TimedCall("collective", True, torch.float32, 0.0, float(bytes_), float(seconds))
        for bytes_, seconds in zip(sent, typical, strict=True)
    ]


def _fitted(op: str, sp: int, samples: Sequence[TimedCall]) -> CollectiveFit:
    fit = line(samples)
    longest = max(samples, key=lambda s: s.bytes_moved)
    if not fit.s_per_byte > 0:  # nothing but latency was seen: at least as slow as that
        fit = replace(fit, s_per_byte=longest.seconds_s / longest.bytes_moved)
    return CollectiveFit(op, sp, fit.launch_s, fit.s_per_byte)


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# Each takes rows * sp rows, of which it uses what a rank has, and returns the bytes it sends.


def _all_to_all(x: Tensor, sp: int, name: str) -> int:
    rows, mine = len(x), x[: len(x) // sp]
    gather, scatter = DimSplit(0, rows, rows, 0, False), DimSplit(1, WIDTH // sp, WIDTH, 0, False)
    torch.ops.dcpc.all_to_all(mine, *gather, *scatter, name)
    return mine.nbytes * (sp - 1) // sp


def _all_gather(x: Tensor, sp: int, name: str) -> int:
    rows, mine = len(x), x[: len(x) // sp]
    torch.ops.dcpc.all_gather(mine, *DimSplit(0, rows, rows, 0, False), name)
    return mine.nbytes * (sp - 1)


def _reduce_scatter(x: Tensor, sp: int, name: str) -> int:
    torch.ops.dcpc.reduce_scatter(x, *DimSplit(0, len(x) // sp, len(x), 0, False), name)
    return x.nbytes * (sp - 1) // sp


def _all_reduce(x: Tensor, sp: int, name: str) -> int:
    torch.ops.dcpc.all_reduce(x, name)
    return 2 * x.nbytes * (sp - 1) // sp


_CALLS: dict[str, Callable[[Tensor, int, str], int]] = {
    "dcpc::all_to_all": _all_to_all,
    "dcpc::all_gather": _all_gather,
    "dcpc::reduce_scatter": _reduce_scatter,
    "dcpc::all_reduce": _all_reduce,
}
