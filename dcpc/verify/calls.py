"""What a call of a variant gives: its graphs as the eager backend runs them, autograd around."""

from __future__ import annotations

import torch

from dcpc.codegen import Variant
from dcpc.trace import casting
from dcpc.verify.compare import Given
from dcpc.verify.reference import LossAndGradients

SHARE = 0.5  # of the loss that is differentiated, as training scales it: a power of 2 is exact


def called(given: Given, variant: Variant, integers: tuple[int, ...]) -> LossAndGradients:
    """Returns the loss of a variant of one rank, and the gradients that a backward of it leaves.

    Args:
        given: tensors in the model's own dtypes.
        variant: that draws no random numbers.
        integers: of the call.
    """
    wanted = {n: p for n, p in given.parameters.items() if p.requires_grad}
    with torch.enable_grad(), casting(given.device.type, None):
        loss = variant([given.tensors[n] for n in variant.placeholders], integers)
        found = torch.autograd.grad(loss * SHARE, [*wanted.values()], allow_unused=True)
    gradients = (None if g is None else g / SHARE for g in found)
    return LossAndGradients(loss.detach(), dict(zip(wanted, gradients, strict=True)))
