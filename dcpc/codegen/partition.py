"""Splits a joint graph into a forward and a backward graph, given which values are made again.

What backward needs of forward is, in this order: an input or parameter (costs nothing), a view of
something it has (made again), a mask or table made of positions alone (made again), a value that
the plan makes again, or else a saved activation. A value is made again right before its first use
in backward, so that what is recomputed of one block at a time is alive.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from dcpc.codegen.joint import Joint
from dcpc.ir import Partition, Program

aten = torch.ops.aten

VIEWS = {
    aten.view.default, aten._unsafe_view.default, aten.t.default, aten.transpose.int,
    aten.permute.default, aten.expand.default, aten.unsqueeze.default, aten.squeeze.dim,
    aten.squeeze.default, aten.squeeze.dims, aten.slice.Tensor, aten.select.int,
    aten.detach.default, aten.alias.default, aten._reshape_alias.default, aten.as_strided.default,
}  # fmt: skip


def partition(program: Program, joint: Joint, recompute: frozenset[str]) -> Partition:
    """Returns forward and backward graphs.

    Args:
        program: the traced model.
        joint: its joint graph, lowered for one rank; not changed.
        recompute: names of forward nodes of the joint graph that backward makes again.
    """
    return _Partitioner(program, joint, recompute).run()


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


class _Partitioner:
    def __init__(
        self,
        program: Program,
        joint: Joint,
        recompute: frozenset[str],
    ) -> None:
        self.joint = joint
        self.nodes = {n.name: n for n in joint.gm.graph.nodes}
        self.output = next(n for n in reversed(joint.gm.graph.nodes) if n.op == "output")
        self.recompute = recompute
        self.cheap = _cheap(program, joint)
        self.saved: dict[str, None] = {}
        self.primals: dict[str, None] = {}
        self.graph = fx.Graph()
        self.made: dict[str, fx.Node] = {}

    def run(self) -> Partition:
        outputs = list(self.output.args[0])
        loss, gradients = outputs[0], outputs[1:]
        self._plan_backward(gradients)
        backward = self._backward(gradients)
        forward = self._forward(loss)
        resident = tuple(
            n for n in self.joint.primals if isinstance(self.nodes[n].meta["val"], Tensor)
        )
        return Partition(
            forward=forward,
            backward=backward,
            resident=resident,
            saved=tuple(self.saved),
            backward_primals=tuple(self.primals),
            names=self.joint.names,
        )

    # ---------------------------------------------------------- which values backward gets and how

    def _plan_backward(self, gradients: list[fx.Node | None]) -> None:
        """Walks what the gradients need, deciding saved or made again for each forward value."""
        self.order: list[str] = []
        done: set[str] = set()
        backward = backward_nodes(self.joint, gradients)
        for node in self.joint.gm.graph.nodes:
            if node.name in backward:
                for source in node.all_input_nodes:
                    self._need(source, done)
                self.order.append(node.name)
                done.add(node.name)
        for gradient in gradients:
            if gradient is not None:
                self._need(gradient, done)

    def _need(self, node: fx.Node, done: set[str]) -> None:
        """Makes a value available in backward before the point `self.order` has reached."""
        if node.name in done:
            return
        done.add(node.name)
        if node.op == "placeholder":
            if node.name != self.joint.tangent:
                self.primals[node.name] = None
            return
        if not self._made_again(node):
            self.saved[node.name] = None
            return
        for source in node.all_input_nodes:
            self._need(source, done)
        self.order.append(node.name)

    def _made_again(self, node: fx.Node) -> bool:
        value = node.meta.get("val")
        if not isinstance(value, Tensor):
            return True  # an integer, or several tensors of which the items that are needed decide
        if node.name in self.cheap or node.target in VIEWS:
            return True
        return node.name in self.recompute

    # -------------------------------------------------------------------------------------- graphs

    def _backward(self, gradients: list[fx.Node | None]) -> fx.GraphModule:
        for name in (*self.saved, *self.primals, self.joint.tangent):
            self._placeholder(name)
        for name in self.order:
            self._copy(name)
        self.graph.output(tuple(None if g is None else self.made[g.name] for g in gradients))
        self.graph.eliminate_dead_code()
        for held in (self.saved, self.primals):
            for name in [n for n in held if not self.made[n].users]:
                self.graph.erase_node(self.made[name])
                del held[name]
        return self._module(self.graph)

    def _forward(self, loss: fx.Node) -> fx.GraphModule:
        self.graph, self.made = fx.Graph(), {}
        for name in self.joint.primals:
            self._placeholder(name)
        for node in self.joint.gm.graph.nodes:
            if node.name in self.joint.forward:
                self._copy(node.name)
        self.graph.output((self.made[loss.name], *(self.made[n] for n in self.saved)))
        self.graph.eliminate_dead_code()
        return self._module(self.graph)

    def _placeholder(self, name: str) -> None:
        new = self.graph.placeholder(name)
        new.meta = _kept(self.nodes[name])
        self.made[name] = new

    def _copy(self, name: str) -> None:
        new = self.graph.node_copy(self.nodes[name], lambda n: self.made[n.name])
        new.meta = _kept(self.nodes[name])
        self.made[name] = new

    def _module(self, graph: fx.Graph) -> fx.GraphModule:
        graph.lint()
        return fx.GraphModule(torch.nn.Module(), graph)


def _kept(node: fx.Node) -> dict[str, Any]:
    return {k: v for k, v in node.meta.items() if k in ("val", "storage")}


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
}  # fmt: skip
