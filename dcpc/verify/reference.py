"""Loss and gradients of the user's own model, beside which everything is held."""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dcpc.trace import casting
from dcpc.trace.capture.module_state import holding, untouched
from dcpc.trace.loss import Loss, find_outputs, one_number, returned
from dcpc.verify.draws import KnownDraws
from dcpc.verify.exactness import Gradients
from dcpc.verify.float64 import float64_throughout
from dcpc.verify.replay import RightKernels


@dataclass(frozen=True, slots=True)
class LossAndGradients:
    """Loss and gradients of one run.

    Attributes:
        loss: the loss; where forward returns other tensors, `one_number` of them.
        gradients: name of a trainable parameter, or `input_name` of an input, -> its gradient, None
            where it has none.
        draws: random ops that ran, where they were counted.
        misread: ops whose kernel misread its operands in this run; the gradients here are right.
    """

    loss: Tensor
    gradients: Gradients
    draws: int = 0
    misread: frozenset[str] = frozenset()

    @property
    def finite(self) -> bool:
        """Whether loss and gradients are numbers."""
        values = [self.loss, *(g for g in self.gradients.values() if g is not None)]
        return all(bool(v.isfinite().all()) for v in values)


def widened(tensor: Tensor, wide: bool) -> Tensor:
    """Returns a tensor in float64, or as it is."""
    return tensor.double() if wide and tensor.is_floating_point() else tensor


def valued(name: str, p: Tensor, device: torch.device) -> Tensor:
    """Returns a parameter's values, the same for a name, where it has none here."""
    if not p.is_meta:
        return p
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    drawn = torch.randn(p.shape, generator=generator, dtype=torch.float64)
    drawn = 1 + drawn / 10 if p.dim() < 2 else drawn / max(1, math.prod(p.shape[1:])) ** 0.5
    return torch.empty_like(p, device=device).copy_(drawn)


def state(
    model: nn.Module, wide: bool, wanted: Collection[str], device: torch.device
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Returns leaves that stand for the model's parameters, and its buffers, by name.

    Args:
        model: the user's; not changed.
        wide: whether they are copies in float64; else they share the model's memory.
        wanted: names of the parameters whose gradients are compared.
        device: of values for parameters of which this rank has its rows alone: they are drawn.
    """
    parameters = {
        n: widened(valued(n, p.detach(), device), wide).detach().requires_grad_(n in wanted)
        for n, p in model.named_parameters()
    }
    return parameters, {n: widened(b.detach(), wide) for n, b in model.named_buffers()}


def plain(
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    *,
    wide: bool,
    alike: bool,
    autocast: torch.dtype | None,
    wanted: Collection[str],
    loss: Loss | None = None,
) -> LossAndGradients:
    """Returns what the model itself computes.

    Neither its parameters nor their `grad` change, nor torch's random numbers, nor anything that
    another thread of this process sees: a dataset may be read in one meanwhile.

    Args:
        model: the user's.
        inputs: by name.
        wide: in float64 throughout: parameters, inputs, and every cast to a lower dtype.
        alike: see `KnownDraws`.
        autocast: what it is trained under, where it is not `wide`.
        wanted: names of the parameters, and `input_name` of inputs, whose gradients are compared.
        loss: of what forward returned; None: forward returned it.
    """
    given = leaves_of(inputs, wide, wanted)
    device = next(iter(given.values())).device
    parameters, buffers = state(model, wide, wanted, device)
    own = (*model.named_parameters(), *model.named_buffers())
    others = {id(t): {**parameters, **buffers}[n] for n, t in own}
    with (
        untouched(model),
        holding(model, others),
        torch.enable_grad(),
        KnownDraws(alike) as draws,
    ):
        with float64_throughout() if wide else casting(device.type, autocast):
            value = one_number(find_outputs(returned(model, given, loss)))
        if not value.isfinite().all():  # nothing is compared with it
            return LossAndGradients(value.detach(), {}, draws.drew)
        with casting(device.type, None), RightKernels() as kernels:
            leaves = {**parameters, **{input_name(n): x for n, x in given.items()}}
            found = gradients_of(value, [leaves[n] for n in wanted])
    gradients = dict(zip(wanted, found, strict=True))
    return LossAndGradients(value.detach(), gradients, draws.drew, frozenset(kernels.misread))


def gradients_of(loss: Tensor, leaves: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """Returns the gradients of some leaves, as dense tensors; there may be none."""
    found = torch.autograd.grad(loss, leaves, allow_unused=True) if leaves else ()
    return [None if gradient is None else gradient.to_dense() for gradient in found]


def input_name(name: str) -> str:
    """Returns what the gradient of an input is called beside those of parameters."""
    return f"input '{name}'"


def leaves_of(
    inputs: Mapping[str, Tensor], wide: bool, wanted: Collection[str]
) -> dict[str, Tensor]:
    """Returns the inputs, those whose gradients are compared as leaves of their own.

    Args:
        inputs: by name; not changed.
        wide: whether in float64.
        wanted: names of the parameters, and `input_name` of inputs, whose gradients are compared.
    """
    learning = {n for n in inputs if input_name(n) in wanted}
    given = {n: widened(t, wide) for n, t in inputs.items()}
    return {n: t.detach().requires_grad_() if n in learning else t for n, t in given.items()}
