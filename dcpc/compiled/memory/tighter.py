"""Buckets whose micro-batches ran out of memory, planned again with less of it.

What was predicted for the setting that failed is more than there is: the bucket's settings may need
less than that from then on, by a share of what is not the model's own. Each failure takes as much
again, so that the margin between predicted and real memory is as large as what was seen asks for.
"""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dcpc.buckets import BATCH, Bucket
from dcpc.errors import PlanError
from dcpc.ir import BucketPlan
from dcpc.plan.choose import TriedRow, choice_text
from dcpc.plan.planning import Planned, plan_buckets
from dcpc.plan.runnable import Runnable
from dcpc.plan.tiling import TileLadder, tiled
from dcpc.runtime.data.steps import Step
from dcpc.runtime.groups.agreement import from_first
from dcpc.runtime.groups.groups import Groups
from dcpc.runtime.planner.plans import PlannedMicroBatch, RowSetting
from dcpc.runtime.step.result import StepResult
from dcpc.runtime.step.shortage import OutOfMemoryInStepError, Shortage
from dcpc.symbolic_profile import bytes_text, recompute_text
from dcpc.trace import casting

LOG = logging.getLogger("dcpc")

# How often a step is run again before that is an error.
REPEATS = 8
# What a failure takes of the bytes that the setting was to need besides the model's own.
CUT = 0.15
# Each further time that a step runs again takes so much more, up to half.
MOST_CUT = 0.5


