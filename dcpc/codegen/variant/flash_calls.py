"""Writes attention as calls of torch's CPU flash kernel, for Inductor.

    dcpc::attention_forward(q, k, v, None, keep, None, scale, after=0)
        ->  mask = where(keep, 0, -inf)
            _scaled_dot_product_flash_attention_for_cpu(q, k, v, causal, mask)

The op decides in Python which kernel computes it, which takes as long as the kernel does where rows
are short. The choice is known here: nothing is empty, queries start at the first key, and tensors
have strides that the kernel reads. Calls and allocations are those of `ops/attention/flash.py`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence, Set
from typing import Any

import sympy
import torch
from torch import SymInt, Tensor, fx
from torch._subclasses import FakeTensorMode

from dcpc.ops.attention import Sight, accumulated, added_dtype, kernel_name, takes

aten, prims = torch.ops.aten, torch.ops.prims
FORWARD = torch.ops.dcpc.attention_forward.default
BACKWARD = torch.ops.dcpc.attention_backward.default
FLASH = aten._scaled_dot_product_flash_attention_for_cpu.default
FLASH_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
BHSD, BSHD = (0, 1, 2, 3), (0, 2, 1, 3)  # orders of dims in memory


def spell_attention(graph: fx.Graph, mode: FakeTensorMode, present: Set[sympy.Symbol]) -> None:
    """Rewrites attention calls that one kernel computes at any sizes, in place.

    Args:
        graph: graph of small ops.
        mode: fake mode of the graph's values.
        present: symbols of sizes that are never 0: those of dims, if no rank has just a piece.
    """
    if not present:
        return
    for node in [*graph.nodes]:
        if node.target not in (FORWARD, BACKWARD):
            continue
        call = _FlashCall(node)
        if call.is_kernels(present):
            # Values that learn have their flag in the graph; torch's kernel refuses such a mask.
            with graph.inserting_before(node), mode, torch.no_grad():
                found = call.forward() if node.target is FORWARD else call.backward()
            _read_instead(node, found)


def _read_instead(node: fx.Node, results: Sequence[fx.Node]) -> None:
    """Replaces the results of a call by other nodes."""
    for item in [*node.users]:
        result = results[item.args[1]]  # type: ignore[index]
        item.replace_all_uses_with(result)
        item.graph.erase_node(item)
    node.graph.erase_node(node)


class _FlashCall:
    """A call of attention in a graph."""

    def __init__(self, node: fx.Node) -> None:
        given: list[Any] = list(node.args)
        self._graph = node.graph
        self._grad = [given.pop(0)] if node.target is BACKWARD else []
        self._q, self._k, self._v, self._mask, self._keep, self._segment, *given = given
        self._made = given[:2] if self._grad else []  # output and logsumexp
        self._sight = Sight(*given[len(self._made) :])
        self._order = None if self._grad else _order(_value(node)[0])

    def is_kernels(self, present: Set[sympy.Symbol]) -> bool:
        """Whether the kernel computes it, with one call for each query head of a group."""
        q, k, v = (_value(x) for x in (self._q, self._k, self._v))
        sight, mask = self._sight, None if self._mask is None else _value(self._mask).dtype
        kept, width = self._keep is not None, q.shape[3] == v.shape[3]
        numbers = sight.start, q.shape[1], k.shape[1]
        return (
            not any(isinstance(n, SymInt) for n in numbers)
            and kernel_name(q.device.type, width, mask, kept, sight) == "flash"
            and takes("flash", q)
            and (self._segment, sight.start, sight.turn) == (None, 0, None)
            and all(_is_present(n, present) for x in (q, k) for n in x.shape)
            and all(_lies_well(_value(x)) for x in (self._q, self._k, self._v, *self._made[:1]))
            and (self._mask is None or _is_whole(_value(self._mask), q))
            and (self._groups == 1 or bool(self._made) or self._order is not None)
        )

    def forward(self) -> tuple[fx.Node, fx.Node]:
        """Emits the forward calls; returns output and logsumexp."""
        added, out, lse = self._added(), None, None
        if self._groups > 1:
            assert self._order is not None, "asked before"
            out = self._memory(self._order)
            lse = self._memory(BSHD[:3], accumulated(_value(self._q).dtype))
        for i in range(self._groups):
            tensors = self._heads(self._q, i), self._k, self._v
            found = self._flash(FLASH, *tensors, added=self._heads(added, i), results=2)
            out, lse = self._with(out, found[0], i), self._with(lse, found[1], i)
        assert out is not None and lse is not None, "there is a group"  # noqa: PT018
        return out, lse

    def backward(self) -> tuple[fx.Node, fx.Node, fx.Node]:
        """Emits the backward calls; returns the gradients of queries, keys and values."""
        added, dk, dv = self._added(), None, None
        dq = self._memory(BSHD) if self._groups > 1 else None
        for i in range(self._groups):
            grad, q, out, lse = (self._heads(x, i) for x in (*self._grad, self._q, *self._made))
            tensors = grad, q, self._k, self._v, out, lse
            found = self._flash(FLASH_BACKWARD, *tensors, added=self._heads(added, i), results=3)
            dq = self._with(dq, found[0], i)
            dk, dv = self._added_up(dk, found[1]), self._added_up(dv, found[2])
        assert dq is not None and dk is not None and dv is not None, "there is a group"  # noqa: PT018
        return dq, dk, dv

    @property
    def _groups(self) -> int:
        """The number of query heads for each key head."""
        return int(_value(self._q).shape[1]) // int(_value(self._k).shape[1])

    def _emit(self, op: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        node = self._graph.call_function(op, args, kwargs)
        values, named = fx.map_arg((args, kwargs), _value)
        node.meta["val"] = op(*values, **named)
        return node

    def _flash(
        self, op: Callable[..., Any], *tensors: Any, added: fx.Node | None, results: int
    ) -> list[fx.Node]:
        causal, scale = self._sight.after is not None, self._sight.scale
        made = self._emit(op, *tensors, 0.0, causal, attn_mask=added, scale=scale)
        return [self._emit(operator.getitem, made, i) for i in range(results)]

    def _added(self) -> fx.Node | None:
        """Emits the additive mask of the kernel; broadcast dims have size 1."""
        mask: fx.Node | None = self._mask
        q = _value(self._q)
        if self._keep is not None:
            mask = self._emit(aten.unsqueeze.default, self._keep, 1)
            mask = self._emit(aten.unsqueeze.default, mask, 1)
        if mask is None:
            return None
        given = _value(mask).dtype
        if given == torch.bool:
            kind = {"dtype": q.dtype, "device": q.device}
            zero, hidden = (self._emit(aten.full.default, [], n, **kind) for n in (0.0, -math.inf))
            return self._emit(aten.where.self, mask, zero, hidden)
        wanted = added_dtype(given, q.dtype)
        if given != wanted:
            mask = self._emit(prims.convert_element_type.default, mask, wanted)
        if not _keys_apart(_value(mask)):
            return mask
        return self._emit(aten.clone.default, mask, memory_format=torch.contiguous_format)

    def _heads(self, x: fx.Node | None, i: int) -> fx.Node | None:
        """Returns the heads of the i-th call: one query head of each group."""
        if x is None or self._groups == 1 or _value(x).shape[1] == 1:
            return x
        return self._emit(aten.slice.Tensor, x, 1, i, _value(x).shape[1], self._groups)

    def _memory(self, order: Sequence[int], dtype: torch.dtype | None = None) -> fx.Node:
        """Emits empty memory with the first dims of the queries, laid out in this order."""
        shape = _value(self._q).shape
        sizes = [
            self._emit(aten.sym_size.int, self._q, d) if isinstance(shape[d], SymInt) else shape[d]
            for d in order
        ]
        kind = dtype or _value(self._q).dtype
        made = self._emit(aten.new_empty.default, self._q, sizes, dtype=kind)
        return self._emit(aten.permute.default, made, list(order)) if order != BHSD else made

    def _added_up(self, total: fx.Node | None, gradient: fx.Node) -> fx.Node:
        """Returns the sum of two gradients in their layout."""
        if total is None:
            return gradient
        both = [self._emit(aten.permute.default, x, list(BSHD)) for x in (total, gradient)]
        return self._emit(aten.permute.default, self._emit(aten.add.Tensor, *both), list(BSHD))

    def _with(self, whole: fx.Node | None, part: fx.Node, i: int) -> fx.Node:
        """Returns the results of all calls, with those of the i-th written into them.

        `slice_scatter` is not used: Inductor would write all parts at once and keep them alive till
        then.
        """
        if whole is None:
            return part
        heads = self._heads(whole, i)
        self._emit(aten.copy_.default, heads, part)
        return whole


def _value(node: fx.Node) -> Any:
    return node.meta["val"]


def _lies_well(x: Tensor) -> bool:
    """Whether a tensor's strides suit the kernel, whatever the sizes."""
    *outer, rows, last = x.stride()
    width = x.shape[3]
    known = all(isinstance(n, int) for n in (rows, last, width))
    return (
        known and last == 1 and rows >= width and all(isinstance(n, SymInt) or n > 0 for n in outer)
    )


