"""The joint graph of a lowered one as torch traces it whole: `make_fx`, forward and backward.

dcpc puts joint graphs together from pieces (`dcpc/codegen/joint/`). `by_make_fx` goes back to torch
for all that is planned and compiled in its block; `said` compares the two.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._functorch._aot_autograd.logging_utils import setup_stacktrace_preservation_hooks
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.utils._pytree import tree_leaves, tree_map

from dcpc.codegen import Library, Tracer
from dcpc.codegen.joint.joint import Joint
from dcpc.codegen.lower.lower import Lowered
from dcpc.fx.fakes import telling
from dcpc.fx.large_graphs import LazyGraphModule, without_unused

SAME = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)  # their operand


class _Tagging(fx.Interpreter):
    """Notes which node of the lowered graph a forward node was made for, and its autograd nodes."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm)
        self.owner: dict[fx.Node, str] = {}
        self.of_sequence: dict[int, str] = {}

    def run_node(self, n: fx.Node) -> Any:
        first = torch.autograd._get_sequence_nr()
        result = super().run_node(n)
        owner = n.meta.get("dcpc", n.name)
        for number in range(first, torch.autograd._get_sequence_nr()):
            self.of_sequence[number] = owner
        mode = get_proxy_mode()
        assert mode is not None, "not under make_fx"
        for made in reversed(mode.tracer.graph.nodes):
            if made.op == "placeholder" or made in self.owner:
                break
            self.owner[made] = owner
        return result


def whole(tracer: Tracer, lowered: Lowered) -> Joint:
    """Returns the joint graph as torch traces it whole, in sizes of its own."""
    program = tracer.program
    own = Tracer(program, tracer._tensors, Library({}), tracer.hints)
    integers = own.integers(lowered)
    placeholders = [n.name for n in lowered.gm.graph.nodes if n.op == "placeholder"]
    trainable = [n for n in program.parameters if program.info[n].requires_grad]
    arguments = {name: own.placeholder(name, integers) for name in placeholders}
    for name in trainable:
        arguments[name].requires_grad_()
    tagging = _Tagging(lowered.gm)

    def joint(*args: Any) -> list[Any]:
        *primals, tangent = args
        with torch.enable_grad():
            (loss,) = tagging.run(*primals)
        setup_stacktrace_preservation_hooks([loss.grad_fn])
        wanted = [primals[placeholders.index(n)] for n in trainable]
        grads = torch.autograd.grad([loss], wanted, [tangent], allow_unused=True)
        filled = [
            torch.zeros_like(p) if g is None and name in program.zero_gradients else g
            for name, p, g in zip(trainable, wanted, grads, strict=True)
        ]
        return [loss, *filled]

    with own.mode, enable_python_dispatcher(), fx.traceback.preserve_node_meta():
        trace = make_fx(joint, tracing_mode="real", _allow_non_fake_inputs=True)
        loss = torch.empty((), dtype=program.info[program.loss].dtype)
        graph = trace(*arguments.values(), own.tangent(0, loss)).graph
    without_unused(graph)
    for node, name in zip(graph.find_nodes(op="placeholder"), placeholders, strict=False):
        node._rename(name)
    symbols = {i.name: i.symbol for i in lowered.integers}
    names = {v.node._expr: symbols[n] for n, v in integers.items()}
    *primals, tangent = (n.name for n in graph.find_nodes(op="placeholder"))
    _note_storages(graph)
    return Joint(
        gm=LazyGraphModule(torch.nn.Module(), graph),
        primals=tuple(primals),
        begins=(0,),
        tangents=(tangent,),
        forward=frozenset(n.name for n in graph.nodes if n in tagging.owner),
        owner=_owners(graph, tagging),
        trainable=tuple(primals[placeholders.index(n)] for n in trainable),
        names=names,
        guards=own.library.guards(names),
        fake_mode=own.mode,
    )


def _owners(graph: fx.Graph, tagging: _Tagging) -> dict[str, str]:
    """Returns name of a call -> the node of the program it was made for."""
    found: dict[str, str] = {}
    last = ""
    for node in graph.nodes:
        if node.op == "call_function":
            numbered = tagging.of_sequence.get(node.meta.get("seq_nr", -1), last)
            found[node.name] = last = tagging.owner.get(node, numbered)
    return found


def _note_storages(graph: fx.Graph) -> None:
    numbers = itertools.count()
    storages: dict[int, int] = {}
    for node in graph.nodes:
        tensors = [t for t in tree_leaves(node.meta.get("val")) if isinstance(t, Tensor)]
        keys = [t.untyped_storage()._cdata for t in tensors]
        if keys:
            node.meta["storage"] = tuple(storages.setdefault(k, next(numbers)) for k in keys)


def said(joint: Joint) -> list[tuple[str, ...]]:
    """Returns all that a joint graph says but for names: calls, operands, sizes, strides, dtypes.

    Integers are expressions of dims and pieces, wherever they are made. A write to what a call made
    itself is the call that makes a new tensor. `detach`, which torch leaves out where it traces the
    whole, and `alias`, which torch 2.14 adds there, are their operands. The stride of a dim of size
    1 says nothing.
    """

    def told(leaf: Any) -> Any:
        if isinstance(leaf, fx.Node):
            value = leaf.meta["val"]
            return told(value) if leaf not in places else f"#{places[leaf]}"
        if isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool):
            return str(leaf.node.expr.xreplace(joint.names).expand())
        if isinstance(leaf, Tensor):
            pairs = zip(leaf.shape, leaf.stride(), strict=True)
            strides = ("" if size == 1 else told(stride) for size, stride in pairs)
            return (str(leaf.dtype), *map(told, leaf.shape), *strides)
        return str(leaf)

    places: dict[fx.Node, int] = {}
    found: list[tuple[str, ...]] = []
    for node in joint.gm.graph.nodes:
        is_output = node.op == "output"
        if not is_output and not any(isinstance(x, Tensor) for x in tree_leaves(node.meta["val"])):
            continue
        if node.target in SAME:
            places[node] = places[node.args[0]]
            continue
        args = (*node.args[0],) if is_output else node.args
        arguments = tree_map(told, fx.map_arg((args, dict(node.kwargs)), told))
        target = str(node.target).replace("_.", ".") if node.op == "call_function" else node.op
        value = "" if is_output else str(tree_map(told, node.meta["val"]))
        found.append((target, str(arguments), value))
        places[node] = len(found)
    return found


@contextmanager
def by_make_fx(told: bool = False) -> Iterator[None]:
    """In its block joint graphs are traced whole.

    Args:
        told: whether fake tensors know the results of common calls.
    """

    def joint(tracer: Tracer, lowered: Lowered) -> Joint:
        with telling() if told else nullcontext():
            return whole(tracer, lowered)

    with patch.object(Tracer, "joint", joint):
        yield
