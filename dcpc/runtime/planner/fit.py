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

from dcpc.runtime.planner.deal import Price
from dcpc.runtime.planner.plans import PlannedMicroBatch, StepPlan, step_plan
from dcpc.runtime.planner.table import PlanTable

# Lines that are tried, each halfway between the bound and the best plan.
_LINES = 6
_ROUNDING = 1 + 1e-9

Options = list[PlannedMicroBatch]  # a micro-batch on each degree, the fewest rank-seconds first


def fitted(plan: StepPlan, table: PlanTable, price: Price, bound_s: float) -> StepPlan:
    """Returns a plan of the same samples that ends earlier, or the plan where none is found.

    Args:
        plan: to begin with.
        table: the rows to choose from.
        price: gives the row and the seconds of a micro-batch.
        bound_s: no plan ends earlier.
    """
    fit, best = _Fit(table, price), plan
    for _ in range(_LINES):
        line_s = (bound_s + best.makespan_s) / 2
        new = fit.below(plan.micro_batches, line_s)
        if new.makespan_s > line_s * _ROUNDING:
            bound_s = line_s
        if new.makespan_s < best.makespan_s:
            best = new
    return best


class _Fit:
    """Fits micro-batches to rows of a table."""

    def __init__(self, table: PlanTable, price: Price) -> None:
        self._table, self._price = table, price

    def below(self, micro_batches: Sequence[PlannedMicroBatch], line_s: float) -> StepPlan:
        """Returns a plan that ends by the line, or a little later."""
        waiting = [self._options(mb) for mb in micro_batches]
        waiting.sort(key=lambda options: _rank(options, line_s))  # the last is placed first
        free_s, placed = np.zeros(self._table.world), []
        while waiting:
            options = waiting.pop()
            begins = [self._earliest(free_s, mb.sp) for mb in options]
            found = self._place(options, begins, line_s)
            if found is None:
                waiting += self._halves(options[0])
                continue
            mb, (begin_s, first), rest = found
            if rest is not None:
                waiting.append(self._options(rest))
            placed.append(replace(mb, ranks=tuple(range(first, first + mb.sp))))
            free_s[first : first + mb.sp] = begin_s + mb.seconds_s
        return step_plan(placed, self._table.world)

    def _place(
        self, options: Options, begins: list[tuple[float, int]], line_s: float
    ) -> tuple[PlannedMicroBatch, tuple[float, int], PlannedMicroBatch | None] | None:
        """What is placed, where, and what is left of it; None: not as a whole, nor in part."""
        pairs = list(zip(options, begins, strict=True))
        for mb, at in pairs:
            if at[0] + mb.seconds_s <= line_s * _ROUNDING:
                return mb, at, None
        if len(options[0].sample_ids) == 1:
            mb, at = min(pairs, key=lambda pair: pair[1][0] + pair[0].seconds_s)
            return mb, at, None
        for mb, at in pairs:
            ids = mb.sample_ids
            count = int(len(ids) * (line_s - at[0]) / mb.seconds_s)
            if count < 1:
                continue
            part = self._price(replace(mb, sample_ids=ids[:count]))
            if at[0] + part.seconds_s <= line_s * _ROUNDING:
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

    def _earliest(self, free_s: npt.NDArray[np.float64], sp: int) -> tuple[float, int]:
        """When the first block of so many ranks is free, and its first rank."""
        world, node = self._table.world, self._table.node_ranks
        if world % sp == 0:
            begins = free_s.reshape(-1, sp).max(axis=1)
            at = int(begins.argmin())
            return float(begins[at]), at * sp
        begins = np.lib.stride_tricks.sliding_window_view(free_s, sp).max(axis=1)
        if sp <= node:  # inside a node
            firsts = np.arange(len(begins))
            begins = np.where(firsts % node + sp <= node, begins, np.inf)
        at = int(begins.argmin())
        return float(begins[at]), at


def _rank(options: Options, line_s: float) -> tuple[int, float]:
    """Ranks and seconds of a micro-batch on the cheapest row that it ends on by the line."""
    own = next((mb for mb in options if mb.seconds_s <= line_s), options[-1])
    return own.sp, own.seconds_s
