"""A variant: the graphs that one rank runs for the buckets of a plan, as a differentiable call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch
from torch import Tensor

from dcpc.codegen.away.away_ops import forward_alone
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
    """Passes each gradient to `deliver` once it is final, for variants called within its block.

    The `grad` of such a parameter is left alone. Still added to `grad` are the gradients of a
    parameter with hooks, which autograd has to call, and of one that the variant reads under two
    names, whose gradient is the sum of both.
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
        partition: graphs of forward and backward.
        integers: integer inputs of the graphs, after the tensors.
        placeholders: names of the forward's tensor placeholders, in order.
        trainable: indices into `placeholders` of the tensors that get a gradient.
        sp: number of ranks in the SP group.
        guards: relations between sizes under which this variant is right.
        run_forward: boxed forward.
        run_backward: boxed backward.
        run_handing_over: boxed backward that calls its last argument with (number, gradient) as
            soon as each gradient is made, and returns the call's result instead; None if the
            backend runs all of backward as one call.
        backend: name of the backend that compiled them.
        backward_takes: indices, among tensors and integers, of the arguments that backward takes.
        backward_tensors: indices of the tensors among them.
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
        """Computes the positions that each call needs."""
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
        """Whether the model draws random numbers, so that each call needs its own seed."""
        return any(i.role == "seed" for i in self.integers)

    def __call__(
        self, tensors: Sequence[Tensor], integers: tuple[int, ...], seed: int = 0
    ) -> Tensor:
        """Returns the first output, the loss; arguments as for `outputs`."""
        return self.outputs(tensors, integers, seed)[0]

    def outputs(
        self, tensors: Sequence[Tensor], integers: tuple[int, ...], seed: int = 0
    ) -> tuple[Tensor, ...]:
        """Returns the program's outputs, the loss first.

        Args:
            tensors: parameters, buffers and inputs, in the order of `placeholders`.
            integers: integers from `integer_values`.
            seed: seed of the call's random numbers, the same on every rank of the group.
        """
        if self.draws:
            integers = (*integers[:-1], seed)
        if any(map(Tensor.is_conj, tensors)) or any(map(Tensor.is_neg, tensors)):
            tensors = [resolved(t) for t in tensors]
        return self.run(tensors, integers)

    def run(
        self, tensors: Sequence[Tensor], integers: tuple[int, ...], strides: Strides | None = None
    ) -> tuple[Tensor, ...]:
        """Returns the program's outputs, from tensors without conj or neg bits."""
        if not torch.is_grad_enabled():
            with forward_alone():
                found = self.run_forward([*(t.data for t in tensors), *integers])
            return _lying(tuple(found[: self.partition.returned]), strides)
        deliver = _deliver.get()
        own = {} if deliver is None else _deliverable(self, tensors)
        alone = bool(own) and len(own) == sum(t.requires_grad for t in tensors)
        handed = _Delivery(deliver, own, alone, tensors)
        # Autograd would go through every parameter, and add up no gradient.
        seen = (_NOTHING,) if alone else tensors
        return _RunVariant.apply(self, integers, strides, handed, *seen)  # type: ignore[no-any-return, no-untyped-call]


def _lying(outputs: tuple[Tensor, ...], strides: Strides | None) -> tuple[Tensor, ...]:
    if strides is None:
        return outputs
    return tuple(_laid(x, wanted) for x, wanted in zip(outputs, strides, strict=True))


def _laid(tensor: Tensor, strides: tuple[int, ...] | None) -> Tensor:
    """Returns a tensor copied to the given strides if they are dense; else as it is."""
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
    """Returns a tensor without conj or neg bits, as the graphs ignore them."""
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

    Sizes 0 and 1 contradict torch's assumption that a symbol is at least 2, but the graph stays
    right, so a guard that fails is tested again with these sizes raised to 2. An equation is not:
    the graph contains one of its sides in place of the other, or a number.
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
    if found is None and _at(guard, {s: v for s, v in sizes.items() if v}) == sympy.true:
        return True  # it divides by 0, and holds whatever the empty sizes are
    if isinstance(guard, sympy.Eq):
        # Of no element strides say nothing, and torch writes Max(1, size) for them.
        # One that divides by 0 says nothing of these sizes: the graph may be another's.
        return found is not None and _at(of_some(guard), sizes) != sympy.false
    return bool(_at(guard, raised) != sympy.false)


