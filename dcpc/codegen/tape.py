"""One call of a lowered graph, differentiated: the ATen calls of its forward and its backward.

Equal calls (op, arguments, shapes, strides) make equal pieces, so a call is traced once however
many blocks of a model, or placements of it, make it. Sizes stay symbols; a piece refers to them by
the SymInts of one ShapeEnv. What torch asked of sizes on the way is noted with the piece: the same
call of other symbols has the same piece, in their names, where the answers are the same
(`renamed.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, autograd_would_have_decomposed
from torch.utils._pytree import tree_leaves, tree_map

from dcpc.codegen.asking import Answers, AskingEnv, again
from dcpc.codegen.dense import dense_result
from dcpc.codegen.layouts import as_laid
from dcpc.errors import CodegenError

aten = torch.ops.aten

# Calls that ask a tensor something and make none.
_QUESTIONS = {
    torch.ops.prim.device.default, aten.size.default, aten.stride.default,
    aten.storage_offset.default, aten.sym_size.default, aten.sym_stride.default,
    aten.sym_numel.default, aten.sym_storage_offset.default, aten.is_contiguous.default,
    aten.dim.default,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Ref:
    """A tensor of a piece: operands first, then results in the order in which they are made."""

    number: int


@dataclass(frozen=True, slots=True)
class Op:
    """One ATen call.

    Attributes:
        target: the op.
        args: arguments; tensors are `Ref`s, sizes SymInts.
        kwargs: the same.
        value: what it returns, on fake tensors.
        made: the Refs of the tensors in `value`, in order; a tensor that the call wrote to has a
            new Ref.
        storages: of each of them where it lies: the Ref of an operand, or of the first result in
            that memory.
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
        tangents: Refs of the results' gradients that it takes.
        sums: Refs of the operands' gradients so far that it takes.
        ops: its calls.
        gradients: of each operand that wants one: what holds it, added to what it had; None where
            nothing flows.
        asked: what torch asked of sizes, and the answers.
    """

    tangents: tuple[Ref, ...]
    sums: tuple[Ref, ...]
    ops: tuple[Op, ...]
    gradients: tuple[Ref | None, ...]
    asked: Answers


class Piece:
    """A call on fake tensors: forward at once, derivatives when they are asked for.

    Args:
        mode: of the fake tensors; its ShapeEnv notes what is asked.
        table: op -> decomposition.
        call: what to trace.
        args: its arguments; FakeTensors, SymInts and constants.
        kwargs: the same.
        wants: for each tensor of the arguments, in order, whether it has a gradient.

    Attributes:
        ops: the calls of forward.
        result: what the call returns: Refs for tensors.
        flows: Refs of the results that gradients flow through.
        asked: what torch asked of sizes in forward, and the answers.
    """

    def __init__(
        self,
        mode: FakeTensorMode,
        table: Mapping[Any, Any],
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        wants: Sequence[bool],
    ) -> None:
        self._mode = mode
        self._tape = _Tape(table)
        wanted = iter(wants)
        self._leaves: list[Tensor] = []

        def operand(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            own = self._tape.root(leaf, mode).requires_grad_(next(wanted))
            if own.requires_grad:
                self._leaves.append(own)
            return own

        env = _asking(mode)
        with env.noting() as self.asked:
            args, kwargs = tree_map(operand, (args, dict(kwargs)))
            with mode, enable_python_dispatcher(), torch.enable_grad(), self._tape:
                self._value = call(*args, **kwargs)
        self.ops = self._tape.taken()
        self.result = self._tape.refs(self._value)
        self.flows = tuple(
            self._tape.ref(t)
            for t in tree_leaves(self._value)
            if isinstance(t, Tensor) and t.requires_grad
        )
        self._derivatives: dict[Any, Derivative] = {}

    def derivative(
        self, key: Any, tangents: Mapping[Ref, Tensor], sums: Mapping[int, Tensor]
    ) -> Derivative:
        """Returns the backward for gradients of some results.

        What an operand's gradient was so far goes in, as autograd's engine adds up what flows into
        a value in the order in which it arrives, and a sum in another order has other bits.

        Args:
            key: equal for the same tangents and sums, of equal shapes and strides.
            tangents: result -> a fake tensor like its gradient.
            sums: number of an operand that wants a gradient -> a fake tensor like its gradient.
        """
        if key not in self._derivatives:
            self._derivatives[key] = self._differentiate(tangents, sums)
        return self._derivatives[key]

    def _differentiate(
        self, tangents: Mapping[Ref, Tensor], sums: Mapping[int, Tensor]
    ) -> Derivative:
        results = {self._tape.ref(t): t for t in tree_leaves(self._value) if isinstance(t, Tensor)}
        outputs = [results[ref] for ref in tangents] + [self._leaves[i] for i in sums]
        with _asking(self._mode).noting() as asked:
            given = [self._tape.root(t, self._mode) for t in (*tangents.values(), *sums.values())]
            with self._mode, enable_python_dispatcher(), self._tape:
                found = torch.autograd.grad(
                    outputs, self._leaves, given, allow_unused=True, retain_graph=True
                )
        refs = tuple(map(self._tape.ref, given))
        return Derivative(
            tangents=refs[: len(tangents)],
            sums=refs[len(tangents) :],
            ops=self._tape.taken(),
            gradients=tuple(None if g is None else self._tape.ref(g) for g in found),
            asked=asked,
        )


def _asking(mode: FakeTensorMode) -> AskingEnv:
    assert isinstance(mode.shape_env, AskingEnv), "pieces are traced in an env that notes questions"
    return mode.shape_env


class _Tape(TorchDispatchMode):
    """Writes down the ATen calls that are made below autograd."""

    def __init__(self, table: Mapping[Any, Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._table = table
        self._count = 0
        self._refs: dict[int, Ref] = {}
        self._kept: list[Tensor] = []  # as long as these live, so do their ids
        self._roots: dict[int, Ref] = {}  # a storage -> the first Ref in it
        self._given: set[int] = set()  # storages of operands
        self._ops: list[Op] = []

    def root(self, like: Tensor, mode: FakeTensorMode) -> Tensor:
        """Returns a tensor as an operand: like another, in memory that no other Ref lies in."""
        own = again(like, mode)
        self._enter(own)
        self._given.add(own.untyped_storage()._cdata)
        return own

    def ref(self, tensor: Tensor) -> Ref:
        """Returns what stands for a tensor."""
        return self._refs[id(tensor)]

    def refs(self, value: Any) -> Any:
        """Returns a tree with Refs for its tensors."""
        return tree_map(lambda x: self.ref(x) if isinstance(x, Tensor) else x, value)

    def taken(self) -> tuple[Op, ...]:
        """Returns the calls since the last time."""
        ops, self._ops = tuple(self._ops), []
        return ops

    def _enter(self, tensor: Tensor) -> tuple[Ref, Ref]:
        """Gives a tensor a new Ref; returns it, and the first one in its memory."""
        ref = Ref(self._count)
        self._count += 1
        self._refs[id(tensor)] = ref
        self._kept.append(tensor)
        return ref, self._roots.setdefault(tensor.untyped_storage()._cdata, ref)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _QUESTIONS:
            return func(*args, **kwargs)
        if func in self._table:
            with self:
                result = self._table[func](*args, **kwargs)
            if result is not NotImplemented:
                return result
        if autograd_would_have_decomposed(func, tree_leaves((args, kwargs))):
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        seen_args, seen_kwargs = tree_map(lambda x: self._argument(x, func), (args, kwargs))
        if func._schema.is_mutable:
            func, result = self._written(func, args), func(*args, **kwargs)
        else:
            known = dense_result(func, args, kwargs)
            result = as_laid(func, args, func(*args, **kwargs)) if known is None else known
        made = [self._enter(t) for t in tree_leaves(result) if isinstance(t, Tensor)]
        refs, storages = tuple(zip(*made, strict=True)) if made else ((), ())
        self._ops.append(Op(func, seen_args, seen_kwargs, result, refs, storages))
        return result

    def _written(self, func: Any, args: tuple[Any, ...]) -> Any:
        """Returns the op that makes a new tensor instead of writing to its first argument.

        torch's own composite ops (rms_norm) write to what they made themselves; a graph that is cut
        in two and partly run again must not. Whoever reads the tensor later reads the new one.
        """
        packet = getattr(aten, func._schema.name.split("::")[1].rstrip("_"), None)
        functional = getattr(packet, func._overloadname, None)
        memory = args[0].untyped_storage()._cdata
        made = self._roots.get(memory) == self._refs.get(id(args[0])) and memory not in self._given
        if functional is None or not made:
            raise CodegenError(
                f"{func} writes to its input; expected an op that returns a new tensor; replace it "
                "in the model's code"
            )
        del self._roots[memory]
        return functional

    def _argument(self, leaf: Any, func: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) in self._refs:
            return self.ref(leaf)
        if leaf.ndim == 0 and not isinstance(leaf, FakeTensor):
            return leaf.item()  # a number that torch wrapped
        raise CodegenError(
            f"{func} reads a tensor of {tuple(leaf.shape)} that is no operand of its call; "
            "expected operands alone; register the constant as a buffer of the model"
        )
