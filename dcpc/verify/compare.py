"""Loss and gradients of dcpc's graphs: of all ranks in this process, or of one call."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import sympy
import torch
from torch import Tensor, nn

from dcpc.codegen import (
    LoweredPair,
    Result,
    Variant,
    broken_guards,
    integers_of,
    run_in_step,
    summed,
)
from dcpc.codegen.lower.output_pieces import joined_outputs
from dcpc.fx.large_graphs import op_name
from dcpc.ir import Partition, Program
from dcpc.ops.attention import has_no_wide_kernel
from dcpc.plan.runnable import RewrittenCall
from dcpc.trace import casting
from dcpc.trace.loss import gradient_of, one_number
from dcpc.verify.draws import KnownParts
from dcpc.verify.exactness import Difference, Gradients, LossAndGradients
from dcpc.verify.reference import gradients_of, input_name, leaves_of, state, widened
from dcpc.verify.references import Reference
from dcpc.verify.replay import Replay, RightKernels, Watch, calls, in_order

PART = 0.5  # of the loss that is differentiated, as training scales it: a power of 2 is exact


@dataclass(frozen=True, slots=True)
class Compared:
    """Difference of a result from the plain model.

    Attributes:
        reference: outcome that it was compared with.
        error: largest difference.
        right: whether `error` is within rounding.
        rounds: whether it exceeds the usual limit, but not the plain model's own rounding.
    """

    reference: Reference
    error: Difference
    right: bool
    rounds: bool = False

    def __str__(self) -> str:
        own = "" if self.reference.wide else " (own dtype)"
        own += " (the model itself rounds so)" * self.rounds
        return f"{self.reference.point} to {self.error.worst:.0e}{own}"


_ATTENTIONS = ("attention_forward", "attention_of_rows_forward", "ring_attention_forward")


def runs_own_kernels(parts: Partition) -> bool:
    """Returns whether graphs run kernels in their own dtypes that float64 has not: attention's."""
    made = (n for n in parts.forward.graph.nodes if n.op == "call_function")
    asked = (n.args[0].meta["val"] for n in made if op_name(n) in _ATTENTIONS)
    return any(map(has_no_wide_kernel, asked))


class Given:
    """Inputs of a program's graphs in a comparison.

    Args:
        program: the traced model.
        model: model of the user.
        inputs: input name -> tensor.
        wide: whether all is in float64.
        alike: whether all random numbers of a tensor are equal.
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
        """Returns the forward graph's loss, and its gradients by autograd."""
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
        """Returns loss and gradients of all ranks' forward and backward graphs, sums included."""
        trained = lowering.joint.trainable
        ranks, found = self.of_ranks([parts] * len(integers), integers, trained)
        returned = [rank.outputs for rank in ranks]
        outputs = joined_outputs(self.program, lowering.placement, returned, dims)
        return LossAndGradients(one_number(outputs), found)

    def of_ranks(
        self,
        parts: Sequence[Partition],
        integers: Sequence[Mapping[str, int]],
        trained: Sequence[str],
    ) -> tuple[Sequence[Result], Gradients]:
        """Returns each rank's results in a group, and the sums of their gradients by name.

        All ranks run in this process.
        """
        tensors = {n: t.detach() for n, t in self.tensors.items()}
        ranks = run_in_step(parts, integers, tensors, self.calls, gradient_of)
        found: Gradients = dict.fromkeys(self.wanted)
        for placeholder, total, own in zip(trained, summed(ranks), ranks[0].gradients, strict=True):
            name = self._name(placeholder)
            gradient = own if placeholder in self.program.inputs else total
            if gradient is not None and name in found:  # else it was frozen since
                had = found[name]  # a tied parameter has several placeholders
                found[name] = gradient if had is None else had + gradient
        return ranks, found

    def of_variants(
        self, ranks: Sequence[tuple[Variant, Sequence[int]]]
    ) -> tuple[Sequence[Result], Gradients]:
        """Returns the same of the graphs of variants, as `of_ranks`."""
        first = ranks[0][0]
        integers = [
            {i.name: value for i, value in zip(variant.integers, values, strict=True)}
            for variant, values in ranks
        ]
        trained = [first.placeholders[position] for position in first.trainable]
        return self.of_ranks([variant.partition for variant, _ in ranks], integers, trained)

    def _name(self, placeholder: str) -> str:
        if placeholder in self.program.inputs:
            return input_name(self.program.inputs[placeholder])
        return self.leaf[self.program.parameters[placeholder]]


Make = Callable[[Given], LossAndGradients]


def called(given: Given, variant: Variant, integers: tuple[int, ...]) -> LossAndGradients:
    """Returns the loss of one rank's variant, and the gradients that its backward leaves."""
    wanted = {n: p for n, p in given.leaves.items() if p.requires_grad}
    with torch.enable_grad(), casting(given.device.type, None):
        tensors = [given.tensors[n] for n in variant.placeholders]
        loss = one_number(variant.outputs(tensors, integers))
        found = gradients_of(loss * PART, [*wanted.values()])
    gradients = (None if g is None else g / PART for g in found)
    return LossAndGradients(loss.detach(), dict(zip(wanted, gradients, strict=True)))


def known_run(call: RewrittenCall) -> Make | None:
    """Returns a function that runs a call with known random numbers, on all ranks of its group.

    None: compiled code draws numbers, or the graphs are not for the call's sizes.
    """
    what, other = call.runs
    if isinstance(what, LoweredPair):
        assert isinstance(other, Partition), "graphs are of a lowering and its partition"
        dims = call.program.dims(call.sizes)
        integers = integers_of(what.lowered, dims)
        if any(is_broken(what, each) for each in integers):
            return None
        return partial(Given.of_partition, lowering=what, parts=other, integers=integers, dims=dims)
    assert isinstance(other, tuple), "a variant takes integers"
    if what.draws and what.backend != "eager":
        return None

    def alone(given: Given) -> LossAndGradients:
        with KnownParts(alike=False):
            return called(given, what, other)

    return alone


def is_broken(lowering: LoweredPair, integers: Mapping[str, int]) -> bool:
    """Whether graphs are not for some sizes."""
    sizes = {i.symbol: integers[i.name] for i in lowering.lowered.integers}
    return bool(broken_guards(lowering.joint.guards, sizes))
