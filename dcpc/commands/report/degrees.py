"""The best setting of each bucket at each degree: the table behind a choice, one cell a degree."""

from __future__ import annotations

from dataclasses import dataclass

from dcpc.buckets import Bucket
from dcpc.errors import PlanError
from dcpc.ir import BucketPlan
from dcpc.plan.choose import TriedRow, choose
from dcpc.plan.planning import Planned
from dcpc.symbolic_profile import bytes_text


@dataclass(frozen=True, slots=True)
class Cell:
    """The best setting of a bucket at one degree.

    Attributes:
        row: row of the plan's table: the choice if no other degree were there; where nothing fits,
            the row that misses by least.
        chosen: whether it is the bucket's plan.
        cost: rank-seconds of a sample over those of the plan.
        binds: constraint that binds it, in words.
    """

    row: TriedRow
    chosen: bool
    cost: float
    binds: str

    @property
    def sample_s(self) -> float:
        """Seconds of a sample on the whole group."""
        return self.row.seconds_s / self.row.micro_batch


def cells(planned: Planned, bucket: Bucket) -> dict[int, Cell]:
    """Returns degree -> cell of every degree that was tried for a bucket."""
    plan, rows = planned.plans[bucket], planned.tables[bucket]
    return {sp: _cell(planned, plan, sp) for sp in sorted({row.sp for row in rows})}


def _cell(planned: Planned, plan: BucketPlan, sp: int) -> Cell:
    rows = [row for row in planned.tables[plan.bucket] if row.sp == sp]
    asked = planned.request
    if sp == plan.sp:
        row, binds = _row(rows, plan), plan.reason
    else:
        try:
            alone = choose(plan.bucket, rows, asked.memory_bytes, asked.world, asked.recompute_mode)
            row, binds = _row(rows, alone), alone.reason
        except PlanError:
            row = min(rows, key=lambda r: r.needed_bytes)
            over = bytes_text(row.needed_bytes - asked.memory_bytes)
            return Cell(row, False, float("inf"), f"does not fit: {over} too much")
    cost = row.rank_seconds / _row_of(planned, plan).rank_seconds
    if sp != plan.sp:
        binds = f"{cost:.2f} times the rank-time of the chosen degree; in itself: {binds}"
    if asked.world % sp:
        binds = f"{binds}; only in planned steps, as {sp} does not divide {asked.world} ranks"
    return Cell(row, sp == plan.sp, cost, binds)


def _row_of(planned: Planned, plan: BucketPlan) -> TriedRow:
    return _row([r for r in planned.tables[plan.bucket] if r.sp == plan.sp], plan)


def _row(rows: list[TriedRow], plan: BucketPlan) -> TriedRow:
    return next(
        r for r in rows if (r.micro_batch, r.menu_step) == (plan.micro_batch, plan.menu_step)
    )
