"""Tracks the storage of each tensor in a trace, the Ref that has its current value, and its layout.

torch's composite ops write to tensors that they made themselves. After such a write a new tensor
holds that storage's content, and the old views are stale: they are made again when they are read
(`writes.py`). The new tensor's layout in the graph may then differ from the one torch sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.node import map_aggregate
from torch.utils._pytree import tree_leaves

from dcpc.codegen.joint.asking import again
from dcpc.codegen.joint.layouts import as_laid
from dcpc.errors import CodegenError
from dcpc.fx.fakes import dense_result, layout_of
from dcpc.fx.writes import View

aten = torch.ops.aten


class Ref(int):
    """A tensor of a piece: operands first, then results in the order in which they are made."""


@dataclass(slots=True)
class TensorMemory:
    """One storage, with all views of it.

    Attributes:
        root: first tensor in the storage.
        first: first Ref in the storage; a write replaces it.
        views: calls that made the views, in order.
        part: 0 for operands, n for tensors made before the ops were taken the n-th time.
    """

    root: Tensor
    first: Ref
    views: list[View]
    part: int


class Memories:
    """The tensors of one trace.

    Attributes:
        of: id of a tensor -> its storage.
        made_by: id of a view -> the call that made it.
        stale: id of a view whose storage was written to since -> the call that made it.
    """

    def __init__(self) -> None:
        self.of: dict[int, TensorMemory] = {}
        self.made_by: dict[int, View] = {}
        self.stale: dict[int, View] = {}
        self._count = 0
        self._refs: dict[int, Ref] = {}
        self._kept: list[Tensor] = []  # as long as these live, so do their ids
        self._storages: set[int] = set()
        self._real: dict[int, Tensor] = {}  # id -> value in the graph's layout

    def ref(self, tensor: Tensor) -> Ref:
        """Returns the Ref that has a tensor's current value."""
        return self._refs[id(tensor)]

    def refs(self, value: Any) -> Any:
        """Returns a tree with its tensors replaced by Refs."""
        return map_aggregate(value, lambda x: self.ref(x) if isinstance(x, Tensor) else x)

    def root(self, like: Tensor, mode: FakeTensorMode) -> Tensor:
        """Returns an operand for the trace: a tensor like another, in a storage that is new."""
        own = again(like, mode)
        self._storages.add(own.untyped_storage()._cdata)
        self._enter(own, None, part=0)
        return own

    def result(self, tensor: Tensor, view: View, part: int) -> tuple[Ref, Ref]:
        """Gives a call's result a new Ref; returns it and the first Ref in its storage."""
        return self._enter(tensor, self._memory_of(tensor, view), part)

    def _enter(self, tensor: Tensor, memory: TensorMemory | None, part: int) -> tuple[Ref, Ref]:
        """Gives a tensor a new Ref; returns it and the first Ref in its storage.

        Tensors with conj or neg bits are refused, as `layout_of` does not contain these bits.
        """
        if tensor.is_conj() or tensor.is_neg():
            raise CodegenError(
                f"a call of the model makes a conjugate or negative view of {tuple(tensor.shape)}; "
                "expected calls that make values; replace it by conj_physical or neg in the "
                "model's code"
            )
        ref = Ref(self._count)
        self._count += 1
        self._refs[id(tensor)] = ref
        self._kept.append(tensor)
        self.of[id(tensor)] = memory = memory or TensorMemory(tensor, ref, [], part)
        return ref, memory.first

    def _memory_of(self, tensor: Tensor, view: View) -> TensorMemory | None:
        """Returns the storage of a call's result, or None if it is new."""
        if id(tensor) in self.of:  # of a view that is made again
            self.stale.pop(id(tensor), None)
            return self.of[id(tensor)]
        storage = tensor.untyped_storage()._cdata
        if storage not in self._storages:
            self._storages.add(storage)
            return None
        operands = [t for t in tensors_in((view.args, view.kwargs)) if id(t) in self.of]
        for other in (*operands, *view.results):
            if id(other) in self.of and other.untyped_storage()._cdata == storage:
                memory = self.of[id(other)]
                break
        if any(other is t for t in operands):
            self.made_by[id(tensor)] = view
            memory.views.append(view)
        return memory

    def set_apart(self, tensor: Tensor) -> None:
        """Makes a view a tensor of its own, which no write to another changes."""
        view = self.made_by.pop(id(tensor), None)
        if view is not None:
            memory = self.of[id(tensor)]
            memory.views = [v for v in memory.views if v is not view]
            self.of[id(tensor)] = TensorMemory(tensor, memory.first, [], memory.part)

    def as_it_lies(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Returns a call's result with its layout in the graph, or None if torch's is right."""
        if not self._real or not any(id(t) in self._real for t in tensors_in((args, kwargs))):
            return None
        if func in (aten.as_strided.default, aten.as_strided_scatter.default):
            raise CodegenError(
                f"{func} reads memory that was written to and lies otherwise since; replace the "
                "call that it is part of in the model's code"
            )
        args, kwargs = map_aggregate((args, kwargs), lambda x: self._real.get(id(x), x))
        return run(func, args, kwargs)

    def note_layouts(self, seen: Sequence[Tensor], real: Sequence[Tensor]) -> None:
        """Records the layouts that tensors have in the graph."""
        for tensor, value in zip(seen, real, strict=True):
            self._real.pop(id(tensor), None)
            if layout_of(tensor) != layout_of(value):
                self._real[id(tensor)] = value

    def replace(self, root: Tensor, value: Tensor) -> None:
        """Replaces the first tensor in a storage by another; all its views become stale."""
        memory = self.of[id(root)]
        assert memory.root is root, "a tensor is a view of an operand or the first in its memory"
        self._refs[id(root)] = self._refs[id(value)]
        memory.first = self.of[id(value)].first
        self.note_layouts([root], [self._real.get(id(value), value)])
        self.stale |= {id(t): view for view in memory.views for t in view.results}


def tensors_in(value: Any) -> list[Tensor]:
    """Returns the tensors in a tree of values."""
    return [t for t in tree_leaves(value) if isinstance(t, Tensor)]


def run(func: Any, args: Any, kwargs: Any) -> Any:
    """Returns the result of a call on fake tensors, laid out as by the device's kernel."""
    known = dense_result(func, args, kwargs)
    return as_laid(func, args, func(*args, **kwargs)) if known is None else known
