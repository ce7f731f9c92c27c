"""The joint plan table of all buckets for the batch planner: few rows, with a hash.

Each row that a plan uses becomes a variant to compile, so rows that gain little are left out first.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

from dcpc.buckets import Bucket
from dcpc.errors import PlanError
from dcpc.ir import BucketPlan, PlanRow
from dcpc.ir.thresholds import ROW_GAIN
from dcpc.runtime.planner.deal import check_setting
from dcpc.runtime.planner.plans import FREE_MODES, PlannedMicroBatch
from dcpc.runtime.planner.protocol import Source
from dcpc.runtime.planner.speeds import Speeds


@dataclass(frozen=True)
class PlanTable:
    """Rows that the planner chooses from.

    Attributes:
        buckets: every bucket; its number here is its key.
        rows: rows of each bucket.
        world: number of ranks.
        node_ranks: ranks of a node: a group of at most so many is never spread over two.
        aligned: whether groups may only be aligned blocks whose size divides `world`.
        block: ranks that wait for each other after each micro-batch, consecutive; 0: none do.
        speeds: speed of each rank; none: equal.
        hash: a short text, equal for equal tables.
    """

    buckets: tuple[Bucket, ...]
    rows: tuple[tuple[PlanRow, ...], ...]
    world: int
    node_ranks: int
    aligned: bool = False
    block: int = 0
    speeds: Speeds = ()
    hash: str = field(init=False, compare=False)
    _keys: dict[Bucket, int] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Makes the hash, and the key of each bucket."""
        keys = {bucket: key for key, bucket in enumerate(self.buckets)}
        object.__setattr__(self, "_keys", keys)
        text = json.dumps(self.to_json(), sort_keys=True)
        digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        object.__setattr__(self, "hash", digest)

    def key(self, bucket: Bucket) -> int:
        """Returns the number of a bucket.

        Raises:
            PlanError: it is not in the table.
        """
        try:
            return self._keys[bucket]
        except KeyError:
            raise PlanError(
                f"bucket {bucket}: got no row in the plan table; expected one of "
                f"{', '.join(map(str, self.buckets[:8]))}; compile for this bucket"
            ) from None

    def changes(self, base: PlanTable) -> dict[str, Any]:
        """Returns the differences of this table from `base`, as plain data for `changed`."""
        rows = {
            str(key): own
            for key, (own, was) in enumerate(
                zip(self.to_json()["rows"], base.to_json()["rows"], strict=True)
            )
            if own != was
        }
        speeds = {"speeds": [*self.speeds]} if self.speeds != base.speeds else {}
        return {**({"rows": rows} if rows else {}), **speeds}

    def changed(self, changes: Mapping[str, Any]) -> PlanTable:
        """Returns the table with the differences of `changes` put in."""
        if not changes:
            return self
        other = changes.get("rows", {})
        rows = tuple(
            tuple(PlanRow(int(sp), int(m), int(k), float(s)) for sp, m, k, s in other[str(key)])
            if str(key) in other else own
            for key, own in enumerate(self.rows)
        )  # fmt: skip
        speeds = tuple(map(float, changes.get("speeds", self.speeds)))
        return replace(self, rows=rows, speeds=speeds)

    def run(self, bucket: Bucket, sp: int, count: int) -> tuple[PlanRow, float]:
        """Returns the smallest row of a degree that holds so many samples, and their seconds.

        Seconds lie on the line between the row and the next smaller one, or nothing for no samples.
        """
        few, few_s = 0, 0.0
        own = (row for row in self.rows[self.key(bucket)] if row.sp == sp)
        for row in sorted(own, key=lambda row: (row.micro_batch, row.seconds_s)):
            if row.micro_batch >= count:
                share = (count - few) / (row.micro_batch - few)
                return row, few_s + share * (row.seconds_s - few_s)
            few, few_s = row.micro_batch, row.seconds_s
        raise AssertionError(f"bucket {bucket}: no row of sp {sp} holds {count} samples")

    def row_of(self, mb: PlannedMicroBatch) -> PlanRow:
        """Returns the row that a micro-batch runs."""
        setting = mb.sp, mb.micro_batch, mb.menu_step
        rows = self.rows[self.key(mb.bucket)]
        return next(r for r in rows if (r.sp, r.micro_batch, r.menu_step) == setting)

    def to_json(self) -> dict[str, Any]:
        """Returns the table as plain data."""
        return {
            "world": self.world,
            "node_ranks": self.node_ranks,
            "aligned": self.aligned,
            "buckets": [bucket.sizes for bucket in self.buckets],
            "rows": [[[r.sp, r.micro_batch, r.menu_step, r.seconds_s] for r in own]
                     for own in self.rows],
            **({"block": self.block} if self.block else {}),
            **({"speeds": [*self.speeds]} if self.speeds else {}),
        }  # fmt: skip

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> PlanTable:
        """Returns the table that `to_json` gave."""
        return cls(
            buckets=tuple(Bucket.of({str(n): int(s) for n, s in b.items()})
                          for b in data["buckets"]),
            rows=tuple(
                tuple(PlanRow(int(sp), int(m), int(k), float(s)) for sp, m, k, s in own)
                for own in data["rows"]
            ),
            world=int(data["world"]),
            node_ranks=int(data["node_ranks"]),
            aligned=bool(data["aligned"]),
            block=int(data.get("block", 0)),
            speeds=tuple(map(float, data.get("speeds", ()))),
        )  # fmt: skip


