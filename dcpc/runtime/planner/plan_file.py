"""Plans as JSON: messages of rank 0 to the others, and files that `dcpc replay` runs again.

A plan names rows of the table it was made from, so it carries that table's hash; a file carries the
table too. JSON alone: reading one runs no code.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dcpc.buckets import Bucket
from dcpc.errors import PlanError
from dcpc.runtime.planner.own_lengths import BatchLengths
from dcpc.runtime.planner.packed.bins import PackedPrices
from dcpc.runtime.planner.plans import MODES, PlannedMicroBatch, StepPlan, step_plan
from dcpc.runtime.planner.splits.known_lengths import lengths_json, lengths_of
from dcpc.runtime.planner.step_planner import Allowed, plan_rows, plan_step
from dcpc.runtime.planner.table import PlanTable

VERSION = 2


@dataclass(frozen=True, slots=True)
class PlanFile:
    """A plan with the inputs that it was made from.

    Attributes:
        plan: the plan; of packed rows its sample ids number these.
        table: rows that it was chosen from.
        allowed: limits of the step's micro-batches.
        samples: id and bucket of each sample of the batch, in order.
        lengths: lengths of the samples; None: they are padded to their buckets'.
        rows: ids of the samples of each packed row; none: samples are not packed.
        to_bucket: whether packed rows are padded to their buckets.
    """

    plan: StepPlan
    table: PlanTable
    allowed: Allowed
    samples: tuple[tuple[int, Bucket], ...]
    lengths: BatchLengths | None = None
    rows: tuple[tuple[int, ...], ...] = ()
    to_bucket: bool = False

    def again(self, lengths: BatchLengths | None) -> StepPlan:
        """Returns the plan that is made of the same samples now, at these lengths."""
        mode = self.plan.mode
        if not self.rows:
            return plan_step(self.samples, self.table, mode, self.allowed, lengths)
        assert lengths is not None, "packed samples have lengths"
        sequences = [(i, size) for i, _ in self.samples for _, size in lengths.dims[i]]
        only = self.samples[0][1] if mode == "intra" else None
        prices = PackedPrices(lengths.own, self.to_bucket)
        plan, rows = plan_rows(sequences, self.table, prices, only, mode)
        return plan.packed(rows)

    def write(self, file: str | Path) -> None:
        """Writes the file."""
        data = {
            "version": VERSION,
            "table": self.table.to_json(),
            "allowed": [self.allowed.least, self.allowed.most, self.allowed.pads],
            "samples": [[i, self.table.key(b)] for i, b in self.samples],
            "plan": plan_json(self.plan, self.table),
        }
        if self.lengths is not None:
            data["lengths"] = lengths_json(self.lengths, self.samples, self.table, self.again)
        if self.rows:
            data |= {"rows": self.rows, "to_bucket": self.to_bucket}
        try:
            Path(file).write_text(json.dumps(data), encoding="utf-8")
        except OSError as e:
            raise PlanError(
                f"{file}: got {e.strerror}; expected a file that can be written, in a folder that "
                "is there; name another"
            ) from e

    @classmethod
    def read(cls, file: str | Path) -> PlanFile:
        """Returns the plan in a file that `write` wrote.

        Raises:
            PlanError: it is no such file, of another version, or its plan is of another table.
        """
        try:
            data = json.loads(Path(file).read_text(encoding="utf-8"))
            _check_version(data, str(file))
            table = PlanTable.from_json(data["table"])
            allowed = Allowed(*data["allowed"])
            samples = tuple((int(i), table.buckets[k]) for i, k in data["samples"])
            lengths = lengths_of(data["lengths"], samples, table) if "lengths" in data else None
            plan = plan_of(data["plan"], table, str(file))
            rows = tuple(tuple(map(int, row)) for row in data.get("rows", ()))
            to_bucket = bool(data.get("to_bucket"))
            return cls(plan, table, allowed, samples, lengths, rows, to_bucket)
        except OSError as e:
            raise PlanError(f"{file}: got {e.strerror}; expected a plan file; name one") from e
        except (
            ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError,
            OverflowError,
        ) as e:  # fmt: skip
            raise PlanError(
                f"{file}: got {type(e).__name__} {e}; expected a plan that DataLoader.save_plan "
                "wrote; write it again"
            ) from e


def plan_json(plan: StepPlan, table: PlanTable) -> dict[str, Any]:
    """Returns a plan as plain data, its buckets by their number in the table."""
    return {
        "version": VERSION,
        "table": plan.table,
        "mode": plan.mode,
        "bound_s": plan.bound_s,
        "binds": plan.binds,
        "micro_batches": [
            [table.key(mb.bucket), mb.ranks[0], mb.sp, mb.micro_batch, mb.menu_step, mb.seconds_s,
             list(mb.sample_ids), *([dict(mb.dims)] if mb.dims else [])]
            for mb in plan.micro_batches
        ],
        **({"pipelines": [*plan.pipelines], "busy_s": [*plan.busy_s], "end_s": plan.makespan_s}
           if plan.pipelines else {}),
    }  # fmt: skip


def plan_of(data: Mapping[str, Any], table: PlanTable, where: str) -> StepPlan:
    """Returns the plan in the data of `plan_json`.

    Raises:
        PlanError: it is of another version, or was made from another table.
    """
    _check_version(data, where)
    if data["table"] != table.hash:
        raise PlanError(
            f"{where}: got a plan made from plan table {data['table']}; expected table "
            f"{table.hash}, of this model, buckets, world, memory and device; plan again: the old "
            "plan may name rows that are not there or do not fit"
        )
    if data["mode"] not in MODES:
        raise PlanError(
            f"{where}: got mode {data['mode']!r}; expected one of {', '.join(MODES)}; plan again"
        )
    rows = {
        (key, row.sp, row.micro_batch, row.menu_step)
        for key, own in enumerate(table.rows)
        for row in own
    }
    placed = [_micro_batch(entry, table, rows, where) for entry in data["micro_batches"]]
    found = step_plan(placed, table.world, table.block)
    if "pipelines" in data:  # their stages run at times of their own
        busy_s, end_s = tuple(map(float, data["busy_s"])), float(data["end_s"])
        pipelines = tuple(map(str, data["pipelines"]))
        found = replace(found, pipelines=pipelines, busy_s=busy_s, makespan_s=end_s)
    return replace(
        found,
        bound_s=float(data["bound_s"]),
        binds=str(data["binds"]),
        mode=data["mode"],
        table=table.hash,
        speeds=table.speeds,
    )


def _micro_batch(
    entry: Sequence[Any], table: PlanTable, rows: set[tuple[int, int, int, int]], where: str
) -> PlannedMicroBatch:
    key, first, sp, most, menu_step, seconds_s, ids, *shorter = entry
    if (
        (key, sp, most, menu_step) not in rows
        or not 0 <= first <= table.world - sp
        or not 1 <= len(ids) <= most
    ):
        raise PlanError(
            f"{where}: got {len(ids)} samples of bucket number {key} on ranks {first} to "
            f"{first + sp - 1} with micro-batch {most}, recompute {menu_step}; expected a row of "
            f"the table and ranks below {table.world}; plan again"
        )
    return PlannedMicroBatch(
        table.buckets[key],
        sp,
        tuple(range(first, first + sp)),
        tuple(int(i) for i in ids),
        float(seconds_s),
        most,
        menu_step,
        dims=tuple(sorted((str(n), int(s)) for n, s in shorter[0].items())) if shorter else (),
    )


def _check_version(data: Mapping[str, Any], where: str) -> None:
    if data.get("version") != VERSION:
        raise PlanError(
            f"{where}: got plan version {data.get('version')!r}; expected {VERSION}, of this dcpc; "
            "plan again, or use the dcpc that wrote it"
        )
