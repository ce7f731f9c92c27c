"""The least bytes and seconds of any choice of values that leave, by linear and integer programs.

A value that leaves is gone from forward's last read of it to backward's first; at each point of the
timeline in which all stay, what is gone must be at least what lives above the cap. The program lets
parts of a value go and takes no memory for copies on their way, so no plan can move less. The
integer program lets whole values go, for each number of recompute steps, where the processor
itself copies: then each byte that leaves costs its two copies, and nothing hides.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, linprog, milp
from torch import fx, nn

from benchmarks.harness import Cell
from benchmarks.one_length import INPUTS
from dcpc.api import plan
from dcpc.buckets import BATCH, Buckets
from dcpc.errors import PlanError
from dcpc.ir import LEAVES
from dcpc.plan.planning import run_bytes

MB = 1e6


@dataclass(frozen=True, slots=True)
class Choice:
    """What leaves: `gone` MB of each value at the points that are above the cap, `[point, value]`.

    Attributes:
        gone: MB that are freed at a point where a value leaves.
        need: MB above the cap at each of the points.
        size: MB of each value.
    """

    gone: Any
    need: Any
    size: Any

    def least(self, whole: bool) -> float:
        """Returns the fewest MB that leave, of whole values or of parts; infinite: none fit."""
        if not len(self.need):
            return 0.0
        if whole:
            rows = LinearConstraint(self.gone, lb=self.need)
            found = milp(self.size, constraints=rows, bounds=Bounds(0, 1), integrality=1)
        else:
            found = linprog(self.size, A_ub=-self.gone, b_ub=-self.need, bounds=(0, 1))
        return float(found.fun) if found.success else math.inf


def choice(study: Any, menu_step: int, sizes: dict[str, int], cap_bytes: float) -> Choice:
    """Returns what may leave after some recompute steps, all values staying at first."""
    structure = study._structure  # the graphs behind the prices
    schedule, copies = structure.schedule(menu_step)
    live = study.live(menu_step, sizes)
    names = [name for name, _ in live]
    turn = names.index("backward")
    forward = _places(schedule.forward, dict(zip(names[:turn], itertools.count())), 0)
    own = dict(zip(names[turn:], itertools.count(turn)))
    backward = _places(reversed(schedule.backward), own, len(names) - 1)
    able = structure.lowering.able_to_leave(schedule)
    each = structure.meter.calls(able, study.local_sizes(sizes), structure.device)[1]
    gone, size = np.zeros((len(live), len(able))), np.zeros(len(able))
    for i, (value, size_bytes) in enumerate(zip(able, each, strict=True)):
        size[i] = size_bytes / MB * (1 if copies is None else copies.count(value.name))
        memory = set(value.meta["storage"])
        reads = [c for c in schedule.forward if any(
            memory & {*source.meta.get("storage", ())} for source in c.all_input_nodes
        )]  # fmt: skip
        last = max(forward[call] for call in (value, *reads))
        first = min(backward[c] for c in schedule.backward if value in c.all_input_nodes)
        gone[last + 1 : first, i] = size[i]
    need = (np.array([count for _, count in live]) - cap_bytes) / MB
    return Choice(gone[need > 0], need[need > 0], size)


def _places(calls: Iterable[fx.Node], known: dict[str, int], at: int) -> dict[fx.Node, int]:
    """Returns the point of each call; a view's is that of the call before it in this order."""
    found = {}
    for call in calls:
        found[call] = at = known.get(call.name, at)
    return found


def compared(
    model: nn.Module, seq: int, samples: int, share: float, recompute: str
) -> tuple[float, float] | None:
    """Returns a plan's bytes over the least, and its seconds over the least; None: it has no plan.

    Args:
        model: model to plan.
        seq: length.
        samples: samples of a micro-batch.
        share: memory for the micro-batch, of the least peak without values that leave.
        recompute: "none"; "auto": as many steps as any.
    """
    buckets = Buckets(INPUTS, [{"seq": seq, BATCH: samples}])
    given: dict[str, Any] = {"backend": "eager", "device": "cpu", "tile": "none"}
    free = plan(model, buckets, memory=1e12, recompute=recompute, host="4GB", **given)
    (bucket,) = free.plans
    sizes = {**bucket.sizes, BATCH: samples}
    study = free.runnable.priced.at(free.placement(bucket))
    steps = range(study.steps + 1) if recompute == "auto" else range(1)
    costs = [study.predict(k, sizes) for k in steps]
    room = share * min(map(run_bytes, costs))
    memory = int(free.request.resident_bytes + room)
    try:
        found = plan(model, buckets, memory=memory, recompute=recompute, host="4GB", **given)
    except PlanError:
        return None
    (row,) = found.plans.values()
    at = row.menu_step % LEAVES
    beside = run_bytes(costs[at]) - costs[at].peak_bytes
    least = choice(study, at, sizes, room - beside).least(whole=False)
    rate = free.device.host_bytes_per_s
    best_s = min(
        cost.seconds_s + 2 * MB / rate * choice(study, k, sizes, room - beside).least(whole=True)
        for k, cost in zip(steps, costs, strict=True)
    )
    return row.away_bytes / MB / least, row.seconds_s / best_s


def bounds(quick: bool, make: Callable[[int, int], nn.Module]) -> dict[str, Cell]:
    """Returns the worst bytes and seconds over the least; `make` takes layers and width."""
    moved = [
        compared(make(layers, 64), 256, 2, share, "none")
        for layers, share in itertools.product(
            (3,) if quick else (3, 4, 5), (0.6,) if quick else (0.8, 0.6, 0.45)
        )
    ]
    widths, lengths = ((32,), (64,)) if quick else ((32, 64), (64, 128, 192, 256))
    small = [
        compared(make(1, width), seq, samples, share, "auto")
        for width, seq, samples, share in itertools.product(
            widths, lengths, (1,) if quick else (1, 3), (0.9,) if quick else (0.95, 0.85)
        )
    ]
    return {
        "bytes_over_bound": max(each[0] for each in moved if each),
        "bound_cases": sum(each is not None for each in moved),
        "seconds_over_milp": max(each[1] for each in small if each),
        "milp_cases": sum(each is not None for each in small),
    }
