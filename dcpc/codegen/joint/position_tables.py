"""Values made of positions and inputs alone: backward makes them again, but for small tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Set

import sympy
import torch
from torch import fx

from dcpc.codegen.joint.joint import Joint
from dcpc.ir import Program

aten = torch.ops.aten

VIEWS = {
    aten.view.default, aten._unsafe_view.default, aten.t.default, aten.transpose.int,
    aten.permute.default, aten.expand.default, aten.unsqueeze.default, aten.squeeze.dim,
    aten.squeeze.default, aten.squeeze.dims, aten.slice.Tensor, aten.select.int,
    aten.detach.default, aten.alias.default, aten._reshape_alias.default, aten.as_strided.default,
}  # fmt: skip
# Calls of tens of operations an element: to make such a value takes longer than to read it.
_DEAR = {
    aten.cos.default, aten.sin.default, aten.exp.default, aten.log.default, aten.tanh.default,
    aten.pow.Scalar, aten.pow.Tensor_Scalar, aten.pow.Tensor_Tensor, aten.polar.default,
}  # fmt: skip
_FEW = 512  # elements of a table for each place
_HEAVY = {
    aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default,
    aten.convolution.default, torch.ops.dcpc.all_gather.default,
    torch.ops.dcpc.all_to_all.default, torch.ops.dcpc.all_reduce.default,
    torch.ops.dcpc.reduce_scatter.default, torch.ops.dcpc.uniform.default,
    torch.ops.dcpc.normal.default, torch.ops.dcpc.attention_forward.default,
    torch.ops.dcpc.ring_attention_forward.default, torch.ops.dcpc.swap.default,
    torch.ops.dcpc.halo.default, torch.ops.dcpc.attention_of_rows_forward.default,
}  # fmt: skip


def made_of_positions(program: Program, joint: Joint) -> set[str]:
    """Returns the forward nodes that depend on no parameter and call no op of `_HEAVY`."""
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


def small_tables(program: Program, joint: Joint, cheap: Set[str]) -> set[str]:
    """Returns the values of these that are saved: small ones that are dear to make.

    Rotary tables, for instance: a backend that fuses calls would make them within each kernel that
    reads them, for each head of each layer, in forward and in backward. Of a chain of such values
    the last is saved, as it lies before views of it.

    Args:
        program: program that the joint graph runs.
        joint: joint graph.
        cheap: values made of positions and inputs alone.
    """
    dear: dict[fx.Node, None] = {}
    ends: set[str] = set()
    for node in joint.gm.graph.nodes:
        read = [n for n in node.all_input_nodes if n in dear]
        of = program.info.get(joint.owner.get(node.name, ""))
        small = of is not None and node.name in cheap and _is_small(of.numel)
        if small and (read or node.target in _DEAR):
            dear[node] = None
        else:
            ends.update(before_views(n).name for n in read)
    return ends & {n.name for n in dear}


def before_views(node: fx.Node) -> fx.Node:
    """Returns the base of a view; of another value itself."""
    while node.target in VIEWS:
        node = node.all_input_nodes[0]
    return node


def _is_small(numel: sympy.Expr) -> bool:
    """Whether a size has few elements for each place: no dim counts twice in it."""
    fixed, named = sympy.Integer(1), Counter[sympy.Basic]()
    for base, power in numel.as_powers_dict().items():
        if base.is_number:
            fixed *= base**power
        named.update({symbol: int(power) for symbol in base.free_symbols})
    return bool(fixed <= _FEW) and max(named.values(), default=0) <= 1
