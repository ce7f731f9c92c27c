"""The state of a compiled model: parameters and buffers, under the user's own names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NoReturn, Self, SupportsIndex

from torch import Tensor, nn

from dcpc.compiled.agreed_state import AgreedState
from dcpc.errors import CheckpointError, DispatchError
from dcpc.runtime.parameters.store import ParameterStore


class OwnState(nn.Module):
    """Holds the user's model, and shows its parameters, buffers and attributes as its own."""

    model: nn.Module
    _store: ParameterStore
    _agreed: AgreedState
    _unmade: bool  # on the meta device, until `dcpc.materialize`

    def _refuse_unmade(self, what: str) -> None:
        """Refuses what needs parameters, before they have memory.

        Args:
            what: is done, for the error.

        Raises:
            DispatchError: they have none.
        """
        if self._unmade:
            raise DispatchError(
                f"got {what} of a model on the meta device, whose parameters have no memory and no "
                "values; expected one that was materialized; call dcpc.materialize(compiled) on "
                "every rank first, and make the optimizer after it"
            )

    @property
    def module(self) -> nn.Module:
        """The user's own module, for all that is no compiled call: `compiled.module.generate()`."""
        return self.model

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the model's own state, as without dcpc; with `DTensor`s where ranks share it."""
        self._refuse_unmade("state_dict")
        return self._store.state_dict(self.model, *args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Loads the model's own state, as without dcpc; every rank loads the same.

        The next step compares what the ranks have loaded. Where ranks share out the parameters it
        is collective over all ranks, and takes `DTensor`s as well as whole tensors.

        Raises:
            CheckpointError: it is of another model.
        """
        if not isinstance(state_dict, Mapping):
            raise CheckpointError(
                f"load_state_dict: got {type(state_dict).__name__}; expected a mapping of names to "
                "tensors, as state_dict() gives; read a file by torch.load first, and a folder of "
                "compiled.save by compiled.load"
            )
        self._refuse_unmade("load_state_dict")
        values = self._store.load(state_dict, self.model)
        try:
            loaded = self.model.load_state_dict(values, *args, **kwargs)
        except RuntimeError as error:
            said = " ".join(str(error).split()).rstrip(".")
            raise CheckpointError(
                f"load_state_dict: got another model's state: {said}; expected the names and "
                "shapes of compiled.state_dict(); load it into the model that it is of, or pass "
                "strict=False where only names differ"
            ) from error
        self._store.loaded()
        self._agreed.loaded()
        return loaded

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields the parameters under their own names; `DTensor`s where ranks share them.

        They are the compiled model's own, whatever `recurse` says: it has no children, so that
        torch.distributed.checkpoint finds each once.
        """
        self._refuse_unmade("parameters")
        for name, p in self.model.named_parameters(prefix, True, remove_duplicate):
            yield name, self._store.shard(p)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Yields the model's buffers under their own names, as `named_parameters` does."""
        return self.model.named_buffers(prefix, True, remove_duplicate)

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """Yields nothing: see `named_parameters`."""
        return iter(())

    def children(self) -> Iterator[nn.Module]:
        """Yields the model, as `to` and `apply` want it."""
        return iter((self.model,))

    def _fqn_modifiers(self) -> dict[str, str]:
        """Has torch.distributed.checkpoint look for every name in the user's module.

        A model may have a `block`, a `stage` or a `model` of its own, which here is something else.
        """
        own = self.model
        return dict.fromkeys((*own._modules, *own._parameters, *own._buffers), "module")

    def __getattr__(self, name: str) -> Any:
        """Returns what the model has under a name that the compiled model has not."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "model":  # it is not there yet
                raise
            return getattr(self.model, name)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Refuses copies and pickles: process groups and compiled graphs have none."""
        raise DispatchError(
            "got a copy or a pickle of a compiled model; expected it to stay where it was made: it "
            "holds process groups and compiled graphs; copy.deepcopy(compiled.model), or save "
            "compiled.state_dict()"
        )

    def train(self, mode: bool = True) -> Self:
        """Sets the model's mode, as without dcpc."""
        self.model.train(mode)
        self.training = mode
        return self