@dataclass(slots=True)
class TighterPlans:
    """The plans and tables of a compiled model, tightened where memory was short.

    Attributes:
        planned: plan of the model, with its request.
        plans: setting of each bucket; written to.
        tables: rows of each bucket; written to.
        programs: program of each bucket, whole or in tiles; written to.
        groups: the process groups.
        budgets: bucket -> bytes that a rank may need by prediction, where it ran out of memory.
        counts: bucket -> how often it ran out of memory.
        changes: how often rows were replaced by others.
    """

    planned: Planned
    plans: dict[Bucket, BucketPlan]
    tables: dict[Bucket, tuple[TriedRow, ...]]
    programs: dict[Bucket, Runnable]
    groups: Groups
    budgets: dict[Bucket, int] = field(default_factory=dict)
    counts: dict[Bucket, int] = field(default_factory=dict)
    changes: int = 0
    _least: set[tuple[Bucket, RowSetting]] = field(default_factory=set)  # failed in this step

    def run(self, step: Step, attempt: Callable[[Step], StepResult]) -> tuple[Step, StepResult]:
        """Returns the step as it ran, and its result; collective over all ranks.

        Args:
            step: step of the loader.
            attempt: function that runs a step.

        Raises:
            PlanError: on all ranks: nothing smaller is left to try, or the step is of no loader.
            DataError: a sample that was loaded again is wrong.
        """
        step = self._current(step)
        self._least.clear()
        for repeats in itertools.count():
            try:
                return step, attempt(step)
            except OutOfMemoryInStepError as short:
                shortages = short.shortages
            step = self._after(step, shortages, repeats)
        raise AssertionError("repeats are bounded")

    def report(self) -> str:
        """Returns a line for each bucket that ran out of memory, with its limit since then."""
        within = {b: f"; planned within {bytes_text(n)} of a rank since"
                  for b, n in self.budgets.items()}  # fmt: skip
        return "".join(
            f"{bucket}: ran out of memory {count} times{within.get(bucket, '')}\n"
            for bucket, count in self.counts.items()
        )

    def _current(self, step: Step) -> Step:
        """Returns a step as it is run: planned again where it has a setting that was withdrawn.

        All ranks do alike, without a message.

        Raises:
            PlanError: it is not from a loader, so that nobody can plan it again.
        """
        stale = [mb for mb in step.plan.micro_batches if not self._holds(mb)]
        return self._again(step, stale[0]) if stale else step

    def _after(self, step: Step, shortages: Sequence[Shortage], repeats: int) -> Step:
        """Returns the step planned again with the settings that failed withdrawn; collective.

        Raises:
            PlanError: on all ranks: there is no smaller setting, or the step has been repeated
                often enough.
        """
        every = step.plan.micro_batches
        by_setting = {(every[s.number].bucket, _setting(every[s.number])): s for s in shortages}
        for (bucket, setting), shortage in by_setting.items():
            told = (
                f"step {step.index} of epoch {step.epoch}: rank {shortage.rank} ran out of memory"
                f"{_allocation_text(shortage)} in a micro-batch of {bucket}"
            )
            if repeats >= REPEATS:
                raise PlanError(
                    f"{told}; got {repeats} smaller plans that did not fit either; expected one "
                    "to fit; lower memory= to what a rank really has, or free what else takes it"
                )
            cut = min(MOST_CUT, CUT * (1 + repeats))
            old = self._tighten(bucket, setting, cut, told)
            if self.groups.rank == 0:
                LOG.warning("%s at %s; the step runs again (%d of at most %d)",
                            told, old, repeats + 1, REPEATS)  # fmt: skip
        return self._again(step, every[shortages[0].number])

    def _holds(self, mb: PlannedMicroBatch) -> bool:
        """Whether a micro-batch has a setting that was not withdrawn."""
        if mb.bucket not in self.budgets:
            return True
        rows = (self.plans[mb.bucket], *(r for r in self.tables[mb.bucket] if r.fits))
        return _setting(mb) in {RowSetting(r.sp, r.micro_batch, r.menu_step) for r in rows}

    def _again(self, step: Step, why: PlannedMicroBatch) -> Step:
        if step.again is None:
            raise PlanError(
                f"step {step.index} of epoch {step.epoch}: got a setting of {why.bucket} that ran "
                "out of memory, in a step that no dcpc.DataLoader made; expected one that can be "
                "planned again; iterate a loader, or lower memory= at compile"
            )
        found = step.again()
        if found.problem is not None:
            raise found.problem
        return found

    def _tighten(self, bucket: Bucket, setting: RowSetting, cut: float, told: str) -> str:
        """Plans a bucket with less memory than a setting was to need; collective.

        Args:
            bucket: bucket to plan again.
            setting: setting that ran out of memory.
            cut: share to leave out of the bytes that it was to need besides the model.
            told: text on the rank that ran out, for the error.

        Returns:
            The setting, and what takes its place, in words.

        Raises:
            PlanError: on all ranks: none needs less, and it has failed before in this step.
        """
        request = self.planned.request
        row = next((r for r in self.tables[bucket] if _row_setting(r) == setting), None)
        needed = request.memory_bytes if row is None else row.needed_bytes
        needed = min(needed, self.budgets.get(bucket, needed))
        own = request.resident_bytes
        cuts = (cut, cut / 2, cut / 4)  # the least that there is may be more than the first leaves
        budgets = [*(own + int((1 - each) * (needed - own)) for each in cuts), needed - 1]
        wanted = json.dumps(self._found(bucket, setting.sp, budgets))
        found = json.loads(from_first(self.groups, wanted))
        old = f"{_setting_text(setting, row)}, which was to need {bytes_text(needed)} of a rank"
        self.counts[bucket] = self.counts.get(bucket, 0) + 1
        if not found:
            if (bucket, setting) in self._least:
                raise PlanError(
                    f"{told} at {old}; got no setting that needs less, and it failed twice; "
                    "expected it to fit; free what else takes memory, allow a larger sp or "
                    "recompute=, or shorten the bucket"
                )
            self._least.add((bucket, setting))
            return f"{old}; no other one needs less, so it is tried once more"
        priced = self._take(bucket, found["tiles"]).priced
        full = {**bucket.sizes, BATCH: int(found["plan"]["micro_batch"])}
        study = priced.at(priced.placement(full, int(found["plan"]["sp"])))
        rows = [TriedRow(**each, most=lambda: study.steps) for each in found["rows"]]
        self.budgets[bucket] = int(found["budget"])
        self.tables[bucket] = tuple(rows)
        self.plans[bucket] = BucketPlan(**found["plan"], bucket=bucket)
        self.changes += 1  # last: the loader's thread then looks at the others
        now = f"{choice_text(self.plans[bucket])}, within {bytes_text(self.budgets[bucket])}"
        return f"{old}; now {now}"

    def _take(self, bucket: Bucket, tiles: Sequence[Any] | None) -> Runnable:
        """Has a bucket run its program in such tiles, None: whole; returns that."""
        before = self.programs[bucket]
        found = before.whole if tiles is None else tiled(before.whole, *tiles)
        assert found is not None, "rank 0 has it, from the same trace"
        found.inspector = before.inspector
        found.priced.placements.settle()
        self.programs[bucket] = found
        return found

    def _found(self, bucket: Bucket, sp: int, budgets: Sequence[int]) -> dict[str, Any]:
        """Returns plan and rows within the first budget that something fits; plain data.

        At a wider group than that which failed only where nothing else fits: tiles of wide values
        and values that leave the device are tried before. Of rank 0 alone: what a row costs may
        follow from what a rank has priced before.
        """
        if self.groups.rank > 0:
            return {}
        request = self.planned.request
        ladder = TileLadder({bucket: self.programs[bucket].whole}, request.tile)
        own = tuple(degree for degree in request.sps if degree <= sp)
        for budget, sps in itertools.product(budgets, dict.fromkeys((own, request.sps))):
            asked = replace(request, memory_bytes=budget, sps=sps)
            with casting(self.groups.device.type, None):
                found = plan_buckets(ladder.priced, asked, others=ladder.others)
                if not found.plans:
                    continue
                # Wider groups stay a choice of the planner of steps.
                every = plan_buckets(found.priced, replace(asked, sps=request.sps)).tables[bucket]
            wider = [row for row in every if row.sp > max(sps)]
            plain = {"sp", "micro_batch", "menu_step", "seconds_s", "fits", "peak_bytes",
                     "again_bytes", "activation_bytes", "away_bytes"}  # fmt: skip
            return {
                "budget": budget,
                "tiles": ladder.chosen(found.priced)[bucket].tiles,
                "plan": {n: getattr(found.plans[bucket], n) for n in {*plain, "steps", "reason"}},
                "rows": [{n: getattr(row, n) for n in {*plain, "needed_bytes", "segments"}}
                         for row in (*found.tables[bucket], *wider)],
            }  # fmt: skip
        return {}


def _setting(mb: PlannedMicroBatch) -> RowSetting:
    return RowSetting(mb.sp, mb.micro_batch, mb.menu_step)


def _row_setting(row: TriedRow) -> RowSetting:
    return RowSetting(row.sp, row.micro_batch, row.menu_step)


def _setting_text(setting: RowSetting, row: TriedRow | None) -> str:
    again = f"{setting.menu_step} steps of recompute"
    again = again if row is None else f"recompute {recompute_text(row)}"
    return f"sp {setting.sp}, micro-batch {setting.micro_batch}, {again}"


def _allocation_text(shortage: Shortage) -> str:
    if not shortage.wanted_bytes:
        return ""
    return f" (an allocation of {bytes_text(shortage.wanted_bytes)} failed)"
