"""Splits a joint graph into a forward and a backward graph, given which values are made again.

What backward needs of forward is, in this order: an input or parameter (costs nothing), a view of
something it has (made again), a mask or table made of positions alone (made again), a value that
the plan makes again, or else a saved activation. A value is made again right before its first use
in backward, so that what is recomputed of one block at a time is alive.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import sympy
import torch
from torch import Tensor, fx

from dcpc.codegen.joint import Joint
from dcpc.ir import Partition, Program, Schedule

aten = torch.ops.aten

VIEWS = {
    aten.view.default, aten._unsafe_view.default, aten.t.default, aten.transpose.int,
    aten.permute.default, aten.expand.default, aten.unsqueeze.default, aten.squeeze.dim,
    aten.squeeze.default, aten.squeeze.dims, aten.slice.Tensor, aten.select.int,
    aten.detach.default, aten.alias.default, aten._reshape_alias.default, aten.as_strided.default,
}  # fmt: skip


def partition(schedule: Schedule, names: Mapping[sympy.Symbol, sympy.Expr]) -> Partition:
    """Returns the forward and backward graphs of a schedule.

    Args:
        schedule: of a joint graph; its nodes are copied.
        names: torch symbol -> expression of the bucket's dims.
    """
    taken = (*schedule.saved, *schedule.backward_primals)
    return Partition(
        forward=_module(schedule.primals, schedule.forward, (schedule.loss, *schedule.saved)),
        backward=_module((*taken, schedule.tangent), schedule.backward, schedule.gradients),
        resident=tuple(n.name for n in schedule.primals if isinstance(n.meta["val"], Tensor)),
        saved=tuple(n.name for n in schedule.saved),
        backward_primals=tuple(n.name for n in schedule.backward_primals),
        names=names,
    )


def _module(
    placeholders: Sequence[fx.Node], calls: Sequence[fx.Node], outputs: Sequence[fx.Node | None]
) -> fx.GraphModule:
    graph = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    for node in placeholders:
        made[node] = graph.placeholder(node.name)
    for node in calls:
        made[node] = graph.node_copy(node, lambda n: made[n])
    for node, copy in made.items():
        copy.meta = {k: v for k, v in node.meta.items() if k in ("val", "storage")}
    graph.output(tuple(None if n is None else made[n] for n in outputs))
    graph.lint()
    return fx.GraphModule(torch.nn.Module(), graph)


def schedule(program: Program, joint: Joint, recompute: frozenset[str]) -> Schedule:
    """Returns what forward and backward run.

    Args:
        program: the traced model.
        joint: its joint graph, lowered for one rank; not changed.
        recompute: names of forward nodes of the joint graph that backward makes again.
    """
    return _Scheduler(program, joint, recompute).run()


def choices(program: Program, joint: Joint) -> tuple[list[fx.Node], frozenset[str]]:
    """Returns the forward nodes that a recompute plan decides on, and whose values backward reads.

    In execution order; views and several results of one call are among them, integers and what is
    made of positions alone are not. The values read include those that are views of others.
    """
    free = _cheap(program, joint)
    nodes = [
        n for n in joint.gm.graph.nodes
        if n.name in joint.forward and n.name not in free and _makes_tensors(n)
    ]  # fmt: skip
    decided = {n.name for n in nodes}
    output = next(n for n in reversed(joint.gm.graph.nodes) if n.op == "output")
    gradients = [g for g in output.args[0][1:] if g is not None]
    readers = backward_nodes(joint, gradients)
    needed = {g.name for g in gradients if g.name in decided}
    for node in joint.gm.graph.nodes:
        if node.name in readers:
            needed |= {s.name for s in node.all_input_nodes if s.name in decided}
    return nodes, frozenset(needed)


def _makes_tensors(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) or (
        isinstance(value, tuple | list) and any(isinstance(v, Tensor) for v in value)
    )


def backward_nodes(joint: Joint, gradients: Sequence[fx.Node | None]) -> set[str]:
    """Returns the names of the nodes made by differentiation that some gradient needs."""
    found: set[str] = set()
    stack = [g for g in gradients if g is not None]
    while stack:
        node = stack.pop()
        own = node.op == "call_function" and node.name not in joint.forward
        if own and node.name not in found:
            found.add(node.name)
            stack.extend(node.all_input_nodes)
    return found


def _releasing_first(joint: Joint, calls: Sequence[fx.Node]) -> list[fx.Node]:
    """Returns the calls, the last readers of other values as early as they can be.

    They are calls that only gradients of parameters need, such as that of a product's weight. Torch
    may have the gradient of the product's input before it: then both are alive with an activation
    that the weight's gradient alone still reads.
    """
    own, forward = set(calls), joint.forward
    leads: set[fx.Node] = set()
    for node in reversed(calls):
        if all(user in leads or user not in own for user in node.users):
            leads.add(node)
    readers: dict[fx.Node, fx.Node] = {}
    for node in calls:
        if node.target not in VIEWS:
            read = [s for s in node.all_input_nodes if s in own or s.name in forward]
            readers |= {_root(s): node for s in read}
    last = set(readers.values())
    waits = {
        node: {s for s in node.all_input_nodes if s in own}
        for node in calls
        if node in leads and (node in last or node.target in VIEWS)
    }
    order: list[fx.Node] = []

    def emit(node: fx.Node) -> None:
        waits.pop(node, None)
        order.append(node)
        for user in sorted(u for u in node.users if u in waits):
            waits[user].discard(node)
            if not waits[user]:
                emit(user)

    done: set[fx.Node] = set()
    for node in calls:
        if node not in done:
            first = len(order)
            emit(node)
            done.update(order[first:])
    return order


def _root(node: fx.Node) -> fx.Node:
    """Returns what a view is of."""
    while node.target in VIEWS:
        node = node.all_input_nodes[0]
    return node


class _Scheduler:
    def __init__(self, program: Program, joint: Joint, recompute: frozenset[str]) -> None:
        self.joint, self.recompute = joint, recompute
        self.nodes = list(joint.gm.graph.nodes)
        self.cheap = _cheap(program, joint)
        self.saved: dict[fx.Node, None] = {}
        self.primals: dict[fx.Node, None] = {}
        self.order: list[fx.Node] = []
        self.done: set[fx.Node] = set()

    def run(self) -> Schedule:
        loss, *gradients = self.nodes[-1].args[0]
        placeholders = [n for n in self.nodes if n.op == "placeholder"]
        backward = backward_nodes(self.joint, gradients)
        calls = [n for n in self.nodes if n.name in backward]
        for node in _releasing_first(self.joint, calls):
            for source in node.all_input_nodes:
                self._need(source)
            self.order.append(node)
            self.done.add(node)
        for gradient in gradients:
            if gradient is not None:
                self._need(gradient)
        order, read = _needed(self.order, [g for g in gradients if g is not None])
        saved = tuple(n for n in self.saved if n in read)
        made = [n for n in self.nodes if n.name in self.joint.forward]
        return Schedule(
            primals=tuple(n for n in placeholders if n.name != self.joint.tangent),
            forward=_needed(made, [loss, *saved])[0],
            loss=loss,
            saved=saved,
            backward_primals=tuple(n for n in self.primals if n in read),
            tangent=next(n for n in placeholders if n.name == self.joint.tangent),
            backward=order,
            gradients=tuple(gradients),
        )

    def _need(self, node: fx.Node) -> None:
        """Makes a value available in backward before the point `self.order` has reached."""
        if node in self.done:
            return
        self.done.add(node)
        if node.op == "placeholder":
            if node.name != self.joint.tangent:
                self.primals[node] = None
            return
        if not self._made_again(node):
            self.saved[node] = None
            return
        for source in node.all_input_nodes:
            self._need(source)
        self.order.append(node)

    def _made_again(self, node: fx.Node) -> bool:
        value = node.meta.get("val")
        if not isinstance(value, Tensor):
            return True  # an integer, or several tensors of which the items that are needed decide
        if node.name in self.cheap or node.target in VIEWS:
            return True
        return node.name in self.recompute


def _needed(
    calls: Sequence[fx.Node], outputs: Sequence[fx.Node]
) -> tuple[tuple[fx.Node, ...], set[fx.Node]]:
    """Returns the calls that the outputs depend on, in order, and all that these and they read."""
    read = set(outputs)
    kept = []
    for node in reversed(calls):
        if node in read:
            kept.append(node)
            read.update(node.all_input_nodes)
    return tuple(reversed(kept)), read


def _cheap(program: Program, joint: Joint) -> set[str]:
    """Forward nodes that depend on integers, inputs and buffers alone and multiply no matrices."""
    placeholders = [n.name for n in program.gm.graph.nodes if n.op == "placeholder"]
    parameters = {
        made
        for made, name in zip(joint.primals, placeholders, strict=False)
        if name in program.parameters
    }
    found: set[str] = set()
    for node in joint.gm.graph.nodes:
        if node.op == "placeholder":
            light = node.name not in parameters
        else:
            light = node.name in joint.forward and node.target not in _HEAVY
            light = light and all(s.name in found for s in node.all_input_nodes)
        if light:
            found.add(node.name)
    return found


_HEAVY = {
    aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default,
    aten.convolution.default, torch.ops.dcpc.all_gather.default,
    torch.ops.dcpc.all_to_all.default, torch.ops.dcpc.all_reduce.default,
    torch.ops.dcpc.reduce_scatter.default, torch.ops.dcpc.uniform.default,
    torch.ops.dcpc.normal.default, torch.ops.dcpc.attention_forward.default,
    torch.ops.dcpc.ring_attention_forward.default, torch.ops.dcpc.swap.default,
}  # fmt: skip