def _at(guard: sympy.Basic, sizes: Mapping[sympy.Symbol, int]) -> sympy.Basic | None:
    """Returns a guard at some sizes, or None if it divides by 0."""
    try:
        found = guard.subs(sizes)
    except (TypeError, ZeroDivisionError):
        return None
    return None if found.has(sympy.nan, sympy.zoo) else found


@dataclass(frozen=True, slots=True)
class _Delivery:
    """The tensors of a call, and what takes the gradients that autograd does not add up.

    Attributes:
        deliver: function called with a parameter and its gradient; None: autograd adds up all.
        own: index of a gradient -> its parameter, of those that `deliver` takes.
        alone: whether these are all gradients. Nobody sees such a call, so nobody writes to what it
            saves before its backward.
        tensors: tensors of the call.
    """

    deliver: Deliver | None
    own: Mapping[int, torch.nn.Parameter]
    alone: bool
    tensors: Sequence[Tensor]


_NOTHING = torch.empty(0, requires_grad=True)  # begins a graph whose gradients are all delivered


class _RunVariant(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        variant: Variant,
        integers: tuple[int, ...],
        strides: Strides | None,
        handed: _Delivery,
        *given: Tensor,
    ) -> tuple[Tensor, ...]:
        partition, tensors = variant.partition, handed.tensors
        arguments = [*tensors, *integers]
        ctx.variant = variant
        ctx.count, ctx.handed = 4 + len(given), replace(handed, tensors=())
        # `.data` keeps the present memory, as `p.data = other` replaces it in the parameter. It
        # takes a tenth of detach()'s time, but does not share the parameter's version counter.
        taken = [arguments[i] for i in variant.backward_takes]
        primals = [x.data if isinstance(x, Tensor) else x for x in taken]
        found = variant.run_forward(arguments)
        outputs, saved = tuple(found[: partition.returned]), [*found[partition.returned :]]
        # An output holds this context, so the context holds a detached tensor: no reference cycle.
        returned = {id(x) for x in outputs}
        saved = [_detached(x) if id(x) in returned else x for x in saved]
        outputs = _lying(outputs, strides)
        if len(partition.begins) < len(outputs):
            learned = {id(outputs[i]) for i in partition.begins}
            ctx.mark_non_differentiable(*(x for x in outputs if id(x) not in learned))
        ctx.set_materialize_grads(False)  # zeros for logits that take no gradient
        begins = [(i, x.shape, x.dtype, x.device) for i in partition.begins for x in (outputs[i],)]
        watched = [*saved, *(tensors[i] for i in variant.backward_tensors)]
        names = tuple(variant.placeholders[i] for i in variant.backward_tensors)
        kept = saved + primals
        ctx.call = VariantCall(variant.sp, names, begins, kept, [] if handed.alone else watched)
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
            found = _gradients(ctx.variant, arguments, ctx.handed)
        result: list[Any] = [None] * ctx.count
        if not ctx.handed.alone:
            for position, gradient in zip(ctx.variant.trainable, found, strict=True):
                result[position + 4] = gradient
        return tuple(result)


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _deliverable(variant: Variant, tensors: Sequence[Tensor]) -> dict[int, torch.nn.Parameter]:
    """Returns index of a gradient -> its parameter, if only dcpc needs that gradient."""
    read, own = Counter(map(id, tensors)), {}
    for number, position in enumerate(variant.trainable):
        t = tensors[position]
        hooked = bool(t._backward_hooks) or bool(getattr(t, "_post_accumulate_grad_hooks", None))
        alone = not hooked and read[id(t)] == 1
        # One that was frozen since it was compiled gets no gradient.
        if isinstance(t, torch.nn.Parameter) and t.requires_grad and alone:
            own[number] = t
    return own


def _gradients(
    variant: Variant, arguments: list[Any], handed: _Delivery
) -> Sequence[Tensor | None]:
    """Runs backward, and returns the gradients that were not passed to `deliver`."""
    deliver, own = handed.deliver, handed.own
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
