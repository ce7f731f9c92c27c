"""One run of a step: its micro-batches, and their outputs besides the loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from dcpc.compiled.dispatch import Dispatch
from dcpc.compiled.outputs.wanted import WithOutputs
from dcpc.runtime.data.steps import MicroBatch, Step
from dcpc.runtime.step.result import MicroBatchOutputs


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """Keeps the outputs of micro-batches.

    Attributes:
        made: object that restores the structure of forward's outputs.
    """

    made: WithOutputs
    _given: dict[int, tuple[Tensor, Any]] = field(default_factory=dict)

    def keep(self, mb: MicroBatch, tensors: Sequence[Any]) -> None:
        """Keeps the outputs of a micro-batch, the loss first."""
        loss, *others = tensors
        self._given[mb.number] = self.made.restored([loss.detach(), *others])

    def of(self, step: Step) -> tuple[MicroBatchOutputs, ...]:
        """Returns the outputs of this rank's micro-batches, in order; empty if it ran none."""
        none = (None, None)
        every = step.micro_batches
        return tuple(MicroBatchOutputs(mb, *self._given.get(mb.number, none)) for mb in every)


@dataclass(frozen=True, slots=True)
class StepRun:
    """Runs the micro-batches of a step.

    Attributes:
        step: step that is run.
        dispatch: dispatch that runs them.
        outputs: keeper of forward's outputs; None: none are asked for.
    """

    step: Step
    dispatch: Dispatch
    outputs: StepOutputs | None

    def __call__(self, mb: MicroBatch, inputs: Mapping[str, Tensor]) -> Tensor:
        """Returns the loss of a micro-batch, and keeps its other outputs.

        Args:
            mb: micro-batch to run.
            inputs: inputs of the micro-batch, on the device.
        """
        found = self.dispatch.run_micro_batch(self.step, mb, inputs)
        if self.outputs is not None:
            self.outputs.keep(mb, found)
        loss: Tensor = found[0]
        return loss
