"""Stages as the planner of schedules sees them, and as the executor runs them with recompute.

A setting of recompute is a share of a stage's menu: none of its steps, half of them, all. Seconds
and bytes are those of the stage's own graph at the micro-batch's sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dcpc.buckets import BATCH, Sizes
from dcpc.compiled.pipeline.costs import STATE, StageDevice
from dcpc.compiled.pipeline.cut import nbytes
from dcpc.compiled.pipeline.stages import ProgramStage
from dcpc.runtime.pipeline.schedule import Hop, StageCost
from dcpc.runtime.pipeline.stage import Shaped
from dcpc.symbolic_profile import Device

SHARES = (0.0, 0.5, 1.0)  # of a stage's steps of recompute, by setting

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RecomputedStage:
    """A stage with one setting of recompute; it is a `dcpc.runtime.pipeline.stage.Stage`.

    Attributes:
        stage: any setting.
        share: of its steps of recompute that are taken.
    """

    stage: ProgramStage
    share: float

    @property
    def index(self) -> int:
        """Place of the stage, from 0."""
        return self.stage.index

    @property
    def count(self) -> int:
        """Stages of the pipeline."""
        return self.stage.count

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the model's parameters that it reads."""
        return self.stage.parameters

    def menu_step(self, sizes: Sizes) -> int:
        """Returns the steps of recompute that it takes of a micro-batch."""
        return round(self.share * self.stage.recompute_steps(sizes))

    def forward(
        self, inputs: Mapping[str, Tensor], received: tuple[Tensor, ...], seed: int = 0
    ) -> tuple[tuple[Tensor, ...], Any]:
        """Returns what `ProgramStage.forward` does at this setting."""
        step = self.menu_step(self.stage.sizes(inputs, received)) if self.share else 0
        return self.stage.forward(inputs, received, seed, step)

    def backward(self, saved: Any, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        """Returns what `ProgramStage.backward` does."""
        return self.stage.backward(saved, grads)

    def received(self, sizes: Sizes) -> tuple[Shaped, ...]:
        """Returns shape and dtype of what the stage receives."""
        return self.stage.received(sizes)

    def sent(self, sizes: Sizes) -> tuple[Shaped, ...]:
        """Returns shape and dtype of what the stage sends."""
        return self.stage.sent(sizes)

    def cost(self, sizes: Sizes, speed: float = 1.0) -> StageCost:
        """Returns what a micro-batch costs at this setting.

        The worst point of forward and backward together counts for each of them.
        """
        step = self.menu_step(sizes)
        found = self.stage.predict(sizes, step)
        forward_s, backward_s = self.stage.seconds(sizes, step)
        pairs = zip(self.stage.part.received, self.received(sizes), strict=True)
        handed_on = sum(nbytes(x) for n, x in pairs if n not in self.stage.part.read)
        given_bytes = found.input_bytes + handed_on
        most = float(found.peak_bytes + given_bytes)
        return StageCost(
            forward_s / speed,
            backward_s / speed,
            held_bytes=float(found.saved_bytes + given_bytes),
            forward_bytes=most,
            backward_bytes=most,
        )


@dataclass(frozen=True)
class ScheduledStages:
    """What micro-batches cost on the stages of a model: `runtime.pipeline.planning.PipelineCost`.

    Attributes:
        parts: the stages.
        sizes_of: length of a sample -> its dims, without the batch.
        device: whose seconds those of speed 1 are.
        devices: of each stage.
    """

    parts: Sequence[ProgramStage]
    sizes_of: Callable[[int], Sizes]
    device: Device
    devices: Sequence[StageDevice]
    _known: dict[tuple[int, int, int], tuple[StageCost, ...]] = field(default_factory=dict)

    @property
    def stages(self) -> int:
        """Stages of the pipeline."""
        return len(self.parts)

    @property
    def settings(self) -> int:
        """Settings of recompute that every stage has."""
        return len(SHARES)

    @property
    def memory_bytes(self) -> tuple[float, ...]:
        """Of each stage, less its parameters, their gradients and the optimizer's state."""
        pairs = zip(self.parts, self.devices, strict=True)
        return tuple(device.memory_bytes - part.resident_bytes(STATE) for part, device in pairs)

    def at(self, stage: int) -> tuple[RecomputedStage, ...]:
        """Returns a stage at each setting, for the executor."""
        return tuple(RecomputedStage(self.parts[stage], share) for share in SHARES)

    def options(self, stage: int, count: int, longest: int) -> tuple[StageCost, ...]:
        """Returns what a micro-batch costs on a stage, by setting."""
        key = (stage, count, longest)
        if key not in self._known:
            sizes, speed = {**self.sizes_of(longest), BATCH: count}, self.devices[stage].speed
            self._known[key] = tuple(each.cost(sizes, speed) for each in self.at(stage))
        return self._known[key]

    def hop(self, stage: int, count: int, longest: int) -> Hop:
        """Returns what it costs from a stage to the next one; gradients have values' bytes."""
        sizes = {**self.sizes_of(longest), BATCH: count}
        sent = self.parts[stage].sent(sizes)
        ahead, back = (float(sum(map(nbytes, x))) for x in (sent, _floats(sent)))
        link = self.device.link(2)
        ahead_s, back_s = (link.alpha_s + size / link.bytes_per_s for size in (ahead, back))
        return Hop(ahead_s, back_s, ahead, back)

    def padded(self, setting: int, flight: int) -> PaddedStages:
        """Returns seconds and share of memory of the worst stage, for many at once."""
        return PaddedStages(self, setting, flight)


@dataclass(frozen=True, slots=True)
class PaddedStages:
    """The costs that the split into micro-batches asks for.

    Between counts that are powers of two it takes what lies on the line between them; the schedule
    is priced at the sizes themselves.

    Attributes:
        cost: of the stages.
        setting: of recompute.
        flight: micro-batches at once, but no more than 1F1B has on a stage.
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
        return (cost.forward_bytes + more * cost.held_bytes) / size if size > 0 else inf

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


def _floats(shapes: Sequence[Shaped]) -> tuple[Shaped, ...]:
    """Returns those that have gradients."""
    return tuple(x for x in shapes if x[1].is_floating_point or x[1].is_complex)
