"""Inserts calls into a captured graph, each with its fake value in `meta["val"]`."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import detect_fake_mode
from torch.utils._pytree import tree_map

aten = torch.ops.aten


class Editor:
    """Inserts calls before a node, each with its fake value in `meta["val"]`."""

    def __init__(self, node: fx.Node) -> None:
        """Takes the node before which calls are inserted."""
        self.node = node
        self.graph = node.graph

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """Inserts a call, computes its fake value, and returns its node."""
        with self.graph.inserting_before(self.node):
            new = self.graph.call_function(target, args, kwargs)
        new.meta["val"] = _evaluated(new)
        for key in ("stack_trace", "nn_module_stack"):
            if key in self.node.meta:
                new.meta[key] = self.node.meta[key]
        return new

    def sizes(self, source: fx.Node, dims: list[int]) -> list[Any]:
        """Returns the sizes of some dims: numbers, or `sym_size` calls."""
        shape = source.meta["val"].shape
        return [
            shape[d] if isinstance(shape[d], int) else self.call(aten.sym_size.int, source, d)
            for d in dims
        ]

    def product(self, sizes: list[Any]) -> Any:
        """Returns the product of sizes: a number, or the call that computes it."""
        count: Any = 1
        for size in sizes:
            if isinstance(count, int) and (count == 1 or isinstance(size, int)):
                count = size if count == 1 else count * size
            else:
                count = self.call(operator.mul, count, size)
        return count

    def shape(self, source: fx.Node) -> list[Any]:
        """Returns the sizes of all dims: numbers, or `sym_size` calls."""
        return self.sizes(source, list(range(source.meta["val"].ndim)))

    def mean(
        self,
        source: fx.Node,
        dims: list[int],
        keepdim: bool = False,
        dtype: torch.dtype | None = None,
    ) -> fx.Node:
        """Emits a mean over some dims as a sum divided by their global count.

        Values of 16 bits are summed in float32, as torch does: a float16 sum may overflow where the
        mean does not.
        """
        dtype = dtype or source.meta["val"].dtype
        narrow = dtype in (torch.float16, torch.bfloat16)
        wide = torch.float32 if narrow else dtype
        extra = {"dtype": wide} if wide != source.meta["val"].dtype else {}
        total = self.call(aten.sum.dim_IntList, source, dims, keepdim, **extra)
        mean = self.call(aten.div.Tensor, total, self.product(self.sizes(source, dims)))
        return self.call(aten._to_copy.default, mean, dtype=dtype) if narrow else mean


def _evaluated(node: fx.Node) -> Any:
    """Returns the fake result of a call, from its arguments' fake values."""
    target: Any = node.target
    args, kwargs = tree_map(_value, (node.args, dict(node.kwargs)))
    graph_values = [n.meta.get("val") for n in node.graph.find_nodes(op="placeholder")]
    mode = detect_fake_mode([v for v in graph_values if isinstance(v, Tensor)])
    with enable_python_dispatcher():
        if mode is None:
            return target(*args, **kwargs)
        with mode:
            return target(*args, **kwargs)


def expression(size: int | torch.SymInt) -> sympy.Expr:
    """Returns a size as sympy has it."""
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)


def _value(arg: Any) -> Any:
    return arg.meta["val"] if isinstance(arg, fx.Node) else arg
