"""What training goes on from, in memory."""

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
    """A loader, a scheduler: what has a state of its own."""

    def state_dict(self) -> Any:
        """Returns the state, of plain values."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Goes on from a state."""


class NamedParameters(Stateful, Protocol):
    """What a checkpoint wants of a compiled model."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields the parameters that an optimizer has."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What training goes on from.

    Attributes:
        model: the compiled model.
        seeds: of its random numbers.
        mode: who holds its parameters.
        optimizer: of its parameters.
        loader: that a state of plain values is of.
        scheduler: of the learning rate.
        partial: whether a rank's optimizer has some of the parameters alone, and others the rest.
    """

    model: NamedParameters
    seeds: Stateful
    mode: str
    optimizer: Optimizer | None
    loader: Stateful | None
    scheduler: Stateful | None
    partial: bool = False

    def parameters(self) -> dict[str, nn.Parameter]:
        """Returns the compiled model's parameters by name."""
        return dict(self.model.named_parameters())

    def tensors(self) -> dict[str, Any]:
        """Returns the state of the model and of the optimizer."""
        found = {"model": self.model.state_dict()}
        if self.optimizer is not None:
            found["optimizer"] = by_name(self.optimizer, self.parameters())
        return found

    def small(self) -> dict[str, Stateful]:
        """Returns what has a state of plain values, by name."""
        named = {"loader": self.loader, "scheduler": self.scheduler}
        return {name: part for name, part in named.items() if part is not None}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What training goes on from; without a folder it starts.

    Attributes:
        step: that was saved last; 0: none.
        extra: as it was saved.
        folder: of the checkpoint; None: there is none.
    """

    step: int = 0
    extra: Any = None
    folder: Path | None = None
