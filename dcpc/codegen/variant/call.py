"""Holds one call of a variant between its forward and its backward."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dcpc.errors import CodegenError


@dataclass(slots=True)
class VariantCall:
    """A call of a variant from its forward to its last backward, which takes the saved values.

    Attributes:
        sp: number of ranks in the variant's group.
        primals: names of the last of `watched`: tensors that forward was passed.
        begins: (index, shape, dtype, device) of each output at which backward begins.
        kept: arguments of the backward graph from forward; None: they were taken.
        watched: the same values as they were passed, to detect writes to them.
    """

    sp: int
    primals: tuple[str, ...]
    begins: list[tuple[int, torch.Size, torch.dtype, torch.device]]
    kept: list[Any] | None
    watched: list[Any] | None
    _versions: list[int] = field(init=False)

    def __post_init__(self) -> None:
        """Records the version counters of the watched values."""
        self._versions = _versions(self.watched or [])

    def arguments(self, gradients: Sequence[Tensor | None], *, keeps: bool = False) -> list[Any]:
        """Returns the arguments of the backward graph; releases them if no backward is to follow.

        Args:
            gradients: gradient of each of `begins`; None counts as zeros.
            keeps: whether another backward with the same arguments may follow.

        Raises:
            CodegenError: they were released, or one of them was written to.
        """
        if self.kept is None or self.watched is None:
            raise CodegenError(
                "backward of a compiled loss: got a second one, after one that let go of the "
                "activations; expected retain_graph=True in each but the last; pass it, or call "
                "compiled(...) again"
            )
        self._refuse_changed(self.watched)
        # Every rank of the group has the same loss: each differentiates its share of it, and the
        # sum of all ranks' gradients is the loss's.
        pairs = zip(self.begins, gradients, strict=True)
        shares = [
            _share(torch.zeros(shape, dtype=dtype, device=device) if g is None else g, self.sp)
            for (_, shape, dtype, device), g in pairs
        ]
        arguments = [*self.kept, *shares]
        if not keeps:
            self.kept = self.watched = None
        return arguments

    def without_casts(self) -> AbstractContextManager[Any]:
        """Returns a context without the caller's autocast: the graph already contains its casts."""
        device_type = self.begins[0][3].type
        if not torch.is_autocast_enabled(device_type):
            return nullcontext()
        return torch.autocast(device_type, enabled=False)

    def _refuse_changed(self, kept: list[Any]) -> None:
        """Raises if a value saved by forward was written to, as autograd does for its own."""
        found = _versions(kept)
        if found == self._versions:
            return
        pairs = zip(self._versions, found, strict=True)
        changed = [k for k, (before, now) in enumerate(pairs) if before != now]
        names = dict(enumerate(self.primals, len(kept) - len(self.primals)))
        shown = ", ".join(dict.fromkeys(names.get(k, "a value that it saved") for k in changed))
        raise CodegenError(
            f"backward of a compiled loss: got {shown}, modified by an inplace operation since "
            "forward; expected parameters, buffers and inputs as forward had them: gradients would "
            "be of neither; step the optimizer and refill inputs after backward, or pass clones"
        )


def call_of(outputs: Sequence[Tensor]) -> VariantCall | None:
    """Returns the call that made some outputs; None if they need no gradient."""
    found = (getattr(x.grad_fn, "call", None) for x in outputs)
    return next((call for call in found if isinstance(call, VariantCall)), None)


def _share(gradient: Tensor, sp: int) -> Tensor:
    """Returns the share of a gradient that one of `sp` ranks differentiates, contiguous."""
    return (gradient if sp == 1 else gradient / sp).contiguous()


def _versions(kept: list[Any]) -> list[int]:
    """Returns each value's version counter, faster than by `times_written`."""
    try:
        return [x._version for x in kept]
    except (AttributeError, RuntimeError):  # a number that was saved, an inference tensor
        return [x._version if isinstance(x, Tensor) and not x.is_inference() else 0 for x in kept]
