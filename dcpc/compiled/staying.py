"""Which units of parameters stay on the device over the micro-batches of a step.

For parameters that are away: each use of a unit copies it, unless it stayed. What a micro-batch
leaves free of a rank's memory is known from its plan, and the uses of a step from its micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import TypeAlias

from dcpc.buckets import BATCH, Bucket
from dcpc.codegen import Resident, kept_after
from dcpc.plan.planning import Planned, run_bytes
from dcpc.runtime.parameters.store import ParameterStore
from dcpc.runtime.planner.plans import PlannedMicroBatch, Setting

SettingOf: TypeAlias = Callable[[PlannedMicroBatch], Setting]
Again: TypeAlias = Callable[[PlannedMicroBatch], Set[int]]


class StayingUnits:
    """The units of a plan's graphs, and the memory that its micro-batches leave free.

    Args:
        planned: plan of a model whose parameters are away.
        store: store of its parameters.
        setting_of: function that returns the setting of a micro-batch.
        again: function that returns the units that a micro-batch gathers again in backward.
    """

    def __init__(
        self, planned: Planned, store: ParameterStore, setting_of: SettingOf, again: Again
    ) -> None:
        self._planned, self._setting_of, self._again = planned, setting_of, again
        traced = planned.traces[0].traced
        assert traced.units is not None, "what is away is gathered"
        held, info = traced.tensors(), traced.program.info
        self._sizes = [sum(int(info[n].size_bytes) for n in unit) for unit in traced.units.units]
        self._numbers = {
            store.taken(held[unit[0]]).data_ptr(): k for k, unit in enumerate(traced.units.units)
        }
        self._free: dict[tuple[Bucket, Setting], int] = {}

    def over(self, rounds: Sequence[Sequence[PlannedMicroBatch]]) -> Resident:
        """Returns the units that stay over a step's rounds, each of micro-batches that run at once.

        All ranks of a block decide alike: they fetch a unit together.
        """
        uses: list[int] = []
        room: list[float] = []
        for together in rounds:
            again = frozenset[int]().union(*map(self._again, together))
            mine = [*range(len(self._sizes)), *sorted(again, reverse=True)]
            uses += mine
            room += [min(map(self._free_bytes, together), default=0)] * len(mine)
        return Resident(uses, kept_after(uses, room, self._sizes), self._numbers)

    def _free_bytes(self, mb: PlannedMicroBatch) -> int:
        setting = self._setting_of(mb)
        key = mb.bucket, setting
        if key not in self._free:
            sizes = {**mb.bucket.sizes, BATCH: setting.micro_batch}
            priced = self._planned.by_bucket[mb.bucket].priced
            study = priced.at(priced.placement(sizes, setting.sp))
            request = self._planned.request
            needed = request.resident_bytes + run_bytes(study.predict(setting.menu_step, sizes))
            self._free[key] = request.memory_bytes - needed
        return self._free[key]
