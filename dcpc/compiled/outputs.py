"""What a model's forward returns besides its loss: all tensors of it, in its own structure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from dcpc.errors import TraceError
from dcpc.trace.loss import AllOutputs, Loss, find_loss, returned

_PLAIN = (bool, int, float, str, type(None))


class WithOutputs:
    """Takes the place of a model's `loss=`: returns its loss, then all other tensors.

    Args:
        model: the user's.
        loss: the user's `loss=`; None: forward returned the loss.
    """

    def __init__(self, model: nn.Module, loss: Loss | None) -> None:
        self._forward = type(model).__name__
        self._loss = loss
        self._known: tuple[TreeSpec, list[Any]] | None = None

    def __call__(self, outputs: Any, **inputs: Tensor) -> AllOutputs:
        """Returns the loss and the tensors in what forward returned.

        Args:
            outputs: what forward returned.
            inputs: all of the call's, by name.

        Raises:
            TraceError: there is something else in it, or another structure than the last time.
        """
        loss = find_loss(returned(_Returned(outputs), inputs, self._loss))
        leaves, spec = tree_flatten(outputs)
        others = [x for x in leaves if not isinstance(x, (Tensor, *_PLAIN))]
        if others:
            raise TraceError(
                f"{self._forward}.forward returned a {type(others[0]).__name__} in its outputs; "
                "expected tensors, numbers and strings in lists, tuples, dicts and dataclasses "
                "that torch.utils._pytree knows; leave it out (use_cache=False for a cache of "
                "keys), or evaluate without outputs=True"
            )
        plain = [None if isinstance(x, Tensor) else x for x in leaves]
        tensors = [isinstance(x, Tensor) for x in leaves]
        if self._known is not None and self._known != (spec, [plain, tensors]):
            raise TraceError(
                f"{self._forward}.forward returned {spec}, got {self._known[0]} before; expected "
                "one structure at all lengths; return the same, or evaluate without outputs=True"
            )
        self._known = spec, [plain, tensors]
        return AllOutputs((loss, *(x for x in leaves if isinstance(x, Tensor))))

    def restored(self, tensors: Sequence[Tensor]) -> tuple[Tensor, Any]:
        """Returns the loss, and what forward returns.

        Args:
            tensors: in the order of a call's.
        """
        assert self._known is not None, "a trace has called it"
        spec, (plain, is_tensor) = self._known
        loss, *rest = tensors
        left = iter(rest)
        leaves = [next(left) if held else x for x, held in zip(plain, is_tensor, strict=True)]
        return loss, tree_unflatten(leaves, spec)


class _Returned(nn.Module):
    """Stands for a model whose forward has run."""

    def __init__(self, outputs: Any) -> None:
        super().__init__()
        self._outputs = (outputs,)  # not a child, whatever it is

    def forward(self, **inputs: Tensor) -> Any:
        return self._outputs[0]