def holds(bucket: Bucket, other: Bucket) -> bool:
    """Whether a sample of `other` can be padded to `bucket`."""
    sizes = bucket.sizes
    return all(size <= sizes[name] for name, size in other.shape_key)


def mode_table(
    source: Source, mode: str, world: int, node_ranks: int, aligned: bool = False
) -> PlanTable:
    """Returns the table that a mode chooses from: every row, or each bucket's own setting.

    Raises:
        PlanError: a bucket has no row that fits.
    """
    if mode in FREE_MODES:
        found = make_table(source.tables, world, node_ranks, aligned)
    else:
        found = own_settings(source.plans, world, node_ranks)
    return replace(found, block=source.block) if source.block else found


def make_table(
    tables: Mapping[Bucket, Sequence[PlanRow]],
    world: int,
    node_ranks: int = 8,
    aligned: bool = False,
) -> PlanTable:
    """Returns the rows worth having of every bucket that fit a rank's memory.

    Raises:
        PlanError: a bucket has no row that fits.
    """
    rows = []
    for bucket, tried in tables.items():
        fitting = [r for r in tried if r.fits and r.sp <= world and not (aligned and world % r.sp)]
        if not fitting:
            raise PlanError(
                f"bucket {bucket}: got {len(tried)} rows in the plan table, none of which fits a "
                f"rank's memory on {world} ranks; lower the bucket, or raise memory="
            )
        rows.append(_worth_having(fitting))
    return PlanTable(tuple(tables), tuple(rows), world, node_ranks, aligned)


def own_settings(plans: Mapping[Bucket, BucketPlan], world: int, node_ranks: int = 8) -> PlanTable:
    """Returns a table of each bucket's own setting alone.

    Raises:
        PlanError: a setting's `sp` does not divide `world`.
    """
    for bucket, plan in plans.items():
        check_setting(bucket, plan, world)
    return PlanTable(tuple(plans), tuple((p,) for p in plans.values()), world, node_ranks)


def _worth_having(rows: Sequence[PlanRow]) -> tuple[PlanRow, ...]:
    """Drops micro-batches that save few rank-seconds, and degrees that are hardly faster."""
    kept: list[PlanRow] = []
    fastest_s = inf
    for sp in sorted({row.sp for row in rows}):
        own: list[PlanRow] = []
        for row in sorted((r for r in rows if r.sp == sp), key=lambda r: r.micro_batch):
            best = min((r.seconds_s / r.micro_batch for r in own), default=inf)
            if row.seconds_s / row.micro_batch < best * (1 - ROW_GAIN):
                own.append(row)
        sample_s = min(row.seconds_s for row in own)
        if sample_s < fastest_s * (1 - ROW_GAIN):
            kept += own
            fastest_s = sample_s
    return tuple(kept)