def _is_whole(mask: Tensor, q: Tensor) -> bool:
    """Whether a mask has one row for all samples or one for each, whatever the sizes."""
    rows, samples = (
        n.node.expr if isinstance(n, SymInt) else n for n in (mask.shape[0], q.shape[0])
    )
    return bool(rows in (1, samples))


def _keys_apart(mask: Tensor) -> bool:
    """Whether the keys of a mask may not be adjacent in memory, so that it must be copied."""
    size, stride = mask.shape[3], mask.stride(3)
    one = not isinstance(size, SymInt) and size == 1
    return not one and (isinstance(stride, SymInt) or stride not in (0, 1))


def _order(x: Tensor) -> tuple[int, ...] | None:
    """Returns the order of a tensor's dims in memory, or None if it is neither BSHD nor BHSD."""
    return next((order for order in (BSHD, BHSD) if x.permute(order).is_contiguous()), None)


def _is_present(size: int | SymInt, present: Set[sympy.Symbol]) -> bool:
    """Whether a size is surely above 0: a sum of products of sizes that are."""
    if not isinstance(size, SymInt):
        return size > 0
    terms = sympy.Add.make_args(sympy.expand(size.node.expr))
    factors = [f for t in terms for f in sympy.Mul.make_args(t)]
    return all(f in present or (f.is_Integer and f > 0) for f in factors)
