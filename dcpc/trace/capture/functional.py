"""Makes an exported graph functional, call by call, without running it again.

torch's own way (`run_decompositions`) runs the whole graph twice more. But hardly any call of a
model's graph needs to be made functional. Blocks without gradients are inlined. Composite ops that
may return their operand itself (`reshape`, `to`, `flatten`) are decomposed, as torch does. An
in-place call on a tensor that shares its storage with nothing else becomes a call that returns the
new value. Any other case is left to torch.
"""

from __future__ import annotations

import functools
import operator
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._export.utils import _check_valid_to_preserve
from torch._guards import detect_fake_mode
from torch._ops import OpOverload
from torch._subclasses import FakeTensorMode
from torch.export import ExportedProgram
from torch.fx.node import map_aggregate
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dcpc.errors import CodegenError
from dcpc.fx.integers import Emitter
from dcpc.fx.leaves import size_key
from dcpc.fx.writes import View, by_position, functional_of, whole, written

aten = torch.ops.aten
_BLOCK = torch.ops.higher_order.wrap_with_set_grad_enabled

# `torch.tensor(...)` in forward: makes a constant and detaches it.
_FRESH = aten.lift_fresh_copy.default
_CHECKS = (aten._assert_tensor_metadata.default,)
# Kinds of arguments that are the same in every graph.
_PLAIN = (
    *(bool, int, float, complex, str, torch.dtype, torch.device, torch.layout),
    *(torch.memory_format, torch.Generator),
)


class _BeyondError(Exception):
    """Raised where only torch's `run_decompositions` can make the graph functional."""


def functional(exported: ExportedProgram) -> ExportedProgram:
    """Returns a program without in-place calls and nested graphs, and uses up the given one.

    Args:
        exported: result of `torch.export.export`, captured without autocast.
    """
    gm = exported.graph_module
    try:
        graph = _Copy(gm).run()
    except _BeyondError:
        made: ExportedProgram = exported.run_decompositions({})
        return made
    gm.graph = graph
    gm.delete_all_unused_submodules()
    return exported


@dataclass(slots=True)
class _GraphMemory:
    """One storage of the given graph.

    Attributes:
        nodes: nodes whose tensors are in this storage: first the one that allocates it, then its
            views.
        written: number of calls before the last one that wrote to it.
    """

    nodes: list[fx.Node] = field(default_factory=list)
    written: int = 0


class _WrittenStorages:
    """Records which tensors of the given graph share a storage, and when it was written to."""

    def __init__(self) -> None:
        self._kept: list[Tensor] = []  # as long as these live, so do the numbers of their storages
        self._memories: defaultdict[int, _GraphMemory] = defaultdict(_GraphMemory)
        self._places: dict[fx.Node, int] = {}  # calls so far -> how many were before them
        self._same: dict[fx.Node, fx.Node] = {}  # an in-place call -> the target it returns

    def note(self, node: fx.Node) -> None:
        """Records the storage of a node's tensors."""
        self._places[node] = len(self._places)
        value = None if node.target is _BLOCK else node.meta.get("val")  # its calls make it
        for tensor in (t for t in tree_leaves(value) if isinstance(t, Tensor)):
            self._kept.append(tensor)
            self._memories[tensor.untyped_storage()._cdata].nodes.append(node)

    def note_again(self, node: fx.Node, target: fx.Node) -> None:
        """Records that a call returns the tensor that it writes to."""
        self._places[node], self._same[node] = len(self._places), target

    def source(self, node: fx.Node) -> fx.Node:
        """Returns the node that a call writes to or views."""
        source = _first(node)
        return self._same.get(source, source)

    def views(self, node: fx.Node, target: fx.Node) -> list[fx.Node]:
        """Returns the views through which a call writes, the last one first.

        The viewed tensor must be made by a call, its other views must not be read again, and all
        views must be newer than the last write.
        """
        memory = self._memories[target.meta["val"].untyped_storage()._cdata]
        if not memory.nodes or any(n.graph is not node.graph for n in memory.nodes):
            raise _BeyondError
        root, *others = memory.nodes
        if root.op != "call_function":
            raise _BeyondError
        views, source = [], target
        while source is not root:
            if not isinstance(source.target, OpOverload) or source not in others:
                raise _BeyondError
            if self._places[source] < memory.written:
                raise _BeyondError
            views.append(source)
            source = self.source(source)
        read = {user for other in others for user in other.users if user.target not in _CHECKS}
        if any(user not in self._places and user is not node for user in read):
            raise _BeyondError
        memory.written = len(self._places)
        return views


