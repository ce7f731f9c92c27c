"""A variant: what one rank runs for the buckets of one plan, as an ordinary differentiable call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import Tensor

from dcpc.codegen.lower.integer_inputs import IntegerInput
from dcpc.codegen.variant.boxed import Boxed
from dcpc.codegen.variant.call import VariantCall
from dcpc.errors import CodegenError
from dcpc.fx.integers import of_some
from dcpc.ir import Partition

Deliver = Callable[[torch.nn.Parameter, Tensor], None]
Strides = Sequence[tuple[int, ...] | None]  # of each result; None: any

_deliver: ContextVar[Deliver | None] = ContextVar("dcpc_deliver", default=None)


@contextmanager
def delivering(deliver: Deliver) -> Iterator[None]:
    """Lets backward of the variants called in here hand over each gradient once it is final.

    Such a parameter's `grad` is left alone. Not handed over, but added to `grad` as ever: the
    gradient of a parameter with hooks, which autograd has to call, and of one that the variant
    reads under two names, whose gradient is the sum of both.

    Args:
        deliver: takes a parameter and what this backward adds to its gradient.
    """
    token = _deliver.set(deliver)
    try:
        yield
    finally:
        _deliver.reset(token)


@dataclass(frozen=True, slots=True)
class Variant:
    """Compiled forward and backward for one placement, recompute set and backend.

    Attributes:
        partition: the graphs.
        integers: integers the graphs take after the tensors.
        placeholders: names of the forward's tensor placeholders, in order.
        trainable: positions among them of the parameters that get a gradient.
        sp: ranks of the SP group.
        guards: relations between sizes that must hold for this variant to be right.
        run_forward: boxed forward.
        run_backward: boxed backward.
        run_handing_over: the same, but its last argument is called with (number, gradient) as soon
            as each gradient is made, and what that returns is the output instead; None where the
            backend runs the whole of backward as one call.
        backend: what compiled them.
        backward_takes: positions among tensors and integers of what backward takes of them.
        backward_tensors: those of tensors.
    """

    partition: Partition
    integers: tuple[IntegerInput, ...]
    placeholders: tuple[str, ...]
    trainable: tuple[int, ...]
    sp: int
    guards: tuple[sympy.Basic, ...]
    run_forward: Boxed
    run_backward: Boxed
    run_handing_over: Boxed | None
    backend: str
    backward_takes: tuple[int, ...] = field(init=False)
    backward_tensors: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        """Looks up what is asked for at each call."""
        names = (*self.placeholders, *(i.name for i in self.integers))
        at = {name: position for position, name in enumerate(names)}
        taken = tuple(at[n] for n in self.partition.backward_primals)
        object.__setattr__(self, "backward_takes", taken)
        tensors = tuple(i for i in taken if i < len(self.placeholders))
        object.__setattr__(self, "backward_tensors", tensors)

    def integer_values(
        self, dims: Mapping[sympy.Symbol, int], rank: int
    ) -> tuple[tuple[int, ...], tuple[sympy.Basic, ...]]:
        """Returns the integers for one call, and the guards that do not hold for them."""
        values = tuple(i.value(dims, self.sp, rank) for i in self.integers)
        sizes = {i.symbol: v for i, v in zip(self.integers, values, strict=True)}
        broken = broken_guards(self.guards, sizes)
        return values, broken

    @property
    def draws(self) -> bool:
        """Whether the model draws random numbers: then each call needs a seed of its own."""
        return any(i.role == "seed" for i in self.integers)

    def __call__(
        self, tensors: Sequence[Tensor], integers: tuple[int, ...], seed: int = 0
    ) -> Tensor:
        """Returns the loss, or what the program returns first; arguments as of `outputs`."""
        return self.outputs(tensors, integers, seed)[0]

    def outputs(
        self, tensors: Sequence[Tensor], integers: tuple[int, ...], seed: int = 0
    ) -> tuple[Tensor, ...]:
        """Returns what the program returns, the loss first.

        Args:
            tensors: parameters, buffers and inputs, in the order of `placeholders`.
            integers: from `integer_values`.
            seed: of the call's random numbers, the same on every rank of the group.
        """
        if self.draws:
            integers = (*integers[:-1], seed)
        return self.run([resolved(t) for t in tensors], integers)

    def run(
        self, tensors: Sequence[Tensor], integers: tuple[int, ...], strides: Strides | None = None
    ) -> tuple[Tensor, ...]:
        """Returns what the program returns, as `outputs`, of tensors that are resolved.

        Args:
            tensors: as of `outputs`.
            integers: the seed among them.
            strides: how results have to lie in memory; None: any way.
        """
        if not torch.is_grad_enabled():
            found = self.run_forward([*(t.data for t in tensors), *integers])
            return _lying(tuple(found[: self.partition.returned]), strides)
        return _RunVariant.apply(self, integers, strides, *tensors)  # type: ignore[no-any-return, no-untyped-call]


def _lying(outputs: tuple[Tensor, ...], strides: Strides | None) -> tuple[Tensor, ...]:
    if strides is None:
        return outputs
    return tuple(_laid(x, wanted) for x, wanted in zip(outputs, strides, strict=True))


def _laid(tensor: Tensor, strides: tuple[int, ...] | None) -> Tensor:
    """Returns a tensor that lies in memory by some strides, if these fill it."""
    if strides is None or tensor.stride() == strides or tensor.numel() == 0:
        return tensor
    dims = [d for d, size in enumerate(tensor.shape) if size > 1]
    if all(tensor.stride(d) == strides[d] for d in dims):
        return tensor
    order = sorted(range(tensor.ndim), key=lambda d: -strides[d])
    if order == [*range(tensor.ndim)]:
        return tensor.contiguous()
    back = [order.index(d) for d in range(tensor.ndim)]
    made = tensor.permute(order).contiguous().permute(back)
    return made if all(made.stride(d) == strides[d] for d in dims) else tensor


def resolved(tensor: Tensor) -> Tensor:
    """Returns a tensor whose memory holds its values: the graphs look at no conj or neg bit."""
    if not tensor.is_conj() and not tensor.is_neg():
        return tensor
    if 0 in tensor.stride():
        raise CodegenError(
            f"a tensor of the model is an expanded conjugate or negative view, {tensor.shape}; "
            "expected one whose memory holds its values; register resolve_conj() or resolve_neg() "
            "of it"
        )
    return tensor.new_empty_strided(tensor.shape, tensor.stride()).copy_(tensor)


def broken_guards(
    guards: Sequence[sympy.Basic], sizes: Mapping[sympy.Symbol, int]
) -> tuple[sympy.Basic, ...]:
    """Returns the guards that do not hold at some sizes.

    Sizes 0 and 1 break torch's assumption that a symbol is at least 2 without making the graph
    wrong, so a guard that does not hold is looked at again with these raised to 2. An equation is
    not: the graph has one of its sides in the other's place, or a number.
    """
    raised = {symbol: max(v, 2) for symbol, v in sizes.items()}
    return tuple(g for g in guards if not _holds(g, sizes, raised))


def _holds(
    guard: sympy.Basic, sizes: Mapping[sympy.Symbol, int], raised: Mapping[sympy.Symbol, int]
) -> bool:
    if isinstance(guard, sympy.And):
        return all(_holds(part, sizes, raised) for part in guard.args)
    found = _at(guard, sizes)
    if found == sympy.true:
        return True
    if isinstance(guard, sympy.Eq):
        # Of no element strides say nothing, and torch writes Max(1, size) for them.
        # One that divides by 0 says nothing of these sizes: the graph may be another's.
        return found is not None and _at(of_some(guard), sizes) != sympy.false
    return bool(_at(guard, raised) != sympy.false)


def _at(guard: sympy.Basic, sizes: Mapping[sympy.Symbol, int]) -> sympy.Basic | None:
    """Returns a guard at some sizes, None where it divides by 0."""
    try:
        found = guard.subs(sizes)
    except (TypeError, ZeroDivisionError):
        return None
    return None if found.has(sympy.nan, sympy.zoo) else found


class _RunVariant(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        variant: Variant,
        integers: tuple[int, ...],
        strides: Strides | None,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        partition = variant.partition
        arguments = [*tensors, *integers]
        ctx.variant = variant
        ctx.count = len(tensors)
        ctx.deliver = deliver = _deliver.get()
        ctx.own = {} if deliver is None else _deliverable(variant, tensors)
        # Its memory as it is now: `p.data = other` gives the parameter itself another. A tenth of
        # what detach() takes, but it does not count how often the tensor itself is written to.
        taken = [arguments[i] for i in variant.backward_takes]
        primals = [x.data if isinstance(x, Tensor) else x for x in taken]
        found = variant.run_forward(arguments)
        outputs, saved = tuple(found[: partition.returned]), [*found[partition.returned :]]
        # What is returned will hold this context: the context holds another tensor of its memory.
        returned = {id(x) for x in outputs}
        saved = [_detached(x) if id(x) in returned else x for x in saved]
        outputs = _lying(outputs, strides)
        if len(partition.begins) < len(outputs):
            learned = {id(outputs[i]) for i in partition.begins}
            ctx.mark_non_differentiable(*(x for x in outputs if id(x) not in learned))
        ctx.set_materialize_grads(False)  # zeros for logits that take no gradient
        begins = [(i, x.shape, x.dtype, x.device) for i in partition.begins for x in (outputs[i],)]
        watched = saved + [tensors[i] for i in variant.backward_tensors]
        names = tuple(variant.placeholders[i] for i in variant.backward_tensors)
        ctx.call = VariantCall(variant.sp, names, begins, saved + primals, watched)
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise CodegenError(
                "backward of a compiled loss: got create_graph=True; expected False: compiled "
                "gradients have no graph of their own, so what is made of them would train "
                "nothing; compute that loss with the plain model (compiled.model), or with "
                "torch.autograd.grad(..., create_graph=True) inside forward"
            )
        call: VariantCall = ctx.call
        keeps = torch._C._autograd._get_current_graph_task_keep_graph()  # retain_graph=True
        arguments = call.arguments([gradients[i] for i, *_ in call.begins], keeps=keeps)
        with call.without_casts():
            found = _gradients(ctx.variant, arguments, ctx.deliver, ctx.own)
        result: list[Any] = [None] * (ctx.count + 3)
        for position, gradient in zip(ctx.variant.trainable, found, strict=True):
            result[position + 3] = gradient
        return tuple(result)


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _deliverable(variant: Variant, tensors: Sequence[Tensor]) -> dict[int, torch.nn.Parameter]:
    """Returns number of a gradient -> its parameter, where nobody but us waits for it."""
    read = [id(t) for t in tensors]
    own = {}
    for number, position in enumerate(variant.trainable):
        t = tensors[position]
        hooked = bool(t._backward_hooks) or bool(getattr(t, "_post_accumulate_grad_hooks", None))
        alone = not hooked and read.count(id(t)) == 1
        # One that was frozen since it was compiled gets no gradient.
        if isinstance(t, torch.nn.Parameter) and t.requires_grad and alone:
            own[number] = t
    return own


def _gradients(
    variant: Variant,
    arguments: list[Any],
    deliver: Deliver | None,
    own: Mapping[int, torch.nn.Parameter],
) -> Sequence[Tensor | None]:
    """Runs backward; returns the gradients that were not handed over."""
    if deliver is None:
        return variant.run_backward(arguments)  # type: ignore[no-any-return]

    def hand_over(number: int, gradient: Tensor) -> Tensor | None:
        if number not in own:
            return gradient
        deliver(own[number], gradient)
        return None

    if variant.run_handing_over is not None:
        arguments.append(hand_over)  # the same list: it is emptied as its values are used up
        return variant.run_handing_over(arguments)  # type: ignore[no-any-return]
    found = list(variant.run_backward(arguments))
    for number in reversed(range(len(found))):  # last ones first, as they are sent
        gradient, found[number] = found[number], None
        found[number] = None if gradient is None else hand_over(number, gradient)
    return found
