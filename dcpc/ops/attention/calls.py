"""The calling convention of the attention ops: tensors, then the fields of one named tuple.

dcpc::<name>(q, k, v, mask=None, keep=None, segment=None, *, <fields>) -> out
    dcpc::<name>_forward(q, k, v, mask, keep, segment, <fields>)  -> out, logsumexp
    dcpc::<name>_backward(grad, q, k, v, mask, keep, segment, out, logsumexp, <fields>)
        -> dq, dk, dv
    dcpc::<name>_mask_backward(...), of the same arguments  -> dq, dk, dv, dmask
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dcpc.ops.arguments import arguments
from dcpc.ops.attention.spec import Attended, empty_gradient

Hiding = tuple[Tensor | None, Tensor | None, Tensor | None]  # mask, keep and segment

_OPERANDS = "Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor? keep, Tensor? segment"
_library = torch.library.Library("dcpc", "FRAGMENT")


def forward_schema(fields: Any) -> str:
    """Returns the schema of a forward op with a named tuple's fields as arguments."""
    return f"({_OPERANDS}, {arguments(fields)}) -> (Tensor, Tensor)"


def backward_schema(fields: Any, of_mask: bool = False) -> str:
    """Returns the schema of the backward: gradients of q, k, v, and of the mask if requested."""
    operands = _OPERANDS.replace("Tensor? mask", "Tensor mask") if of_mask else _OPERANDS
    gradients = ", ".join(["Tensor"] * (4 if of_mask else 3))
    saved = "Tensor out, Tensor logsumexp"
    return f"(Tensor grad_out, {operands}, {saved}, {arguments(fields)}) -> ({gradients})"


def of_backward(given: Sequence[Any]) -> tuple[Attended, Hiding, list[Any]]:
    """Returns a backward's arguments: operands, tensors that hide keys, and other fields."""
    grad, q, k, v, mask, keep, segment, out, lse, *rest = given
    return Attended(grad, q, k, v, out, lse), (mask, keep, segment), rest


def save_call(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Saves a forward's tensors and fields for its backward."""
    tensors, ctx.rest = inputs[:6], inputs[6:]
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*tensors, *output)


def empty_backward(grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Any:
    """Returns uninitialised gradients of q, k and v, as a backward op returns them."""
    return empty_gradient(query), empty_gradient(key), empty_gradient(value)


def empty_mask_backward(*given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the same as `empty_backward`, and an uninitialised gradient of the mask."""
    mask = given[4]
    return *empty_backward(*given), mask.new_empty(mask.shape)


def backward_by(name: str) -> Callable[..., tuple[Any, ...]]:
    """Returns the autograd backward of an op, which computes a mask's gradient if needed."""

    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
        wanted = ctx.needs_input_grad[3]
        op = getattr(torch.ops.dcpc, f"{name}_mask_backward" if wanted else f"{name}_backward")
        found = op(grad, *ctx.saved_tensors, *ctx.rest)
        dmask = found[3] if wanted else None
        return (*found[:3], dmask, *(None,) * (2 + len(ctx.rest)))

    return backward


def define_output(name: str, fields: Any) -> None:
    """Registers the op that returns a forward's first result, with the fields as keywords."""
    operands = re.sub(r"(Tensor\? \w+)", r"\1=None", _OPERANDS)
    _library.define(f"{name}({operands}, *, {arguments(fields, defaults=True)}) -> Tensor")

    def output(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None = None,
        keep: Tensor | None = None,
        segment: Tensor | None = None,
        **rest: Any,
    ) -> Any:
        op = getattr(torch.ops.dcpc, f"{name}_forward")
        return op(query, key, value, mask, keep, segment, *fields(**rest))[0]

    _library.impl(name, output, "CompositeImplicitAutograd")
