"""Torch ops of a model's own autograd functions: one call in a graph, differentiated by the model.

    Gelu.apply(x, bias, 3)         in forward      ─►  dcpc_function::Gelu_1a2b3c(x, bias)
    dcpc_function::Gelu_1a2b3c     where it runs   ─►  Gelu.apply(x, bias, 3)

The op is a name for passes that look at forward alone. It has no kernel of its own: a joint graph
is traced through it and has the calls of the function's forward and backward in its place.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._pytree import TreeSpec, tree_unflatten

NAMESPACE = "dcpc_function"
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
_TYPES = {Tensor: "Tensor", torch.SymInt: "SymInt", torch.SymFloat: "Scalar", torch.SymBool: "bool"}
_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device)


@dataclass(frozen=True)
class OwnFunction:
    """A call of an autograd function, but for its tensors and sizes.

    Attributes:
        cls: autograd function.
        leaves: arguments in order; in place of a tensor or size its type's name in a schema.
        operands: which of `leaves` are tensors and sizes.
        tree: structure of the arguments.
        results: which items of the function's result are tensors.
        casts: device type and dtype of the autocast around the call; None: no autocast.
        within: context in which forward and backward are traced.
    """

    cls: type
    leaves: tuple[Any, ...]
    operands: tuple[int, ...]
    tree: TreeSpec
    results: tuple[int, ...]
    casts: tuple[str, torch.dtype] | None
    within: Callable[[], AbstractContextManager[object]]

    def run(self, given: Sequence[Any]) -> Any:
        """Returns the function's own result for these tensors and sizes."""
        leaves = list(self.leaves)
        for i, value in zip(self.operands, given, strict=True):
            leaves[i] = value
        args = tree_unflatten(leaves, self.tree)
        if self.casts is None:
            return self.cls.apply(*args)  # type: ignore[attr-defined]
        with torch.autocast(*self.casts, cache_enabled=False):
            return self.cls.apply(*args)  # type: ignore[attr-defined]

    def is_like(self, other: OwnFunction) -> bool:
        """Returns whether another call differs in its tensors and sizes alone."""
        rest = (self.cls, self.operands, self.tree, self.results, self.casts)
        theirs = (other.cls, other.operands, other.tree, other.results, other.casts)
        pairs = zip(self.leaves, other.leaves, strict=True)
        return rest == theirs and all(a is b or _text(a) == _text(b) != "" for a, b in pairs)

    @property
    def name(self) -> str:
        """A name that is equal in all processes of a job."""
        facts = [self.cls.__module__, self.operands, self.results, self.casts]
        text = repr([*facts, str(self.tree), *map(_text, self.leaves)])
        plain = re.sub(r"\W+", "_", self.cls.__qualname__.rpartition("<locals>.")[2])
        return f"{plain}_{hashlib.sha256(text.encode()).hexdigest()[:6]}"


_WITHIN: dict[object, Callable[[], AbstractContextManager[object]]] = {}  # by op
_KNOWN: dict[str, list[tuple[OwnFunction, OpOverload]]] = {}  # by name


def op_of(function: OwnFunction) -> OpOverload:
    """Returns the op of a call, always the same one for calls that are alike.

    Its arguments are the call's tensors and sizes, its results the tensors of the function's
    result. With `group`, the name of a group of `ranks` ranks that all make the call, its backward
    is for the sum of the ranks' gradients, and each rank gets an equal share of what that gives.
    """
    alike = _KNOWN.setdefault(function.name, [])
    for other, known in alike:
        if function.is_like(other):
            return known
    name = f"{function.name}_{len(alike)}" if alike else function.name
    given = "".join(f"{function.leaves[i]} a{i}, " for i in function.operands)
    results = ", ".join("Tensor" for _ in function.results)
    made = results if len(function.results) == 1 else f"({results})"
    _LIBRARY.define(f'{name}({given}*, str group="", int ranks=1) -> {made}')
    op: OpOverload = getattr(torch.ops.dcpc_function, name).default

    def run(*operands: Any, group: str = "", ranks: int = 1) -> Any:
        if group:
            each = ((x, isinstance(x, Tensor)) for x in operands)
            operands = tuple(_over_ranks(x, "", ranks) if is_one else x for x, is_one in each)
        found = function.run(operands)
        items = found if isinstance(found, tuple) else (found,)
        tensors = [items[i] for i in function.results]
        tensors = [_over_ranks(y, group, 1) if group else y for y in tensors]
        return tensors[0] if len(tensors) == 1 else tuple(tensors)

    def run_or_keep(*operands: Any, **group: Any) -> Any:
        if not any(isinstance(x, FunctionalTensor) for x in operands):
            return run(*operands, **group)
        with torch._C._AutoDispatchBelowAutograd():  # torch copies a graph that has the op
            return op(*operands, **group)

    _LIBRARY.impl(name, run_or_keep, "Autograd")
    _LIBRARY.impl(name, run, "CPU")
    _LIBRARY.impl(name, run, "CUDA")
    torch.library.register_fake(f"{NAMESPACE}::{name}", run, lib=_LIBRARY)
    alike.append((function, op))
    _WITHIN[op] = function.within
    return op


def schema_type(leaf: Any) -> str:
    """Returns the type of an op's argument that is a tensor or a size, "" for other values."""
    return next((name for kind, name in _TYPES.items() if isinstance(leaf, kind)), "")


def inside(op: object) -> AbstractContextManager[object]:
    """Returns the context in which an op is traced, forward and backward; of most ops none."""
    return _WITHIN[op]() if op in _WITHIN else nullcontext()


def is_function(op: object) -> bool:
    """Returns whether an op stands for an autograd function."""
    return isinstance(op, OpOverload) and op.namespace == NAMESPACE


def _text(leaf: Any) -> str:
    """Returns a text that is equal for equal values of plain types, "" for other values."""
    return f"{type(leaf).__name__} {leaf!r}" if isinstance(leaf, _PLAIN) else ""


class _OverRanks(torch.autograd.Function):
    """Passes a tensor on; its gradient is the sum over a group, or one of `ranks` equal shares."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str, ranks: int) -> Tensor:
        ctx.group, ctx.ranks = group, ranks
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (g,) = gradients
        summed = torch.ops.dcpc.all_reduce(g.contiguous(), ctx.group) if ctx.group else g
        return summed / ctx.ranks, None, None


_over_ranks: Any = _OverRanks.apply
