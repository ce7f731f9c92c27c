"""Objects whose state a checkpoint saves: model, optimizer, loader, scheduler, seeds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import nn
from torch.optim import Optimizer

from dcpc.runtime.checkpoint.optimizers import by_name


@runtime_checkable
class Stateful(Protocol):
    """An object with a `state_dict`, such as a loader or a scheduler."""

    def state_dict(self) -> Any:
        """Returns the state as plain values."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Restores a state."""


class NamedParameters(Stateful, Protocol):
    """The part of a compiled model's interface that a checkpoint uses."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields name and parameter, for each one that an optimizer may hold."""


@dataclass(frozen=True, slots=True)
class Parts:
    """Objects whose state is saved and restored.

    Attributes:
        model: the compiled model.
        seeds: seeds of the model's random numbers.
        mode: how ranks hold the parameters: "whole", "step", "pull" or "rounds".
        optimizer: optimizer of the model's parameters; None: not saved.
        loader: data loader, whose state is plain values; None: not saved.
        scheduler: scheduler of the learning rate; None: not saved.
        partial: whether each rank's optimizer has only some of the parameters.
    """

    model: NamedParameters
    seeds: Stateful
    mode: str
    optimizer: Optimizer | None
    loader: Stateful | None
    scheduler: Stateful | None
    partial: bool = False

    def parameters(self) -> dict[str, nn.Parameter]:
        """Returns the compiled model's parameters by name; not what stands for none of a stage."""
        named = self.model.named_parameters()
        return {name: p for name, p in named if p.numel() or not self.partial}

    def tensors(self) -> dict[str, Any]:
        """Returns the state of the model and of the optimizer."""
        found = {"model": self.model.state_dict()}
        if self.optimizer is not None:
            found["optimizer"] = by_name(self.optimizer, self.parameters())
        return found

    def small(self) -> dict[str, Stateful]:
        """Returns name -> loader and scheduler, whose states are plain values."""
        named = {"loader": self.loader, "scheduler": self.scheduler}
        return {name: part for name, part in named.items() if part is not None}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Result of a load; without a folder training starts at step 0.

    Attributes:
        step: step of the checkpoint; 0: there is none.
        extra: user's `extra=` value as it was saved.
        folder: folder of the checkpoint; None: there is none.
    """

    step: int = 0
    extra: Any = None
    folder: Path | None = None
