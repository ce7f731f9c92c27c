"""Which units of parameters stay on the device over the micro-batches of a step.

For parameters that are away: each use of a unit copies it, unless it stayed. What a micro-batch
leaves free of a rank's memory is known from its plan, and a step's uses from its micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import TypeAlias

from dcpc.buckets import BATCH, Bucket
from dcpc.codegen import Resident, kept_after
from dcpc.plan.planning import Planned, run_bytes
from dcpc.runtime.parameters.store import ParameterStore
from dcpc.runtime.planner.plans import PlannedMicroBatch, RowSetting

SettingOf: TypeAlias = Callable[[PlannedMicroBatch], RowSetting]
Again: TypeAlias = Callable[[PlannedMicroBatch], Set[int]]


class StayingUnits:
    """The units of a plan's graphs, and the memory that its micro-batches leave free.

    Args:
        planned: plan of a model whose parameters are away.
        setting_of: function that returns the setting of a micro-batch.
        again: function that returns the units that a micro-batch gathers again in backward.

    Attributes:
        size_bytes: bytes of each unit.
    """

    def __init__(self, planned: Planned, setting_of: SettingOf, again: Again) -> None:
        self._planned, self._setting_of, self._again = planned, setting_of, again
        units, info = planned.traces[0].traced.units, planned.traces[0].traced.program.info
        assert units is not None, "what is away is gathered"
        self.size_bytes = units.size_bytes(info)
        self._firsts = [unit[0] for unit in units.units]
        self._free: dict[tuple[Bucket, Bucket, int, RowSetting], int] = {}

    def uses(self, rounds: Sequence[Sequence[PlannedMicroBatch]]) -> tuple[list[int], list[float]]:
        """Returns the unit of each use in a step's rounds, and the bytes that others may take then.

        Args:
            rounds: micro-batches that run at once in a block, round by round; all of its ranks
                decide alike, as they fetch a unit together.
        """
        units: list[int] = []
        room: list[float] = []
        for together in rounds:
            again = frozenset[int]().union(*map(self._again, together))
            mine = [*range(len(self.size_bytes)), *sorted(again, reverse=True)]
            units += mine
            room += [min(map(self._free_bytes, together), default=0)] * len(mine)
        return units, room

    def over(
        self, rounds: Sequence[Sequence[PlannedMicroBatch]], store: ParameterStore
    ) -> Resident:
        """Returns the units that stay over a step's rounds, as for `uses`."""
        held = self._planned.traces[0].traced.tensors()
        numbers = {store.taken(held[n]).data_ptr(): k for k, n in enumerate(self._firsts)}
        units, room = self.uses(rounds)
        return Resident(units, kept_after(units, room, self.size_bytes), numbers)

    def _free_bytes(self, mb: PlannedMicroBatch) -> int:
        """Returns the bytes that a micro-batch leaves of a rank's memory, at its own lengths."""
        setting = self._setting_of(mb)
        key = mb.bucket, mb.shape, mb.batch, setting
        if key not in self._free:
            priced = self._planned.by_bucket[mb.bucket].priced
            planned = {**mb.bucket.sizes, BATCH: setting.micro_batch}
            study = priced.at(priced.placement(planned, setting.sp))
            own = {**mb.shape.sizes, BATCH: mb.batch}
            request = self._planned.request
            needed = request.resident_bytes + run_bytes(study.predict(setting.menu_step, own))
            self._free[key] = request.memory_bytes - needed
        return self._free[key]
