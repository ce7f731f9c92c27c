"""Handles the places where forward cuts gradients (`torch.no_grad()`), or loses them by mistake."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind
from torch.utils._pytree import tree_leaves

from dcpc.errors import TraceError
from dcpc.fx.large_graphs import source_line
from dcpc.ir import Program

aten = torch.ops.aten
_WRITE = OutputKind.USER_INPUT_MUTATION
_WRITES = (_WRITE, OutputKind.BUFFER_MUTATION)
_BLOCK = torch.ops.higher_order.wrap_with_set_grad_enabled


def detach_without_grad(exported: ExportedProgram, learning: set[str]) -> None:
    """Detaches the results of blocks without gradients, in place.

    Such a block is a nested graph. When the graph is made functional the block is inlined, which
    would lose the fact that no gradient flows out of it.

    Raises:
        TraceError: forward writes to a tensor with a gradient in such a block or through `detach`.
            Autograd ignores that write, and a graph cannot express this.
    """
    gm = exported.graph_module
    flows = flowing(gm.graph, learning)
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


def refuse_writes(exported: ExportedProgram) -> None:
    """Refuses a forward that writes to its inputs, where the caller would expect the write.

    Raises:
        TraceError: forward writes to an input.
    """
    given = set(exported.graph_signature.user_inputs)
    for call, root, _ in _writes(exported.graph_module.graph):
        if root.name in given:
            raise TraceError(
                f"forward writes to its input '{root.name}' ({call.target}); expected one that "
                "only reads what it is given: a compiled graph has no effects; write to a clone"
            )


def without_input_writes(
    gm: fx.GraphModule, exported: ExportedProgram, names: Sequence[str]
) -> None:
    """Drops values that forward wrote to its inputs from a graph's outputs, with a warning.

    And those that it wrote to buffers, which it returns besides where they are wanted.

    The graph computes with the written values, as a functional one does; a caller's tensors stay.
    """
    signature, output = exported.graph_signature, gm.graph.output_node()
    returned: Any = output.args[0]
    kinds = [spec.kind for spec in signature.output_specs]
    output.args = (tuple(x for x, k in zip(returned, kinds, strict=True) if k not in _WRITES),)
    called = dict(zip(map(str, signature.user_inputs), names, strict=True))
    for value, spec in zip(returned, signature.output_specs, strict=True):
        if spec.kind is _WRITE:
            line = source_line(value)
            warnings.warn(
                f"forward writes to its input '{called[str(spec.target)]}'"
                f"{f' ({line})' if line else ''}: a compiled model computes with what is written, "
                "and leaves the tensor that it was given as it was; write to a clone, so that the "
                "model does the same",
                stacklevel=2,
            )


def refuse_strangers(outputs: Sequence[Tensor]) -> None:
    """Refuses outputs whose gradient reaches a tensor that does not belong to the model.

    Raises:
        TraceError: there is such a tensor; the graph would hold it as a constant.
    """
    with torch._C.DisableTorchFunction():
        todo: list[Any] = [x.grad_fn for x in outputs]
        seen: set[Any] = set()
        while todo:
            step = todo.pop()
            if step is None or step in seen:
                continue
            seen.add(step)
            todo += [before for before, _ in step.next_functions]
            leaf = getattr(step, "variable", None)
            if leaf is not None and not isinstance(leaf, FakeTensor):
                raise TraceError(
                    f"the loss depends on a tensor outside of the model, {tuple(leaf.shape)} "
                    f"{leaf.dtype}, that requires a gradient: got a constant of the graph, which "
                    "nobody trains; expected parameters and buffers of the model; register it in "
                    "the model, or, if it is not trained (a teacher), call it under "
                    "torch.no_grad() or with requires_grad_(False)"
                )


def refuse_cut(program: Program) -> None:
    """Refuses a loss that forward has cut off from every parameter and input that learns."""
    if program.begins or not program.learning:
        return
    cuts = program.gm.graph.find_nodes(op="call_function", target=aten.detach.default)
    lines = dict.fromkeys(line for node in cuts if (line := source_line(node)))
    at = f" (forward detaches at {', '.join([*lines][:4])})" if lines else ""
    names = [program.parameters.get(n) or program.inputs[n] for n in program.learning]
    raise TraceError(
        f"the loss has no gradient{at}: got one in which none of {len(names)} trainable tensors "
        f"({', '.join(names[:4])}) has a part; expected a loss from which a gradient reaches them; "
        "take detach(), no_grad() and argmax out of the way to the loss; for a model that is "
        "evaluated alone, call eval() or requires_grad_(False) before compile"
    )


def _past_autograd(call: fx.Node, root: fx.Node) -> TraceError:
    lines = str(call.meta.get("stack_trace") or "").strip().splitlines()
    where = f" ({lines[-2].strip()}: `{lines[-1].strip()}`)" if len(lines) > 1 else ""
    return TraceError(
        f"forward writes to a tensor with a gradient inside torch.no_grad() or through detach(): "
        f"{call.target} on '{root}'{where}; expected a new tensor there, as autograd does not see "
        "such a write and no op of a graph says that; write `y = y + (new - y).detach()`"
    )


def trainable(exported: ExportedProgram) -> set[str]:
    """Returns the names of the placeholders of parameters that require a gradient."""
    held = exported.graph_signature.inputs_to_parameters
    return {n for n, name in held.items() if exported.state_dict[name].requires_grad}


def flowing(graph: fx.Graph, learning: set[str]) -> set[object]:
    """Returns the nodes whose results carry a gradient."""
    found: set[object] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            flows = node.name in learning
        elif node.target is _BLOCK and not node.args[0]:
            flows = False
        else:
            cut = node.target in (aten.detach.default, aten.detach_.default)
            flows = not cut and _may_flow(node) and any(n in found for n in node.all_input_nodes)
        if flows:
            found.add(node)
    return found


def _may_flow(node: fx.Node) -> bool:
    """Whether any result is a floating or complex tensor, which can have a gradient."""
    leaves = tree_leaves(node.meta.get("val"))
    tensors = (t for t in leaves if isinstance(t, Tensor))
    return any(t.is_floating_point() or t.is_complex() for t in tensors)


def _writes(graph: fx.Graph) -> Iterator[tuple[fx.Node, fx.Node, bool]]:
    """Yields (call that writes, node of the base tensor, whether the write is through `detach`)."""
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
    """Whether a call returns its first operand, a view of it, or a part of it."""
    if node.target is operator.getitem:
        return True
    if not isinstance(node.target, OpOverload) or not node.args:
        return False
    first, *_ = node.target._schema.arguments
    return first.alias_info is not None
