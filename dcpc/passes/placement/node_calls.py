"""Predicts the calls that a node becomes, forward and backward, before anything is lowered.

Counted as the profile counts those of the lowered graphs: class, FLOPs and bytes of a forward call
are its own; the backward is that of the op's kind. What a lowered graph has besides is left out:
copies for a layout, the parts that a composite op is taken apart into.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from dcpc.ir import TensorInfo
from dcpc.ops.routed import routed_flops
from dcpc.ops.tiled import tiling_of
from dcpc.passes.sharding.rule_types import OpSharding
from dcpc.symbolic_profile.ops.elements import LOOKUPS, elementwise


class CallPattern(NamedTuple):
    """One call of a node, however the node is split.

    Attributes:
        op_class: class of the op, as in `ir.Work`.
        forward: whether it is a call of forward.
        moved: indices of the tensors read and written: operands, then the output.
        elements: FLOPs for each element of the largest of these tensors.
        product: FLOPs as a multiple of the rule's product.
    """

    op_class: str
    forward: bool
    moved: tuple[int, ...]
    elements: float = 0.0
    product: float = 0.0


def call_patterns(
    target: Any, rule: OpSharding, tensors: Sequence[TensorInfo], readers: int
) -> tuple[CallPattern, ...]:
    """Returns the calls of a node.

    Args:
        target: op of the node.
        rule: sharding rule of the node.
        tensors: operands of the node, then its output.
        readers: number of users with a gradient; their gradients are added.
    """
    name = target._schema.name if isinstance(target, torch._ops.OpOverload) else str(target)
    if rule.is_view:
        found = [*_view(name, tensors)]
    elif flops := routed_flops(target):
        found = [*_region(flops, tensors, 2)]
    elif tiling := tiling_of(target):
        found = [*_region(tiling.product_flops, tensors, 3)]
    elif rule.multiplies:
        found = [*_product(name, rule, tensors)]
    else:
        found = [*_elementwise(name, target, rule, tensors)]
    out = len(tensors) - 1
    if tensors[out].requires_grad:
        found += [CallPattern("pointwise", False, (out, out, out), 1.0)] * (readers - 1)
    return tuple(found)


def dtype_of(tensors: Sequence[TensorInfo]) -> torch.dtype:
    """Returns the dtype in which a node computes: that of its first floating-point tensor."""
    floating = (t.dtype for t in tensors if t.dtype.is_floating_point)
    return next(floating, tensors[0].dtype)


def _view(name: str, tensors: Sequence[TensorInfo]) -> Iterator[CallPattern]:
    """Yields the backward of a view: zero padding for a part, a sum for an expand."""
    if not tensors[-1].requires_grad or tensors[0].numel == tensors[-1].numel:
        return
    if "expand" in name:
        yield CallPattern("reduction", False, (0, len(tensors) - 1), 1.0)
    else:
        yield CallPattern("copy", False, (0, 0))


def _product(name: str, rule: OpSharding, tensors: Sequence[TensorInfo]) -> Iterator[CallPattern]:
    """Yields a product, and one for the gradient of each factor; attention is one kernel each."""
    out = len(tensors) - 1
    every = (*range(out + 1),)
    if "attention" in name:
        yield CallPattern("attention", True, every, product=1.0)
        if tensors[out].requires_grad:
            d, e = tensors[0].shape[3], tensors[2].shape[3]
            known = d.is_Integer and e.is_Integer
            ratio = float((3 * d + 2 * e) / (d + e)) if known else 2.5
            yield CallPattern("attention", False, every + every, product=ratio)
        return
    op_class = "convolution" if "conv" in name else "matmul"
    yield CallPattern(op_class, True, every, product=1.0)
    if not tensors[out].requires_grad:
        return
    made = {n for dim in rule.output for n in dim}
    for i in range(out):
        if tensors[i].requires_grad:
            if {n for dim in rule.operands[i] for n in dim} <= made:  # a bias
                yield CallPattern("reduction", False, (i, out), 1.0)
            else:
                yield CallPattern(op_class, False, every, product=1.0)


def _region(flops: float, tensors: Sequence[TensorInfo], times: int) -> Iterator[CallPattern]:
    """Yields the products of a region for its result's elements, and its reads.

    Args:
        flops: FLOPs of forward for each element of the result.
        tensors: operands, then the result.
        times: FLOPs of backward as a multiple of forward's.
    """
    out = len(tensors) - 1
    products = CallPattern("matmul", True, (out,), flops)
    read = CallPattern("copy", True, (*range(out),))
    yield from (products, read)
    if tensors[out].requires_grad:
        yield from [each._replace(forward=False) for each in (products, read)] * times


def _elementwise(
    name: str, target: Any, rule: OpSharding, tensors: Sequence[TensorInfo]
) -> Iterator[CallPattern]:
    """Yields the call, and those for gradients according to the op's linearity."""
    overload = isinstance(target, torch._ops.OpOverload)
    op_class, flops = elementwise(target) if overload else ("unpriced", 1)
    out = len(tensors) - 1
    every = (*range(out + 1),)
    is_lookup = name.split("::")[-1] in LOOKUPS
    yield CallPattern(op_class, True, (out, out, *range(1, out)) if is_lookup else every, flops)
    wanted = [i for i in range(out) if tensors[i].requires_grad]
    if not tensors[out].requires_grad:
        return
    if is_lookup:
        yield CallPattern("reduction", False, every, 1.0)
    elif rule.linear == "one":
        yield from [CallPattern(op_class, False, every, flops)] * len(wanted)
    elif rule.linear == "first":
        yield CallPattern(op_class, False, (*wanted, out), flops)
    elif rule.linear == "none":
        twice = 2 if "norm" in name else 1
        yield CallPattern(op_class, False, (*every, *wanted), twice * flops)
