"""Loss and gradients of dcpc's graphs, and how far they are from the plain model's."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import sympy
import torch
from torch import Tensor, nn

from dcpc.codegen import LoweredPair, run_in_step, summed
from dcpc.codegen.lower.output_pieces import joined_outputs
from dcpc.ir import Partition, Program
from dcpc.trace import casting
from dcpc.trace.loss import gradient_of, one_number
from dcpc.verify.exactness import Gradients, loss_error, relative_errors
from dcpc.verify.reference import (
    LossAndGradients,
    gradients_of,
    input_name,
    leaves_of,
    state,
    widened,
)
from dcpc.verify.replay import Replay, RightKernels, Watch, calls, in_order

# Two ways to sum the same numbers in float64 differ by far less. More is what torch rounds while it
# takes a float32 op apart: a constant of it, such as a norm's epsilon, is a float32 number.
LIMIT = 1e-7
# In a lower dtype: roundings of it, relative to the largest element, that may add up.
ROUNDINGS = 64


@dataclass(frozen=True, slots=True)
class Error:
    """How far an outcome is from the plain model's.

    Attributes:
        worst: the largest relative difference; infinite where something is not a number.
        where: "loss", or the parameter whose gradient differs most.
        got: that loss, or the largest difference of that gradient.
        expected: that loss, or the largest element of that gradient.
    """

    worst: float
    where: str
    got: float
    expected: float


def error_of(found: LossAndGradients, expected: LossAndGradients, floor: float) -> Error:
    """Returns the largest difference of a loss and gradients.

    Args:
        found: what is judged.
        expected: the plain model's.
        floor: see `relative_errors`.
    """
    by_name = relative_errors(found.gradients, expected.gradients, floor, none_is_zero=True)
    by_name["loss"] = loss_error(found.loss, expected.loss)
    worst, where = max(((math.inf if e != e else e), n) for n, e in by_name.items())
    if where == "loss":
        return Error(worst, where, float(found.loss), float(expected.loss))
    got, want = found.gradients[where], expected.gradients[where]
    size = 0.0 if want is None else float(want.abs().max())
    gap = size if got is None else float((got - (0 if want is None else want)).abs().max())
    return Error(worst, f"gradient of {where}", gap, size)


class Given:
    """What a program's graphs take in a comparison.

    Args:
        program: the traced model.
        model: the user's.
        inputs: by name.
        wide: in float64 throughout.
        alike: see `draws.KnownDraws`.
        wanted: names of the parameters, and `input_name` of inputs, whose gradients are compared.
    """

    def __init__(
        self,
        program: Program,
        model: nn.Module,
        inputs: Mapping[str, Tensor],
        *,
        wide: bool,
        alike: bool,
        wanted: Collection[str],
    ) -> None:
        """Makes leaves of the model's parameters."""
        self.program, self.wanted, self.alike = program, wanted, alike
        self.calls = calls(wide=wide, alike=alike)
        self.device = next(iter(inputs.values())).device
        self.parameters, _ = state(model, wide, wanted, self.device)
        # Tied parameters have several names, and one leaf.
        first = {id(p): n for n, p in model.named_parameters()}
        every = model.named_parameters(remove_duplicate=False)
        self.leaf = {n: first[id(p)] for n, p in every}
        buffers = {
            n: widened(b.detach(), wide) for n, b in model.named_buffers(remove_duplicate=False)
        }
        given = {n: x.contiguous() for n, x in inputs.items()}
        given = leaves_of(given, wide, wanted)
        self.leaves = {**self.parameters, **{input_name(n): x for n, x in given.items()}}
        self.tensors: dict[str, Tensor] = {
            **{p: self.parameters[self.leaf[n]] for p, n in program.parameters.items()},
            **{p: buffers[n] for p, n in program.buffers.items()},
            **program.constants,
            **{p: given[n] for p, n in program.inputs.items()},
        }

    def of_program(self, watch: Watch | None = None) -> LossAndGradients:
        """Returns what the forward graph computes, differentiated by autograd."""
        gm = self.program.gm
        with torch.enable_grad(), casting(self.device.type, None):
            output = Replay(gm, self.calls, watch).run(*in_order(gm, self.tensors))
            loss = one_number(output)
            with RightKernels():
                found = gradients_of(loss, [self.leaves[n] for n in self.wanted])
        return LossAndGradients(loss.detach(), dict(zip(self.wanted, found, strict=True)))

    def of_partition(
        self,
        lowering: LoweredPair,
        parts: Partition,
        integers: Sequence[Mapping[str, int]],
        dims: Mapping[sympy.Symbol, int],
    ) -> LossAndGradients:
        """Returns what the forward and backward graphs of all ranks compute, sums included.

        Args:
            lowering: whose partition it is.
            parts: the graphs of any rank.
            integers: what the graphs take besides tensors, of each rank.
            dims: length of every dim.
        """
        tensors = {n: t.detach() for n, t in self.tensors.items()}
        ranks = run_in_step([parts] * len(integers), integers, tensors, self.calls, gradient_of)
        found: Gradients = dict.fromkeys(self.wanted)
        every = zip(lowering.joint.trainable, summed(ranks), ranks[0].gradients, strict=True)
        for placeholder, total, own in every:
            name = self._name(placeholder)
            gradient = own if placeholder in self.program.inputs else total
            if gradient is not None and name in found:  # else it was frozen since
                had = found[name]
                found[name] = gradient if had is None else had + gradient
        returned = [rank.outputs for rank in ranks]
        outputs = joined_outputs(self.program, lowering.placement, returned, dims)
        return LossAndGradients(one_number(outputs), found)

    def _name(self, placeholder: str) -> str:
        """Returns what the gradient of a placeholder is called."""
        if placeholder in self.program.inputs:
            return input_name(self.program.inputs[placeholder])
        return self.leaf[self.program.parameters[placeholder]]
