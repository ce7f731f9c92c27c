"""Where forward cuts gradients: blocks of `torch.no_grad()`."""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.export import ExportedProgram

from dcpc.errors import TraceError

aten = torch.ops.aten
_BLOCK = torch.ops.higher_order.wrap_with_set_grad_enabled


def detach_without_grad(exported: ExportedProgram) -> None:
    """Detaches what a block without gradients makes, in place.

    The block is a nested graph; making the whole functional takes it in and forgets that no
    gradient flows out.

    Raises:
        TraceError: forward writes to what has a gradient, in such a block or through `detach`.
            Autograd knows nothing of the write: the gradient is what it was without.
    """
    gm = exported.graph_module
    flows = _flowing(exported)
    for call, root, is_detached in _writes(gm.graph):
        if is_detached and root in flows:
            raise _past_autograd(call, root)
    for node in list(gm.graph.nodes):
        if node.target is not _BLOCK or node.args[0]:
            continue
        inner = gm.get_submodule(node.args[1].target)
        assert isinstance(inner, fx.GraphModule), "a block is a graph"
        outer = dict(zip(inner.graph.find_nodes(op="placeholder"), node.args[2:], strict=True))
        for call, root, _ in _writes(inner.graph):
            if outer.get(root) in flows:
                raise _past_autograd(call, outer[root])
        for item in [u for u in node.users if u.target is operator.getitem]:
            value = item.meta.get("val")
            if isinstance(value, Tensor) and value.is_floating_point():
                with gm.graph.inserting_after(item):
                    held = gm.graph.call_function(aten.detach.default, (item,))
                held.meta = dict(item.meta)
                for user in [u for u in item.users if u is not held]:
                    user.replace_input_with(item, held)
    gm.recompile()


def _past_autograd(call: fx.Node, root: fx.Node) -> TraceError:
    lines = str(call.meta.get("stack_trace") or "").strip().splitlines()
    where = f" ({lines[-2].strip()}: `{lines[-1].strip()}`)" if len(lines) > 1 else ""
    return TraceError(
        f"forward writes to a tensor with a gradient inside torch.no_grad() or through detach(): "
        f"{call.target} on '{root}'{where}; expected a new tensor there, as autograd does not see "
        "such a write and no op of a graph says that; write `y = y + (new - y).detach()`"
    )


def _flowing(exported: ExportedProgram) -> set[object]:
    """Returns the calls and placeholders of the outer graph that have a gradient."""
    held = exported.graph_signature.inputs_to_parameters
    found: set[object] = set()
    for node in exported.graph_module.graph.nodes:
        value = node.meta.get("val")
        if node.op == "placeholder":
            name = held.get(node.name)
            flows = name is not None and exported.state_dict[name].requires_grad
        elif node.target is _BLOCK:
            flows = bool(node.args[0]) and any(n in found for n in node.all_input_nodes)
        else:
            exact = isinstance(value, Tensor) and not (
                value.is_floating_point() or value.is_complex()
            )
            cut = exact or node.target in (aten.detach.default, aten.detach_.default)
            flows = not cut and any(n in found for n in node.all_input_nodes)
        if flows:
            found.add(node)
    return found


def _writes(graph: fx.Graph) -> Iterator[tuple[fx.Node, fx.Node, bool]]:
    """Yields the calls that write, what the tensor is a view of, and whether through detach."""
    for node in graph.nodes:
        if not isinstance(node.target, OpOverload) or not node.target._schema.is_mutable:
            continue
        root, is_detached = node.args[0], False
        while isinstance(root, fx.Node) and _returns_operand(root):
            is_detached |= root.target is aten.detach.default
            root = root.args[0]
        if isinstance(root, fx.Node) and node.target is not aten.detach_.default:
            yield node, root, is_detached


def _returns_operand(node: fx.Node) -> bool:
    """Whether a call returns what it was given first, a view of it, or a part of one."""
    if node.target is operator.getitem:
        return True
    if not isinstance(node.target, OpOverload) or not node.args:
        return False
    first, *_ = node.target._schema.arguments
    return first.alias_info is not None
