"""The state of an optimizer whose parameters are away: it is made, and stays, where they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import LBFGS
from torch.optim.optimizer import Optimizer

from dcpc.runtime.parameters.reduction import in_runs

STATE_RUN_BYTES = 1_000_000  # of parameters whose states are made, and then moved, at once


class AwayMemory(Protocol):
    """Memory beyond the device's: the host's, or a file's."""

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Returns a tensor of any content that lies here."""

    def has(self, tensor: Tensor) -> bool:
        """Whether a tensor lies here."""


def step_new(optimizer: Optimizer, place: AwayMemory) -> list[tuple[nn.Parameter, Any]]:
    """Steps the parameters that have no state yet, some at a time, and moves their states.

    So of all states that an optimizer makes in its first step few are not at their place. Those of
    torch alone, which go parameter by parameter; others make all states before any is moved.

    Args:
        optimizer: optimizer that is about to write.
        place: memory of its parameters.

    Returns:
        These parameters and their gradients, which they are without until the step ends.
    """
    every = [p for group in optimizer.param_groups for p in group["params"]]
    move_state(optimizer, place, every)  # one that was loaded
    step = getattr(type(optimizer).step, "__wrapped__", None)  # without the hooks of a step
    ours = type(optimizer).__module__.startswith("torch.optim.")
    new = {p for p in every if p.grad is not None and p not in optimizer.state}
    if not new or step is None or not ours or isinstance(optimizer, LBFGS):
        return []
    given = {p: p.grad for p in every}
    for p in every:
        p.grad = None
    for run in in_runs([p for p in every if p in new], STATE_RUN_BYTES):
        for p in run:
            p.grad = given[p]
        step(optimizer)
        move_state(optimizer, place, run)
        for p in run:
            p.grad = None
    for p in every:
        p.grad = None if p in new else given[p]
    return [(p, given[p]) for p in new]


def move_state(optimizer: Optimizer, place: AwayMemory, params: Sequence[nn.Parameter]) -> None:
    """Moves the states of some parameters to the place of these, but for single numbers."""
    for p in params:
        state = optimizer.state.get(p, {})
        for name, value in state.items() if place.has(_local(p)) else ():
            if isinstance(value, Tensor) and value.dim() and not place.has(_local(value)):
                state[name] = _moved(value, place)


def _moved(value: Any, place: AwayMemory) -> Tensor:
    local = _local(value)
    lies = place.tensor(local.shape, local.dtype).copy_(local)
    if local is value:
        return lies
    found: Tensor = value.from_local(
        lies, value.device_mesh, value.placements, run_check=False, shape=value.shape,
        stride=value.stride(),
    )  # fmt: skip
    return found


def _local(value: Any) -> Tensor:
    found: Tensor = value.to_local() if hasattr(value, "to_local") else value
    return found
