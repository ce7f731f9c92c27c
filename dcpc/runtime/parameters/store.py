"""The parameters that variants run on, and those that a user's optimizer has.

"whole": they are the same, the model's own, and every rank updates all of them. Else a rank's
optimizer has a `DTensor` for each parameter, of which this rank holds the rows it owns; those are
views of the parameter that variants run on, so what the optimizer writes is there at once on this
rank, and on the others when its step ends:

    "step"   every rank has the whole parameter; it gets its rows of the sum of gradients, and all
             rows after the optimizer's step (`row_store.py`)
    "pull"   all ranks of a host map the same memory, so nothing is gathered (`shared.py`)
    "rounds" a rank has its rows alone, and variants gather the others' (`gathered.py`)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from dcpc.errors import DispatchError
from dcpc.runtime.groups.groups import Groups
from dcpc.runtime.parameters.hollow import give_memory
from dcpc.runtime.parameters.reduction import COMM_BUCKET_BYTES, Reduction, trained


class AwayMemory(Protocol):
    """Memory beyond the device's: the host's, or a file's."""

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Returns a tensor of any content that lies here."""

    def has(self, tensor: Tensor) -> bool:
        """Whether a tensor lies here."""


class ParameterStore(ABC):
    """Store of a model's parameters; as written here, each rank has all of them whole.

    Attributes:
        groups: the process groups.
        whole: parameters that variants run on, each once.
        mode: name of this way to hold them.
        in_rounds: whether ranks of a block go through a step together, see `gathered.py`.
        block: number of ranks that share the parameters out.
        partial: whether this rank's optimizer has only some of the parameters.
        keeps_meta: whether the model's own parameters stay on the meta device.
    """

    groups: Groups
    whole: list[nn.Parameter]
    mode: str
    in_rounds: bool = False
    block: int = 0
    partial: bool = False
    keeps_meta: bool = False

    def install(self, model: nn.Module) -> None:  # noqa: B027 - nothing, where it has its own
        """Gives a model the parameters that it has from now on: its own."""

    @property
    @abstractmethod
    def kept(self) -> Sequence[nn.Parameter]:
        """Parameters that an optimizer has, in the order of `whole`."""

    @abstractmethod
    def shard(self, tensor: Any) -> Any:
        """Returns a user's tensor for one of the model's: itself if it is no parameter."""

    @abstractmethod
    def follow(self, parameters: Iterable[nn.Parameter]) -> DispatchError | None:
        """Takes the model's parameters as they are now: some may be others.

        Returns:
            Reason why no step can be taken; None: there is none.
        """

    def named_parameters(
        self, model: nn.Module, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields a user's tensor for each parameter, under its name in the model."""
        for name, p in model.named_parameters(prefix, True, remove_duplicate):
            yield name, self.shard(p)

    def state_dict(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Returns a model's state: its own."""
        return model.state_dict(*args, **kwargs)

    def load(self, values: Mapping[str, Any], model: nn.Module) -> Mapping[str, Any]:
        """Returns the part of a state dict that the model loads: all of it."""
        return values

    def loaded(self) -> None:  # noqa: B027 - nothing, where each rank has all
        """Takes down that the model has loaded a state, or that a series of `fill` has ended."""

    def fill(self, p: nn.Parameter, value: Tensor) -> None:
        """Writes the part of a parameter's value that this rank keeps: all of it.

        Args:
            p: parameter, one of `whole`.
            value: value of the whole parameter, the same on every rank.
        """
        with torch.no_grad():
            p.copy_(value)

    def taken(self, tensor: Tensor) -> Tensor:
        """Returns the tensor that graphs take for a tensor of the model: itself."""
        return tensor

    def begin(self) -> None:  # noqa: B027
        """Gets ready for a step."""

    def failed(self) -> None:  # noqa: B027
        """Drops the gradients of a step that raised."""


class WholeStore(ParameterStore):
    """Parameters that every rank has and updates whole.

    Args:
        parameters: parameters of the model; tied ones count once, hollow ones get memory.
        groups: the process groups.
    """

    mode = "whole"

    def __init__(self, parameters: Iterable[nn.Parameter], groups: Groups) -> None:
        self.groups, self.whole = groups, list(dict.fromkeys(parameters))
        for p in self.whole:
            give_memory(p)

    @property
    def kept(self) -> list[nn.Parameter]:
        """Parameters that an optimizer has: the model's own."""
        return self.whole

    def shard(self, tensor: Any) -> Any:
        """Returns a user's tensor for one of the model's: itself."""
        return tensor

    def follow(self, parameters: Iterable[nn.Parameter]) -> None:
        """Takes the model's parameters as they are now."""
        self.whole = list(dict.fromkeys(parameters))

    def reduction(self, comm_bucket_bytes: int = COMM_BUCKET_BYTES) -> Reduction:
        """Returns the sum of one step's gradients."""
        return Reduction(trained(self.whole), self.groups, comm_bucket_bytes)
