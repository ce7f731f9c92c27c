"""Micro-batches fitted below a line: samples dealt so that all of them end by a given second.

The widest and longest micro-batches come first. Each takes the row of fewest rank-seconds at which
it ends by the line, on the block of ranks that is free first. If there is none, it is cut where the
line is. A single sample that no row ends by the line ends as early as it can.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from dcpc.runtime.planner.deal import Price, placed_on
from dcpc.runtime.planner.plans import PlannedMicroBatch, StepPlan, step_plan
from dcpc.runtime.planner.speeds import slowness
from dcpc.runtime.planner.table import PlanTable

# Lines that are tried, each halfway between the bound and the best plan.
_LINES = 6
_ROUNDING = 1 + 1e-9

Options = list[PlannedMicroBatch]  # a micro-batch on each degree, the fewest rank-seconds first


def fitted(plan: StepPlan, table: PlanTable, price: Price, bound_s: float) -> StepPlan:
    """Returns a plan of the same samples that ends earlier, or the plan where none is found."""
    fit, best = _RowFitting(table, price), plan
    for _ in range(_LINES):
        line_s = (bound_s + best.makespan_s) / 2
        new = fit.below(plan.micro_batches, line_s)
        if new.makespan_s > line_s * _ROUNDING:
            bound_s = line_s
        if new.makespan_s < best.makespan_s:
            best = new
    return best


class _RowFitting:
    """Fits micro-batches to rows of a table."""

    def __init__(self, table: PlanTable, price: Price) -> None:
        self._table, self._price, self._speeds = table, price, table.speeds
        self._slow: dict[int, npt.NDArray[np.float64]] = {}  # degree -> of each first rank

    def below(self, micro_batches: Sequence[PlannedMicroBatch], line_s: float) -> StepPlan:
        """Returns a plan that ends by the line, or a little later."""
        waiting = [self._options(mb) for mb in micro_batches]
        waiting.sort(key=lambda options: _rank(options, line_s))  # the last is placed first
        free_s, placed = np.zeros(self._table.world), []
        while waiting:
            options = waiting.pop()
            begins = [self._earliest(free_s, mb) for mb in options]
            found = self._place(options, begins, line_s)
            if found is None:
                waiting += self._halves(options[0])
                continue
            mb, (begin_s, first), rest = found
            if rest is not None:
                waiting.append(self._options(rest))
            mb = placed_on(mb, first, self._speeds)
            placed.append(mb)
            free_s[first : first + mb.sp] = begin_s + mb.seconds_s
        return step_plan(placed, self._table.world)

    def _place(
        self, options: Options, begins: list[tuple[float, int]], line_s: float
    ) -> tuple[PlannedMicroBatch, tuple[float, int], PlannedMicroBatch | None] | None:
        """Returns the part that is placed, where, and the rest; None: no part fits."""
        pairs = list(zip(options, begins, strict=True))

        def end_s(mb: PlannedMicroBatch, at: tuple[float, int]) -> float:
            return at[0] + mb.seconds_s * slowness(self._speeds, at[1], mb.sp)

        for mb, at in pairs:
            if end_s(mb, at) <= line_s * _ROUNDING:
                return mb, at, None
        if len(options[0].sample_ids) == 1:
            mb, at = min(pairs, key=lambda pair: end_s(*pair))
            return mb, at, None
        for mb, at in pairs:
            ids = mb.sample_ids
            here_s = mb.seconds_s * slowness(self._speeds, at[1], mb.sp)
            count = int(len(ids) * (line_s - at[0]) / here_s)
            if count < 1:
                continue
            part = self._price(replace(mb, sample_ids=ids[:count]))
            if end_s(part, at) <= line_s * _ROUNDING:
                return part, at, replace(mb, sample_ids=ids[count:])
        return None

    def _options(self, mb: PlannedMicroBatch) -> Options:
        rows = self._table.rows[self._table.key(mb.bucket)]
        degrees = {row.sp for row in rows if row.micro_batch >= len(mb.sample_ids)}
        found = [self._price(replace(mb, sp=sp, ranks=())) for sp in degrees]
        return sorted(found, key=lambda mb: (mb.sp * mb.seconds_s, mb.sp))

    def _halves(self, mb: PlannedMicroBatch) -> list[Options]:
        ids = mb.sample_ids
        parts = ids[: len(ids) // 2], ids[len(ids) // 2 :]
        return [self._options(replace(mb, sample_ids=part)) for part in parts]

    def _earliest(
        self, free_s: npt.NDArray[np.float64], mb: PlannedMicroBatch
    ) -> tuple[float, int]:
        """Returns when the block that ends a micro-batch first is free, and its first rank."""
        world, node, sp = self._table.world, self._table.node_ranks, mb.sp
        if world % sp == 0:
            step = sp
            begins = free_s.reshape(-1, sp).max(axis=1)
        else:
            step = 1
            begins = np.lib.stride_tricks.sliding_window_view(free_s, sp).max(axis=1)
            if sp <= node:  # inside a node
                firsts = np.arange(len(begins))
                begins = np.where(firsts % node + sp <= node, begins, np.inf)
        ends = begins if not self._speeds else begins + mb.seconds_s * self._slowness(sp, step)
        at = int(ends.argmin())
        return float(begins[at]), at * step

    def _slowness(self, sp: int, step: int) -> npt.NDArray[np.float64]:
        """Returns the slowness of each group of a degree, in the order of their first ranks."""
        if sp not in self._slow:
            firsts = range(0, self._table.world - sp + 1, step)
            self._slow[sp] = np.array([slowness(self._speeds, first, sp) for first in firsts])
        return self._slow[sp]


def _rank(options: Options, line_s: float) -> tuple[int, float]:
    """Ranks and seconds of a micro-batch on the cheapest row that it ends on by the line."""
    own = next((mb for mb in options if mb.seconds_s <= line_s), options[-1])
    return own.sp, own.seconds_s
