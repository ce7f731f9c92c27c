"""torch's own choice of what to make again, `activation_memory_budget`, run for real.

    model -> joint graph (AOTAutograd, static sizes) -> min-cut partitioner at a ratio and solver
          -> forward and backward graphs, run by graphs that free each value after its last use

The graphs are run as they are, without autograd around them, so that nothing but what the
partitioner decided counts in the measured peak. Attention is the CPU's fused kernel, which torch
knows no FLOPs of and does not list among the expensive ops, so that it would be made again as if it
cost nothing; both are mended here, as torch has them for the GPU's kernels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from functorch.compile import make_boxed_func
from torch import Tensor, fx, nn
from torch._functorch import config, partitioners
from torch._functorch.aot_autograd import aot_function
from torch._functorch.partitioners import (
    default_partition,
    min_cut_rematerialization_partition,
)
from torch.func import functional_call
from torch.utils.flop_counter import flop_registry, register_flop_formula

from dcpc.codegen.variant.boxed import boxed_python

aten = torch.ops.aten


def attention_flops(query: Sequence[int], key: Sequence[int], value: Sequence[int]) -> int:
    """Returns the FLOPs of both products over all pairs of query and key."""
    b, h, queries, width = query
    return 2 * b * h * queries * key[2] * (width + value[3])


def forward_flops(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """Returns the FLOPs of an attention op by its operands' shapes."""
    return attention_flops(query, key, value)


def backward_flops(_: Any, query: Any, key: Any, value: Any, *__: Any, **___: Any) -> int:
    """Returns those of its backward: five products for two, as the scores are made again."""
    return attention_flops(query, key, value) * 5 // 2


def register_attention() -> None:
    """Gives torch's FLOP counter, and so its partitioner, the formulas of the CPU's attention."""
    for op, formula in (
        (aten._scaled_dot_product_flash_attention_for_cpu, forward_flops),
        (aten._scaled_dot_product_flash_attention_for_cpu_backward, backward_flops),
        (torch.ops.dcpc.attention_forward, forward_flops),
        (torch.ops.dcpc.attention_backward, backward_flops),
    ):
        if op not in flop_registry:
            register_flop_formula(op)(formula)


def _expensive_attention(listed: partitioners.OpTypes) -> partitioners.OpTypes:
    kernel = aten._scaled_dot_product_flash_attention_for_cpu
    return replace(listed, compute_intensive_ops=listed.compute_intensive_ops | {kernel})


@dataclass(frozen=True, slots=True)
class TorchJoint:
    """A joint graph as AOTAutograd makes it, and what to call it with.

    Attributes:
        gm: forward and backward in one graph.
        inputs: of the joint graph: fake ones and the loss's gradient.
        options: what AOTAutograd tells a partitioner.
        primals: the real parameters, buffers and inputs, in the order of the placeholders.
        trainable: how many of them, counted from the first, are parameters.
    """

    gm: fx.GraphModule
    inputs: Any
    options: Mapping[str, Any]
    primals: tuple[Tensor, ...]
    trainable: int


@dataclass(frozen=True, slots=True)
class TorchPartition:
    """What the partitioner made of a joint graph.

    Attributes:
        forward: takes the primals; returns the loss and what is saved.
        backward: takes what is saved and the loss's gradient; returns gradients.
        joint: where it comes from.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    joint: TorchJoint

    def run(self) -> Tensor:
        """Runs forward and backward; returns the loss, having held all gradients."""
        arguments: list[Any] = list(self.joint.primals)
        loss, *saved = boxed_python(self.forward)(arguments)
        saved.append(torch.ones_like(loss))
        gradients = boxed_python(self.backward)(saved)
        del gradients
        return loss


def _copy(gm: fx.GraphModule) -> fx.GraphModule:
    """Returns a copy; a deep copy would copy constants, which are fake while traced."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    return fx.GraphModule(gm, graph)


def torch_joint(model: nn.Module, inputs: Mapping[str, Tensor]) -> TorchJoint:
    """Returns the joint graph of a model whose forward returns the loss, at these sizes."""
    parameters = dict(model.named_parameters())
    buffers = dict(model.named_buffers())
    names = [*parameters, *buffers]
    values = [*parameters.values(), *buffers.values()]
    kept: list[Any] = []

    def loss_of(*flat: Tensor) -> Tensor:
        state = dict(zip(names, flat, strict=False))
        given = dict(zip(inputs, flat[len(names) :], strict=True))
        out = functional_call(model, state, (), given, tie_weights=True)
        return out if isinstance(out, Tensor) else out.loss

    def keep(gm: fx.GraphModule, joint_inputs: Any, **options: Any) -> Any:
        kept.append((_copy(gm), joint_inputs, options))
        return default_partition(gm, joint_inputs, **options)

    def as_it_is(gm: fx.GraphModule, _: Any) -> Any:
        return make_boxed_func(gm)

    flat = (*values, *inputs.values())
    aot_function(loss_of, as_it_is, as_it_is, partition_fn=keep)(*flat)
    gm, joint_inputs, options = kept[0]
    return TorchJoint(gm, joint_inputs, options, tuple(t.detach() for t in flat), len(parameters))


def torch_partition(joint: TorchJoint, ratio: float, solver: str) -> TorchPartition:
    """Returns what the partitioner makes of a joint graph at a budget.

    Args:
        joint: not changed.
        ratio: of the activations that the least recompute saves, 0 to 1.
        solver: of the knapsack, "dp" or "ilp".
    """
    gm = _copy(joint.gm)
    listed = _expensive_attention(partitioners.get_default_op_list())
    with (
        config.patch(activation_memory_budget=ratio, activation_memory_budget_solver=solver),
        mock.patch.object(partitioners, "get_default_op_list", return_value=listed),
    ):
        forward, backward = min_cut_rematerialization_partition(gm, joint.inputs, **joint.options)
    return TorchPartition(forward, backward, joint)
