"""Makes the forward and the backward graph that a schedule says."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence

import sympy
import torch
from torch import Tensor, fx

from dcpc.codegen.joint.gathers import ROW_CALLS
from dcpc.fx.graphs import LazyGraphModule
from dcpc.ir import Partition, Schedule


def partition(schedule: Schedule, names: Mapping[sympy.Symbol, sympy.Expr]) -> Partition:
    """Returns the forward and backward graphs of a schedule.

    Args:
        schedule: of a joint graph; its nodes are copied.
        names: torch symbol -> expression of the bucket's dims.
    """
    taken = (*schedule.saved, *schedule.backward_primals)
    return Partition(
        forward=_module(schedule.primals, schedule.forward, (*schedule.outputs, *schedule.saved)),
        backward=_module((*taken, *schedule.tangents), schedule.backward, schedule.gradients),
        resident=tuple(n.name for n in schedule.primals if isinstance(n.meta["val"], Tensor)),
        saved=tuple(n.name for n in schedule.saved),
        backward_primals=tuple(n.name for n in schedule.backward_primals),
        names=names,
        returned=len(schedule.outputs),
        begins=schedule.begins,
    )


def _module(
    placeholders: Sequence[fx.Node], calls: Sequence[fx.Node], outputs: Sequence[fx.Node | None]
) -> fx.GraphModule:
    graph = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    for node in placeholders:
        made[node] = graph.placeholder(node.name)
    token: fx.Node | None = None
    for node in calls:
        made[node] = graph.node_copy(node, lambda n: made[n])
        if node.target in ROW_CALLS:  # whatever compiles the graph keeps their order
            if token is not None:
                made[node].kwargs = {"token": token}
            last = len(node.meta["val"]) - 1
            # A name of its own: a default one, "getitem", may be that of a call further on.
            args, name = (made[node], last), f"{node.name}_token"
            token = graph.create_node("call_function", operator.getitem, args, name=name)
            token.meta = {"val": node.meta["val"][last], "storage": node.meta["storage"][last:]}
    for node, copy in made.items():
        copy.meta = {k: v for k, v in node.meta.items() if k in ("val", "storage")}
    graph.output(tuple(None if n is None else made[n] for n in outputs))
    graph.lint()
    return LazyGraphModule(torch.nn.Module(), graph)
