"""Traces and differentiates one call of a lowered graph into ATen calls.

Equal calls (op, arguments, shapes, strides) give equal pieces, so a call is traced once however
many blocks of a model, or placements of it, contain it. Sizes stay symbolic: a piece refers to them
by the SymInts of one ShapeEnv. Torch's questions about sizes are recorded with the piece: the same
call with other symbols has the same piece, renamed, where the answers are the same (`library.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx.node import map_aggregate
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    autograd_would_have_decomposed,
)
from torch.utils._pytree import tree_leaves

from dcpc.codegen.joint.asking import Answers, asking
from dcpc.codegen.joint.memories import Memories, Ref, run, tensors_in
from dcpc.errors import CodegenError
from dcpc.fx.gpu_ops import as_on_gpu, stays_whole
from dcpc.fx.writes import (
    APART,
    PLAIN,
    View,
    as_copied,
    by_position,
    functional_of,
    is_scattered,
    whole,
    without_results,
    written,
)
from dcpc.ops.own_functions import inside

aten = torch.ops.aten

# Calls that read a tensor's facts and return no tensor.
_QUESTIONS = {
    torch.ops.prim.device.default, aten.size.default, aten.stride.default,
    aten.storage_offset.default, aten.sym_size.default, aten.sym_stride.default,
    aten.sym_numel.default, aten.sym_storage_offset.default, aten.is_contiguous.default,
    aten.dim.default,
}  # fmt: skip
# Calls whose second argument is the result's shape, in which -1 means the remaining size.
_SIZED = {aten.view.default, aten._unsafe_view.default, aten.reshape.default}


@dataclass(frozen=True, slots=True)
class Op:
    """One ATen call.

    Attributes:
        target: op that is called.
        args: arguments: tensors as `Ref`s, sizes as SymInts.
        kwargs: keyword arguments, likewise.
        value: result on fake tensors.
        made: Refs of the tensors in `value`, in order; a tensor that the call wrote to has a new
            Ref.
        storages: storage of each tensor in `made`: the Ref of an operand, or of the first result in
            it.
    """

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    value: Any
    made: tuple[Ref, ...]
    storages: tuple[Ref, ...]


@dataclass(frozen=True, slots=True)
class Derivative:
    """The backward of a call for one pattern of gradients.

    Attributes:
        tangents: Refs of the results' gradients that it reads.
        sums: Refs of the operands' gradients so far that it reads.
        ops: ops of the backward.
        gradients: Ref of each operand's gradient, added to the one so far; None where none flows.
        asked: torch's questions about sizes, and the answers.
    """

    tangents: tuple[Ref, ...]
    sums: tuple[Ref, ...]
    ops: tuple[Op, ...]
    gradients: tuple[Ref | None, ...]
    asked: Answers


class Piece:
    """A call traced on fake tensors: forward at once, derivatives on demand.

    Args:
        mode: fake mode, whose ShapeEnv records questions.
        table: op -> decomposition.
        call: op to trace.
        args: arguments: fake tensors, SymInts and constants.
        kwargs: keyword arguments, likewise.
        wants: for each tensor argument, in order, whether it has a gradient.
        gpu: whether the call is traced as on a GPU, see `gpu_ops`.

    Attributes:
        call: op of the call.
        ops: ops of forward.
        result: result of the call, with Refs for tensors.
        flows: Refs of the results through which gradients flow.
        asked: torch's questions about sizes in forward, and the answers.
    """

    def __init__(
        self,
        mode: FakeTensorMode,
        table: Mapping[Any, Any],
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        wants: Sequence[bool],
        gpu: bool = False,
    ) -> None:
        self._mode, self.call, self._gpu = mode, call, gpu
        self._tape = _Tape(table)
        self._memories = self._tape.memories
        wanted = iter(wants)
        self._leaves: list[Tensor] = []

        def operand(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            own = self._memories.root(leaf, mode).requires_grad_(next(wanted))
            if own.requires_grad:
                self._leaves.append(own)
            return own

        with asking(mode).noting() as self.asked:
            args, kwargs = map_aggregate((args, dict(kwargs)), operand)
            with mode, enable_python_dispatcher(), torch.enable_grad(), self._traced():
                self._value = call(*args, **kwargs)
        self.ops = self._tape.taken()
        self.result = self._memories.refs(self._value)
        made = tensors_in(self._value)
        self.flows = tuple(self._memories.ref(t) for t in made if t.requires_grad)
        self._derivatives: dict[Any, Derivative] = {}

    @contextmanager
    def _traced(self) -> Iterator[None]:
        with as_on_gpu(self._gpu), self._tape, inside(self.call):
            yield

    def derivative(
        self, key: Any, tangents: Mapping[Ref, Tensor], sums: Mapping[int, Tensor]
    ) -> Derivative:
        """Returns the backward for gradients of some results.

        It takes the operands' gradients so far, as autograd's engine adds the gradients of a value
        in the order in which they arrive, and another order gives other bits.

        Args:
            key: key that is equal for equal shapes and strides of tangents and sums.
            tangents: result -> a fake tensor like its gradient.
            sums: index of an operand that needs a gradient -> a fake tensor like its gradient so
                far.
        """
        if key not in self._derivatives:
            self._derivatives[key] = self._differentiate(tangents, sums)
        return self._derivatives[key]

    def _differentiate(
        self, tangents: Mapping[Ref, Tensor], sums: Mapping[int, Tensor]
    ) -> Derivative:
        results = {self._memories.ref(t): t for t in tensors_in(self._value)}
        outputs = [results[ref] for ref in tangents] + [self._leaves[i] for i in sums]
        with asking(self._mode).noting() as asked:
            given = [
                self._memories.root(t, self._mode) for t in (*tangents.values(), *sums.values())
            ]
            with self._mode, enable_python_dispatcher(), self._traced():
                found = torch.autograd.grad(
                    outputs, self._leaves, given, allow_unused=True, retain_graph=True
                )
        refs = tuple(map(self._memories.ref, given))
        return Derivative(
            tangents=refs[: len(tangents)],
            sums=refs[len(tangents) :],
            ops=self._tape.taken(),
            gradients=tuple(None if g is None else self._memories.ref(g) for g in found),
            asked=asked,
        )


class _Tape(TorchDispatchMode):
    """Dispatch mode that records the ATen calls below autograd.

    torch's composite ops write to tensors that they made themselves. Here such a call makes a new
    tensor, and later readers of that storage read the new one (`writes.py`): views are made again
    when they are read.
    """

    def __init__(self, table: Mapping[Any, Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._table = table
        self.memories = Memories()
        self._ops: list[Op] = []
        self._part, self._depth = 1, 0

    def taken(self) -> tuple[Op, ...]:
        """Returns the calls recorded since the last time."""
        ops, self._ops = tuple(self._ops), []
        self._part += 1
        return ops

    def __enter__(self) -> _Tape:
        self._depth += 1
        return super().__enter__()  # type: ignore[no-any-return, no-untyped-call]

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._depth -= 1
        if self._depth == 0 and exception[0] is None:
            with torch._C._AutoDispatchBelowAutograd():
                # A call of another part may read them, and must not make them.
                while self.memories.stale:
                    self._renew(next(iter(self.memories.stale.values())))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _QUESTIONS:
            return func(*args, **kwargs)
        result = self._dispatched(func, args, kwargs)
        if func in APART:
            for tensor in tensors_in(result):
                self.memories.set_apart(tensor)
        return result

    def _dispatched(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        if func is aten.lift_fresh.default and _is_number(x := args[0]):  # of `torch.tensor(2.0)`
            with _disable_current_modes():
                value = x.item()
            with self:
                return aten.scalar_tensor.default(value, dtype=x.dtype, device=x.device)
        if func in PLAIN:
            with self:
                return PLAIN[func](*args)
        if func in self._table:
            with self:
                result = self._table[func](*args, **kwargs)
            if result is not NotImplemented:
                return result
        flat = tree_leaves((args, kwargs))
        if not stays_whole(func) and autograd_would_have_decomposed(func, flat):
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if func._schema.is_mutable:
            return self._write(func, args, kwargs)
        return self._call(func, args, kwargs)

    def _call(self, func: Any, args: Any, kwargs: Any, renewed: View | None = None) -> Any:
        """Records a call and returns its result; with `renewed`, makes a view's results again."""
        seen_args, seen_kwargs = map_aggregate((args, kwargs), lambda x: self._argument(x, func))
        result = run(func, args, kwargs)
        seen_args = _without_guess(func, seen_args, result)
        value = self.memories.as_it_lies(func, args, kwargs)
        value = result if value is None else value
        results = renewed.results if renewed else tuple(tensors_in(result))
        view = View(func, args, kwargs, results)
        made = [self.memories.result(t, view, self._part) for t in results]
        if value is not result or renewed:
            self.memories.note_layouts(results, tensors_in(value))
        refs, storages = tuple(zip(*made, strict=True)) if made else ((), ())
        self._ops.append(Op(func, seen_args, seen_kwargs, value, refs, storages))
        return result

    def _renew(self, view: View) -> None:
        self._call(view.func, view.args, view.kwargs, view)

    # -------------------------------------------------------------------------------------- writes

    def _write(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Records the functional form of a call that writes."""
        functional, targets = functional_of(func), written(func, args, kwargs)
        for target in targets:
            self._refuse_others(func, target)
        with self:
            view = self.memories.made_by.get(id(targets[0]))
            if func is aten.copy_.default and is_scattered(view):
                values = [as_copied(targets[0], args[1])]
            else:
                given = by_position(func, args, kwargs)
                values = tensors_in(functional(*given, **without_results(func, kwargs)))
            turned = torch.Tag.inplace_view in func.tags
            for target, value in zip(targets, values, strict=True):
                if turned:
                    self.memories.set_apart(value)  # it is the tensor itself from here on, no view
                self._replace(target, value)
        if turned:
            self._keep_shape(targets[0])
        return func(*args, **kwargs)

    def _keep_shape(self, target: Tensor) -> None:
        """Keeps a tensor's present shape in the calls so far, as its shape is about to change."""
        kept = aten.alias.default(target)

        def as_made(value: Any) -> Any:
            return kept if value is target else value

        self._ops = [replace(op, value=map_aggregate(op.value, as_made)) for op in self._ops]

    def _replace(self, target: Tensor, value: Tensor) -> None:
        """Replaces a tensor, its base and all views of that by a new value from here on."""
        if value.dtype != target.dtype:
            value = aten._to_copy.default(value, dtype=target.dtype)
        while id(target) in self.memories.made_by:
            view = self.memories.made_by[id(target)]
            value, target = whole(view, target, value), view.args[0]
        self.memories.replace(target, value)

    def _refuse_others(self, func: Any, target: Tensor) -> None:
        """Refuses a write to a tensor that this part of the trace did not make, or to its shape.

        Other readers of an operand, and a backward that is traced for other gradients, would miss
        it.
        """
        memory = self.memories.of.get(id(target))
        what = "a tensor that was given to it"
        if memory is not None and memory.part == self._part:
            if torch.Tag.inplace_view not in func.tags or (
                target is memory.root and not memory.views
            ):
                return
            what = "the shape of a tensor with views"
        raise CodegenError(
            f"a call of the model changes {what}: {func} on {tuple(target.shape)}; expected one "
            "that changes only what it makes; replace the call in the model's code, or give it a "
            "clone"
        )

    def _argument(self, leaf: Any, func: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) in self.memories.stale:
            self._renew(self.memories.stale[id(leaf)])
        if id(leaf) in self.memories.of:
            return self.memories.ref(leaf)
        if _is_number(leaf):
            return leaf.item()
        raise CodegenError(
            f"{func} reads a tensor of {tuple(leaf.shape)} that is no operand of its call; "
            "expected operands alone; register the constant as a buffer of the model"
        )


def _is_number(tensor: Tensor) -> bool:
    """Whether a tensor is a number that torch wrapped."""
    return tensor.ndim == 0 and not isinstance(tensor, FakeTensor)


def _without_guess(func: Any, args: Any, result: Any) -> Any:
    """Returns a view's arguments with -1 replaced by the size that it stands for.

    With a rank's empty tensor torch cannot infer that size.
    """
    if func not in _SIZED:
        return args
    tensor, sizes = args
    guessed = [isinstance(size, int) and size == -1 for size in sizes]
    made = zip(guessed, sizes, result.shape, strict=True)
    return tensor, [real if guess else size for guess, size, real in made]
