"""Outputs besides the loss take no gradient: backward through one says so, and drops none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from dcpc.codegen.lower.output_pieces import OutputPiece
from dcpc.errors import DispatchError
from dcpc.ir import Program


def refusing_gradients(
    program: Program, tensors: Sequence[Tensor | OutputPiece]
) -> tuple[Tensor | OutputPiece, ...]:
    """Returns a call's outputs, of which those that would learn refuse a gradient.

    Without `torch.no_grad()` these tensors require a gradient, as in the plain model; they keep no
    activations alive.

    Args:
        program: program that returned them.
        tensors: loss, then the outputs, or pieces of them.
    """
    if not torch.is_grad_enabled():
        return tuple(tensors)
    nodes = {n.name: n for n in program.gm.graph.nodes}
    anchor = torch.zeros((), requires_grad=True)
    found = [tensors[0]]
    for name, x in zip(program.results[1:], tensors[1:], strict=True):
        sources = nodes[name].all_input_nodes  # the node detaches what forward returned
        learns = any(n.name in program.info and program.info[n.name].requires_grad for n in sources)
        if not learns:
            found.append(x)
        elif isinstance(x, OutputPiece):
            found.append(replace(x, tensor=_refusing(x.tensor, anchor)))
        else:
            found.append(_refusing(x, anchor))
    return tuple(found)


def _refusing(x: Tensor, anchor: Tensor) -> Tensor:
    return _NoGradient.apply(x, anchor)  # type: ignore[no-any-return, no-untyped-call]


class _NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> NoReturn:
        raise DispatchError(
            "backward through an output of a compiled call: got a gradient for a tensor that is "
            "not the loss; expected backward through the loss alone, the one that gradients are "
            "made for; add what is trained on to the loss in forward or in loss=, or detach() the "
            "output"
        )
