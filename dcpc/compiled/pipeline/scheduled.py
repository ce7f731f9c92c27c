"""The stages of a model as the planner of schedules asks for them: any count, any length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf

import numpy as np
from numpy.typing import NDArray

from dcpc.buckets import BATCH, Sizes
from dcpc.compiled.pipeline.model_stage import ModelStage
from dcpc.compiled.pipeline.stage_costs import StageDevice
from dcpc.compiled.pipeline.work import pipeline_work
from dcpc.runtime.pipeline.schedule import Hop, PipelineWork, StageCost

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True)
class ScheduledStages:
    """The costs of micro-batches on stages; a `runtime.pipeline.replicas.PipelineCost`.

    Attributes:
        rows: copies of each stage, one for each setting of recompute, the fastest first; the
            executor runs a row.
        sizes_of: function from the length of a sample to its dims, without the batch.
        devices: device of each stage.
    """

    rows: Sequence[Sequence[ModelStage]]
    sizes_of: Callable[[int], Sizes]
    devices: Sequence[StageDevice]
    _known: dict[tuple[tuple[str, int], ...], PipelineWork] = field(
        default_factory=dict, repr=False
    )

    def at(self, sizes: Sequence[Sizes]) -> ScheduledStages:
        """Returns the same costs by another row of lengths; what is known of sizes stays known."""
        return replace(self, sizes_of=sizes.__getitem__)

    @property
    def stages(self) -> int:
        """Stages of the pipeline."""
        return len(self.rows)

    @property
    def settings(self) -> int:
        """Settings of recompute that every stage has."""
        return len(self.rows[0])

    @cached_property
    def memory_bytes(self) -> tuple[float, ...]:
        """Memory of each stage, without parameters, their gradients and the optimizer's state."""
        return pipeline_work(self.rows, (), self.devices).memory_bytes

    def options(self, stage: int, count: int, longest: int) -> tuple[StageCost, ...]:
        """Returns the costs of a micro-batch on a stage, by setting."""
        return self._work(count, longest).costs[stage][0]

    def hop(self, stage: int, count: int, longest: int) -> Hop:
        """Returns the costs of sending a micro-batch from a stage to the next one and back."""
        return self._work(count, longest).hops[stage][0]

    def padded(self, setting: int, flight: int) -> PaddedStages:
        """Returns seconds and share of memory of the worst stage, for many at once."""
        return PaddedStages(self, setting, flight)

    def _work(self, count: int, longest: int) -> PipelineWork:
        sizes = {**self.sizes_of(longest), BATCH: count}
        key = tuple(sizes.items())
        if key not in self._known:
            self._known[key] = pipeline_work(self.rows, [sizes], self.devices)
        return self._known[key]


@dataclass(frozen=True, slots=True)
class PaddedStages:
    """The costs that the split into micro-batches asks for.

    Between counts that are powers of two it takes what lies on the line between them; the schedule
    is priced at the sizes themselves.

    Attributes:
        cost: costs of the stages.
        setting: number of the setting of recompute.
        flight: number of micro-batches at once, but no more than 1F1B has on a stage.
    """

    cost: ScheduledStages
    setting: int
    flight: int

    def seconds(self, count: Integers, longest: Integers) -> Floats:
        """Returns forward and backward of the slowest stage; arguments broadcast."""
        return self._read(count, longest, self._seconds)

    def peak_bytes(self, count: Integers, longest: Integers) -> Floats:
        """Returns the most of any stage's memory, as a share; arguments broadcast."""
        return self._read(count, longest, self._share)

    def _seconds(self, stage: int, cost: StageCost) -> float:
        return cost.forward_s + cost.backward_s

    def _share(self, stage: int, cost: StageCost) -> float:
        size = self.cost.memory_bytes[stage]
        if size == inf:
            return 0.0
        more = min(self.flight, self.cost.stages - stage) - 1
        most = max(cost.forward_bytes, cost.backward_bytes)
        return (most + more * cost.held_bytes) / size if size > 0 else inf

    def _read(
        self, count: Integers, longest: Integers, figure: Callable[[int, StageCost], float]
    ) -> Floats:
        counts, lengths = np.broadcast_arrays(count, longest)
        found = np.empty(counts.shape)
        powers = [1 << n for n in range(int(counts.max()).bit_length() + 1)]
        for length in np.unique(lengths).tolist():
            here = lengths == length
            at = [self._most(power, length, figure) for power in powers]
            found[here] = np.interp(counts[here], powers, at)
        return found

    def _most(self, count: int, length: int, figure: Callable[[int, StageCost], float]) -> float:
        stages = range(self.cost.stages)
        return max(figure(s, self.cost.options(s, count, length)[self.setting]) for s in stages)
