"""Compares the ranks' parameters, buffers and constants before a step: all, or a share of them."""

from __future__ import annotations

from torch import nn

from dcpc.errors import DcpcError
from dcpc.plan.following import state_tensors
from dcpc.plan.planning import Planned
from dcpc.runtime.groups.groups import Groups
from dcpc.runtime.groups.same_state import refuse_different, share_of
from dcpc.runtime.step.execution import StepState


class AgreedState:
    """Parameters, buffers and constants that must be the same on every rank.

    All of them are compared in the first step after `load_state_dict`, in every other step a share.
    """

    def __init__(self, model: nn.Module, planned: Planned, groups: Groups) -> None:
        """Takes the state that `dcpc.compile` has made the same."""
        self._model = model
        self._planned = planned
        self._groups = groups
        self._loads = self._compared_loads = 0
        self._next_shared = 0  # place of the first tensor that the next step compares

    def loaded(self) -> None:
        """Counts one more state that the user has loaded."""
        self._loads += 1

    def of_step(self, problem: DcpcError | None) -> StepState:
        """Returns the state that has to be the same on all ranks before a step.

        Args:
            problem: problem of this rank's model; its text is compared, and `check` raises it.
        """
        alone = self._groups.world == 1
        tensors = {} if alone else state_tensors(self._model, self._planned)
        loads, text = self._loads, str(problem)
        if problem is None:
            text = f"{loads} calls of load_state_dict"
            if loads == self._compared_loads:
                share, self._next_shared = share_of(tensors, self._next_shared)
                text = f"{text}, {share}"

        def check() -> None:
            if problem is not None:
                raise problem
            if loads != self._compared_loads:
                refuse_different(tensors, self._groups)
                self._compared_loads = loads

        return StepState(f", {text}", check)