class _NewGraph:
    """The functional copy of a graph, with the node of each fake tensor.

    Attributes:
        graph: the copy.
        top: node before which sizes are computed, so that equal blocks read them from outside.
    """

    top: fx.Node

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self._symbols: dict[sympy.Symbol, fx.Node] = {}
        self._emitter = Emitter(self.graph, self._symbols)
        self._nodes: dict[int, fx.Node] = {}  # id of a fake tensor -> its node
        self._kept: list[Tensor] = []  # as long as these live, so do their ids

    def enter(self, node: fx.Node, value: Any) -> fx.Node:
        """Records a node and its fake value."""
        if value is not None:
            node.meta["val"] = value
        if isinstance(value, Tensor):
            self._kept.append(value)
            self._nodes[id(value)] = node
        return node

    def add(self, like: fx.Node, func: OpOverload, args: Any, kwargs: Any, value: Any) -> None:
        """Adds one of the calls that a composite call consists of."""
        args, kwargs = map_aggregate((args, dict(kwargs)), self.node_of)
        node = self.graph.call_function(func, args, kwargs)
        node.meta |= {k: like.meta[k] for k in ("stack_trace", "nn_module_stack") if k in like.meta}
        self.enter(node, value)
        if isinstance(value, list | tuple):
            for position, item in enumerate(value):
                self.enter(self.graph.call_function(operator.getitem, (node, position)), item)

    def node_of(self, leaf: Any) -> Any:
        """Returns the node of a fake tensor or symbolic number; other arguments as they are."""
        if isinstance(leaf, Tensor):
            if id(leaf) not in self._nodes:
                raise _BeyondError
            return self._nodes[id(leaf)]
        if not isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool):
            if leaf is not None and not isinstance(leaf, _PLAIN):
                raise _BeyondError
            return leaf
        with self.graph.inserting_before(self.top):
            for symbol in leaf.node.expr.free_symbols - self._symbols.keys():
                self._symbols[symbol] = self._size(symbol)
            try:
                return self._emitter.emit(leaf.node.expr)
            except CodegenError as error:
                raise _BeyondError from error

    def _size(self, symbol: sympy.Symbol) -> fx.Node:
        """Emits the value of a size symbol, solved from a dim of an input.

        The dim may be `seq + 1` or `2 * tokens`, for which torch has a separate symbol.
        """
        for node in self.graph.find_nodes(op="placeholder"):
            value = node.meta["val"]
            for dim, size in enumerate(value.shape if isinstance(value, Tensor) else ()):
                more, of_one = sympy.sympify(size_key(size)).as_coeff_Add()
                times, one = of_one.as_coeff_Mul()
                if one != symbol or not (more.is_Integer and times.is_Integer):
                    continue
                read = self.enter(self.graph.call_function(aten.sym_size.int, (node, dim)), size)
                read = self._number(operator.sub, read, int(more)) if more else read
                return self._number(operator.floordiv, read, int(times)) if times != 1 else read
        raise _BeyondError

    def _number(self, call: Any, one: fx.Node, other: int) -> fx.Node:
        node = self.graph.call_function(call, (one, other))
        return self.enter(node, call(one.meta["val"], other))


