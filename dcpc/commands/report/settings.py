"""Every setting that was tried for each bucket, as text."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from dcpc.buckets import Bucket
from dcpc.ir import BucketPlan
from dcpc.plan.choose import TriedRow
from dcpc.plan.planning import Planned
from dcpc.symbolic_profile import as_text, bytes_text, headed, seconds_text


def settings_text(planned: Planned) -> str:
    """Returns every setting that was tried for each bucket as a table, and why one was chosen."""
    rows = headed(
        f"settings tried per shape bucket; a rank has {bytes_text(planned.memory_bytes)}; "
        "rank·time is that of all ranks of the group, a sample",
        ["bucket"],
        ["sp", "micro-batch", "recompute", "activations", "needed", "time", "rank·time"],
        "",
    )
    for bucket, tried in planned.tables.items():
        _add_rows(rows, bucket, tried, planned.plans.get(bucket))
        rows.add_section()
    return as_text(rows, *(f"{bucket}: {plan.reason}" for bucket, plan in planned.plans.items()))


def _add_rows(
    table: Table, bucket: Bucket, rows: Sequence[TriedRow], chosen: BucketPlan | None
) -> None:
    for i, row in enumerate(rows):
        is_chosen = chosen is not None and (row.sp, row.micro_batch) == _key(chosen)
        table.add_row(
            "" if i else str(bucket),
            str(row.sp),
            str(row.micro_batch),
            row.recompute,
            bytes_text(row.peak_bytes),
            bytes_text(row.needed_bytes),
            seconds_text(row.seconds_s),
            seconds_text(row.rank_seconds),
            "chosen" if is_chosen else "" if row.fits else "does not fit",
        )


def _key(plan: BucketPlan) -> tuple[int, int]:
    return plan.sp, plan.micro_batch
