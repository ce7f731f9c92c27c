"""The part of a step that differs between a model on groups of ranks and one in stages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from dcpc.errors import DcpcError
from dcpc.runtime.data.steps import Step
from dcpc.runtime.parameters.store import ParameterStore


@dataclass(frozen=True, slots=True)
class Ran:
    """The numbers of this rank's part of a step.

    Attributes:
        loss: part of the step's loss that this rank counts.
        micro_batch_s: measured seconds of each micro-batch of this rank; 0: it did not run.
        reduction_s: measured seconds from the last micro-batch to the sum of gradients.
        reduced_bytes: bytes of gradients that this rank put into the sum.
        early_bytes: part of `reduced_bytes` that was sent before the last backward had ended.
    """

    loss: float
    micro_batch_s: tuple[float, ...]
    reduction_s: float
    reduced_bytes: int
    early_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ReadyStep:
    """This rank's part of a step, ready to run.

    Attributes:
        text: text that must be the same on all ranks.
        run: function from the sum of all micro-batches' weights to the numbers of the run. It adds
            the step's gradient, summed over all ranks, to `grad` of the store's parameters.
    """

    text: str
    run: Callable[[float], Ran]


class Execution(Protocol):
    """Runs this rank's part of steps: `OnGroup`, or `InStages`."""

    @property
    def store(self) -> ParameterStore:
        """The parameters, and the ranks that train them."""

    def ready(self, step: Step) -> ReadyStep:
        """Returns this rank's part of a step; all ranks raise a `DcpcError` of one of them."""

    def clip(self, max_norm: float) -> float:
        """Scales the summed gradient down to a largest norm; returns its norm before."""


def _nothing() -> None:
    """Checks nothing."""


@dataclass(frozen=True, slots=True)
class StepState:
    """The state of the model that a step starts from, as ranks compare it.

    Attributes:
        text: text that is the same on every rank and begins with ", ".
        check: function called once all ranks are known to have the same text; it raises alike on
            every rank.
        problem: reason why this rank cannot take the step, which all ranks raise; None: it can.
    """

    text: str = ""
    check: Callable[[], None] = _nothing
    problem: DcpcError | None = None