class _Copy:
    """Copies a graph together with its nested graphs."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self._gm, self._new, self._memories = gm, _NewGraph(), _WrittenStorages()
        values = [n.meta.get("val") for n in gm.graph.find_nodes(op="placeholder")]
        mode = detect_fake_mode([v for v in values if isinstance(v, Tensor)])
        if mode is None:
            raise _BeyondError
        self._mode: FakeTensorMode = mode
        self._instead: dict[fx.Node, fx.Node] = {}  # a written node -> the node of its new value

    def run(self) -> fx.Graph:
        """Returns the copy of the whole graph."""
        at: dict[fx.Node, Any] = {}
        new, graph = self._new, self._new.graph
        for node in self._gm.graph.find_nodes(op="placeholder"):
            self._memories.note(node)
            at[node] = new.enter(graph.node_copy(node), node.meta.get("val"))
        new.top = graph.call_function(operator.pos)
        result = self._inline(self._gm, at)
        graph.erase_node(new.top)
        graph.output(result)
        graph.eliminate_dead_code()
        return graph

    def _inline(self, gm: fx.GraphModule, at: dict[fx.Node, Any]) -> Any:
        """Adds the calls of a graph to the copy, and returns its outputs there."""
        for node in gm.graph.nodes:
            if node.op == "output":
                return self._given(node.args[0], at)
            if node.op == "call_function" and node.target not in _CHECKS:
                at[node] = self._call(gm, node, at)
            elif node.op not in ("placeholder", "get_attr", "call_function"):
                raise _BeyondError
        raise _BeyondError

    def _call(self, gm: fx.GraphModule, node: fx.Node, at: dict[fx.Node, Any]) -> Any:
        if isinstance(node.target, OpOverload) and node.target._schema.is_mutable:
            return self._written(node, at)
        self._memories.note(node)
        if node.target is operator.getitem and isinstance(at[_first(node)], list | tuple):
            return at[_first(node)][node.args[1]]
        if node.target is _BLOCK:
            return self._block(gm, node.args[1:], at)
        if isinstance(node.target, OpOverload):
            if _is_taken_apart(node.target):
                return self._taken_apart(node, node.target, at)
        elif not _is_of_numbers(node):
            raise _BeyondError
        if isinstance(node.meta.get("val"), torch.SymInt):
            return self._new.node_of(node.meta["val"])
        copied = self._new.graph.node_copy(node, lambda n: self._given(n, at))
        return self._new.enter(copied, node.meta.get("val"))

    def _given(self, value: Any, at: Mapping[fx.Node, Any]) -> Any:
        """Returns an argument with each node replaced by the node that now has its value."""

        def now(node: fx.Node) -> Any:
            if node not in at:
                raise _BeyondError
            return fx.map_arg(at[node], self._now)

        return fx.map_arg(value, now)

    def _now(self, node: fx.Node) -> fx.Node:
        while node in self._instead:
            node = self._instead[node]
        return node

    # ------------------------------------------------------------------------------------ writes

    def _written(self, node: fx.Node, at: Mapping[fx.Node, Any]) -> fx.Node:
        """Adds the functional form of a call that writes, and uses its result from here on.

        A write through views also adds the calls that put the result back into the viewed tensor.
        """
        target = self._memories.source(node)
        if node.target is aten.detach_.default and target.target is _FRESH:
            self._memories.note_again(node, target)
            return _node(at[target])
        views = self._memories.views(node, target)
        args, kwargs = map_aggregate(self._given((node.args, dict(node.kwargs)), at), _value)
        with self._recording(node):
            if [t is args[0] for t in written(node.target, args, kwargs)] != [True]:
                raise _BeyondError
            given = by_position(node.target, args, kwargs)
            found = value = functional_of(node.target)(*given, **kwargs)
            if found.dtype != args[0].dtype:
                found = value = aten._to_copy.default(found, dtype=args[0].dtype)
            for view in views:
                args, kwargs = map_aggregate(
                    self._given((view.args, dict(view.kwargs)), at), _value
                )
                own = _value(self._now(_node(at[view])))
                value = whole(View(view.target, args, kwargs, (own,)), own, value)
        root = self._memories.source(views[-1]) if views else target
        self._instead[self._now(_node(at[root]))] = self._new.node_of(value)
        if not views:
            self._memories.note_again(node, target)
        else:
            self._memories.note(node)
            self._instead[self._now(_node(at[target]))] = self._new.node_of(found)
        return _node(self._new.node_of(found))

    @contextmanager
    def _recording(self, node: fx.Node) -> Iterator[None]:
        """Adds the calls made on fake tensors within its block to the copy, for one node."""
        record = _CopyingMode(self._new, node)
        try:
            with self._mode, record, enable_python_dispatcher(), torch.no_grad():
                yield
        except CodegenError as error:
            raise _BeyondError from error

    def _block(self, gm: fx.GraphModule, args: Any, at: Mapping[fx.Node, Any]) -> Any:
        inner = gm.get_submodule(str(args[0].target))
        if not isinstance(inner, fx.GraphModule):
            raise _BeyondError
        given = zip(inner.graph.find_nodes(op="placeholder"), args[1:], strict=True)
        return self._inline(inner, {own: self._given(a, at) for own, a in given})

    # -------------------------------------------------------------------------- composite calls

    def _taken_apart(self, node: fx.Node, call: OpOverload, at: Mapping[fx.Node, Any]) -> Any:
        """Adds the calls that a composite call consists of; returns the nodes of its results."""
        args, kwargs = map_aggregate(self._given((node.args, dict(node.kwargs)), at), _value)
        with self._recording(node):
            result = call.decompose(*args, **kwargs)
        if result is NotImplemented:
            raise _BeyondError
        return map_aggregate(result, self._new.node_of)


class _CopyingMode(TorchDispatchMode):
    """Dispatch mode that adds every call to a copy."""

    def __init__(self, copy: _NewGraph, node: fx.Node) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._copy, self._node = copy, node

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # asks something and makes nothing
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            raise _BeyondError
        if _is_taken_apart(func):
            with self:
                return func.decompose(*args, **kwargs)
        result = func(*args, **kwargs)
        if any(isinstance(leaf, Tensor) for leaf in tree_leaves(result)):
            self._copy.add(self._node, func, args, kwargs, result)
        return result


@functools.cache
def _is_taken_apart(func: OpOverload) -> bool:
    """Whether torch decomposes a composite op because it may return its operand itself."""
    return func._can_decompose() and not _check_valid_to_preserve(func)


def _is_of_numbers(node: fx.Node) -> bool:
    """Whether a Python function's call computes a size from sizes, or picks a result."""
    value = node.meta.get("val")
    return node.target is operator.getitem or isinstance(
        value, torch.SymInt | torch.SymFloat | torch.SymBool | int | float | bool
    )


def _first(node: fx.Node) -> fx.Node:
    source = node.args[0]
    if not isinstance(source, fx.Node):
        raise _BeyondError
    return source


def _value(leaf: Any) -> Any:
    return leaf.meta["val"] if isinstance(leaf, fx.Node) else leaf


def _node(value: Any) -> fx.Node:
    if not isinstance(value, fx.Node):
        raise _BeyondError
    return value
