"""Chooses the recompute of a step's micro-batches whose outputs, given back, take memory, too.

Steps are planned for graphs that return the loss alone. Those that return more have another menu of
recompute and another peak, and what earlier micro-batches of the step gave back is still there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace

from dcpc.buckets import BATCH, Bucket
from dcpc.codegen.lower.output_pieces import output_place
from dcpc.compiled.dispatch import Dispatch, SettingKey
from dcpc.errors import PlanError
from dcpc.plan.planning import Planned, row_of
from dcpc.runtime.groups.agreement import from_first
from dcpc.runtime.groups.groups import Groups
from dcpc.runtime.planner.plans import PlannedMicroBatch, StepPlan
from dcpc.symbolic_profile import bytes_text
from dcpc.trace import casting


@dataclass(frozen=True, slots=True)
class _PricedStep:
    """A number of steps of recompute that was priced.

    Attributes:
        menu_step: number of steps.
        needed_bytes: bytes of a rank, all that stays included.
    """

    menu_step: int
    needed_bytes: int


class OutputSettings:
    """Chooses the least recompute with which the micro-batches of a step fit, outputs included.

    Args:
        planned: plan of the graphs that return outputs.
        dispatch: dispatch that runs them, and gets the chosen steps of recompute.
        groups: the process groups.
    """

    def __init__(self, planned: Planned, dispatch: Dispatch, groups: Groups) -> None:
        self._planned, self._dispatch, self._groups = planned, dispatch, groups
        self._known: dict[SettingKey, list[_PricedStep]] = {}

    def choose(self, plan: StepPlan, budgets: Mapping[Bucket, int]) -> None:
        """Chooses for each micro-batch of a step; collective over all ranks.

        Args:
            plan: plan of the step.
            budgets: bucket -> bytes that a rank may need, where it is less than was asked for.

        Raises:
            PlanError: on all ranks: one does not fit.
        """
        room = self._room(plan, budgets)
        chosen = {key: self._fitting(key, room_bytes) for key, room_bytes in room.items()}
        new = [key for key, found in chosen.items() if found is None]
        if new:  # the same ones on all ranks; what a row costs may follow from earlier questions
            mine = [self._priced(key, room[key]) for key in new] if not self._groups.rank else []
            for key, found in zip(new, json.loads(from_first(self._groups, json.dumps(mine))),
                                  strict=True):  # fmt: skip
                self._known.setdefault(key, []).append(_PricedStep(*found))
                chosen[key] = self._fitting(key, room[key])
        for key, step in chosen.items():
            if step is None:
                raise self._refused(key, room[key])
            self._dispatch.menu_steps[key] = step.menu_step

    def _room(self, plan: StepPlan, budgets: Mapping[Bucket, int]) -> dict[SettingKey, int]:
        """Returns the bytes that a micro-batch may need beside the outputs of those before it."""
        kept = [0] * len(plan.busy_s)
        room: dict[SettingKey, int] = {}
        most = self._planned.request.memory_bytes
        for mb in plan.micro_batches:
            key = (mb.bucket, mb.sp, mb.micro_batch)
            left = min(most, budgets.get(mb.bucket, most)) - max(kept[r] for r in mb.ranks)
            room[key] = min(left, room.get(key, left))
            size_bytes = self.output_bytes(mb)
            for rank in mb.ranks:
                kept[rank] += size_bytes
        return room

    def output_bytes(self, mb: PlannedMicroBatch) -> int:
        """Returns the bytes of a micro-batch's outputs besides its loss."""
        program = self._planned.by_bucket[mb.bucket].traced.program
        dims = program.dims({**mb.shape.sizes, BATCH: mb.batch})
        whole = {n: int(program.info[n].size_bytes.subs(dims)) for n in program.results[1:]}
        if not program.pieces or mb.sp == 1:
            return sum(whole.values())
        sizes, setting = {**mb.bucket.sizes, BATCH: mb.batch}, self._dispatch.setting_of(mb)
        placement = self._dispatch.placement(mb.bucket, sizes, setting)
        places = {n: output_place(program, placement, n, dims, 0) for n in whole}
        return sum(
            size if (at := places[n]) is None else size * len(at.positions) // max(1, at.length)
            for n, size in whole.items()
        )

    def _fitting(self, key: SettingKey, room_bytes: int) -> _PricedStep | None:
        found = [s for s in self._known.get(key, ()) if s.needed_bytes <= room_bytes]
        return min(found, key=lambda s: s.menu_step, default=None)

    def _priced(self, key: SettingKey, room_bytes: int) -> tuple[int, int]:
        bucket, sp, batch = key
        priced = self._planned.by_bucket[bucket].priced
        request = replace(self._planned.request, memory_bytes=room_bytes)
        sizes = {**bucket.sizes, BATCH: batch}
        with casting(self._groups.device.type, None):
            row = row_of(priced.at(priced.placement(sizes, sp)), sizes, sp, request)
        return row.menu_step, row.needed_bytes

    def _refused(self, key: SettingKey, room_bytes: int) -> PlanError:
        bucket, sp, batch = key
        least = min(step.needed_bytes for step in self._known[key])
        kept = self._planned.request.memory_bytes - room_bytes
        return PlanError(
            f"train_step with outputs=: a micro-batch of {batch} samples of {bucket} at sp {sp} "
            f"needs {bytes_text(least)} of a rank with what it gives back, got "
            f"{bytes_text(room_bytes)} beside {bytes_text(kept)} of outputs of the step's earlier "
            "micro-batches; expected it to fit; take outputs='sharded', plan smaller steps, give "
            "more memory=, or have forward return less"
        )
