"""One run of a step: its micro-batches, and what they give back besides the loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from dcpc.compiled.dispatch import Dispatch
from dcpc.compiled.outputs.wanted import WithOutputs
from dcpc.runtime.data.steps import MicroBatch, Step
from dcpc.runtime.step.result import MicroBatchOutputs


@dataclass(frozen=True, slots=True)
class StepRun:
    """Runs the micro-batches of a step.

    Attributes:
        step: which one.
        dispatch: runs them.
        made: restores what forward returned; None: no outputs are asked for.
    """

    step: Step
    dispatch: Dispatch
    made: WithOutputs | None
    _given: dict[int, tuple[Tensor, Any]] = field(default_factory=dict)

    def __call__(self, mb: MicroBatch, inputs: Mapping[str, Tensor]) -> Tensor:
        """Returns the loss of a micro-batch, and keeps what is returned besides.

        Args:
            mb: which one.
            inputs: of it, on the device.
        """
        loss: Tensor
        loss, *others = self.dispatch.run_micro_batch(self.step, mb, inputs)
        if self.made is not None:
            self._given[mb.number] = self.made.restored([loss.detach(), *others])
        return loss

    def outputs(self) -> tuple[MicroBatchOutputs, ...]:
        """Returns what each micro-batch gave back, in order; nothing where it is not asked for."""
        if self.made is None:
            return ()
        none = (None, None)
        every = self.step.micro_batches
        return tuple(MicroBatchOutputs(mb, *self._given.get(mb.number, none)) for mb in every)
