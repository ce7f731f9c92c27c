"""Takes the tensors out of forward's outputs, and puts them back into their structure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import SymFloat, SymInt, Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from dcpc.codegen.lower.output_pieces import OutputPiece
from dcpc.errors import DispatchError, TraceError, check_choice
from dcpc.trace.loss import AllOutputs, Loss, find_loss, returned, returns_statistics

# What a leaf of the outputs is: what is the same in each call, a tensor, the loss itself, a number.
CONSTANT, TENSOR, LOSS, NUMBER = range(4)
_CONSTANTS = (bool, str, type(None))
_NUMBERS = {int: torch.int64, SymInt: torch.int64, float: torch.float64, SymFloat: torch.float64}
# How outputs come back: whole on every rank of a group, or this rank's piece.
KINDS = GATHERED, SHARDED = "gathered", "sharded"


def output_kind(who: str, outputs: object) -> str:
    """Returns one of `KINDS`, or "" where no outputs are asked for.

    Args:
        who: name of the call that is asked, such as "a call".
        outputs: value that the user gave: a kind, or a bool; True means "gathered".

    Raises:
        DispatchError: it is neither.
    """
    if outputs is None or isinstance(outputs, bool):
        return GATHERED if outputs else ""
    check_choice(f"{who}: got outputs=", outputs, (*KINDS, True, False), DispatchError)
    return str(outputs)


class WithOutputs:
    """Takes the place of a model's `loss=`: returns its loss, then all other tensors, detached.

    Args:
        model: model of the user.
        loss: loss function, the user's `loss=`; None: forward returned the loss.
        kind: kind of the outputs, one of `KINDS`.
    """

    def __init__(self, model: nn.Module, loss: Loss | None, kind: str) -> None:
        self.kind = kind
        self._forward = type(model).__name__
        self._loss = loss
        self.returns_statistics = returns_statistics(loss)
        self._known: tuple[TreeSpec, list[Any]] | None = None

    def __call__(self, outputs: Any, **inputs: Tensor) -> AllOutputs:
        """Returns the loss and the other tensors in forward's outputs.

        Args:
            outputs: value that forward returned.
            inputs: inputs of the call, by name.

        Raises:
            TraceError: there is something else in it, or another structure than the last time.
        """
        loss = find_loss(returned(_Returned(outputs), inputs, self._loss))
        leaves, spec = tree_flatten(outputs)
        odd = [x for x in leaves if not isinstance(x, (Tensor, *_CONSTANTS, *_NUMBERS))]
        if odd:
            raise TraceError(
                f"{self._forward}.forward returned a {type(odd[0]).__name__} in its outputs; "
                "expected tensors, numbers and strings in lists, tuples, dicts and dataclasses "
                "that torch.utils._pytree knows; leave it out (use_cache=False for a cache of "
                "keys), or leave outputs= out"
            )
        kinds = [LOSS if x is loss else _kind(x) for x in leaves]
        plain = [x if kind == CONSTANT else None for x, kind in zip(leaves, kinds, strict=True)]
        if self._known is not None and self._known != (spec, [plain, kinds]):
            raise TraceError(
                f"{self._forward}.forward returned {spec}, got {self._known[0]} before; expected "
                "one structure at all lengths; return the same, or leave outputs= out"
            )
        self._known = spec, [plain, kinds]
        pairs = zip(leaves, kinds, strict=True)
        others = [_as_tensor(x, kind) for x, kind in pairs if kind in (TENSOR, NUMBER)]
        return AllOutputs((loss, *others))

    def restored(self, tensors: Sequence[Any]) -> tuple[Tensor, Any]:
        """Returns the loss, and forward's outputs in their own structure.

        Args:
            tensors: tensors in the order of a call's, or pieces of them.
        """
        assert self._known is not None, "a trace has called it"
        spec, (plain, kinds) = self._known
        loss, *rest = tensors
        left = iter(rest)
        leaves = []
        for x, kind in zip(plain, kinds, strict=True):
            if kind == NUMBER:
                number = next(left)
                x = (number.tensor if isinstance(number, OutputPiece) else number).item()
            leaves.append(next(left) if kind == TENSOR else loss if kind == LOSS else x)
        return loss, tree_unflatten(leaves, spec)


def _kind(leaf: Any) -> int:
    """Returns the kind of a leaf other than the loss; integers beyond 64 bits are constants."""
    if isinstance(leaf, Tensor):
        return TENSOR
    if type(leaf) not in _NUMBERS or (type(leaf) is int and not -(1 << 63) <= leaf < 1 << 63):
        return CONSTANT
    return NUMBER


def _as_tensor(leaf: Any, kind: int) -> Tensor:
    """Returns a tensor, detached, or one that holds a number: it may follow from a length."""
    if kind == TENSOR:
        return leaf.detach()  # type: ignore[no-any-return]
    return torch.full((), leaf, dtype=_NUMBERS[type(leaf)], device="cpu")


class _Returned(nn.Module):
    """Stands for a model whose forward has run."""

    def __init__(self, outputs: Any) -> None:
        super().__init__()
        self._outputs = (outputs,)  # not a child, whatever it is

    def forward(self, **inputs: Tensor) -> Any:
        return self._outputs[0]
