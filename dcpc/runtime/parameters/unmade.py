"""The store of a model on the meta device: it has nothing, and says what to do about it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from torch import nn

from dcpc.errors import DispatchError
from dcpc.runtime.groups.groups import Groups
from dcpc.runtime.parameters.reduction import COMM_BUCKET_BYTES
from dcpc.runtime.parameters.store import WholeStore


class UnmadeStore(WholeStore):
    """Stands for the store of a compiled model until `dcpc.materialize` makes that.

    Args:
        groups: the process groups.
    """

    mode = "unmade"

    def __init__(self, groups: Groups) -> None:
        super().__init__((), groups)

    def check_ready(self, what: str) -> NoReturn:
        """Refuses what needs parameters.

        Args:
            what: is done, for the error.

        Raises:
            DispatchError: always.
        """
        raise DispatchError(
            f"got {what} of a model on the meta device, whose parameters have no memory and no "
            "values; expected one that was materialized; call dcpc.materialize(compiled) on every "
            "rank first, and make the optimizer after it"
        )

    @property
    def kept(self) -> NoReturn:
        """Refuses: there are no parameters."""
        self.check_ready("parameters")

    def shard(self, tensor: Any) -> NoReturn:
        """Refuses: there are no parameters."""
        self.check_ready("parameters")

    def load(self, values: Mapping[str, Any], model: nn.Module) -> NoReturn:
        """Refuses: there are no parameters."""
        self.check_ready("load_state_dict")

    def state_dict(self, model: nn.Module, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuses: there are no parameters."""
        self.check_ready("state_dict")

    def reduction(self, comm_bucket_bytes: int = COMM_BUCKET_BYTES) -> NoReturn:
        """Refuses: there are no parameters."""
        self.check_ready("reduce_gradients")

    def follow(self, parameters: Iterable[nn.Parameter]) -> NoReturn:
        """Refuses: there are no parameters."""
        self.check_ready("a train step")
