"""`dcpc::cumprod`: torch's cumprod, with a backward whose graph is the same at every length.

torch differentiates `cumprod` on fake tensors one position after the other: a graph of thousands of
calls for one length alone. Here backward is one call, which runs torch's own formula.
"""

from typing import Any

import torch
from torch import Tensor, fx

from dcpc.trace.canonical.editor import Editor

aten = torch.ops.aten

PIECES = 4


@torch.library.custom_op("dcpc::cumprod", mutates_args=())
def cumprod(x: Tensor, dim: int) -> Tensor:
    """Returns the cumulative products along a dim."""
    return torch.cumprod(x, dim)


@torch.library.custom_op("dcpc::cumprod_backward", mutates_args=())
def cumprod_backward(grad: Tensor, x: Tensor, dim: int, out: Tensor) -> Tensor:
    """Returns the gradient of x, contiguous, from the gradient of the cumulative products `out`.

    Where an element is 0 torch needs more than twice the memory, which no plan contains. So such
    tensors are handled in pieces along another dim.
    """
    dim %= x.ndim
    if x.shape[dim] <= 1 or not x.numel():  # torch would return `grad` itself
        return grad.clone(memory_format=torch.contiguous_format)
    others = [d for d in range(x.ndim) if d != dim]
    if not others or not bool((x == 0).any()):
        found: Tensor = aten.cumprod_backward.default(grad, x, dim, out)
        return found.contiguous()
    result = x.new_empty(x.shape)
    along = max(others, key=lambda d: x.shape[d])
    operands = [t.tensor_split(PIECES, along) for t in (result, grad, x, out)]
    for to, *rest in zip(*operands, strict=True):
        to.copy_(aten.cumprod_backward.default(rest[0], rest[1], dim, rest[2]))
    return result


@cumprod.register_fake
def _(x: Tensor, dim: int) -> Tensor:
    return x.new_empty(x.shape)


@cumprod_backward.register_fake
def _(grad: Tensor, x: Tensor, dim: int, out: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0], output)
    ctx.dim = inputs[1]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    x, out = ctx.saved_tensors
    return torch.ops.dcpc.cumprod_backward(grad, x, ctx.dim, out), None


cumprod.register_autograd(_backward, setup_context=_setup)


def cumprod_of_any_length(node: fx.Node, edit: Editor) -> fx.Node | None:
    """Rewrites torch's cumprod of floating or complex numbers to `dcpc::cumprod`."""
    source, dim, *_ = node.args
    assert isinstance(source, fx.Node)
    dtype: Any = node.kwargs.get("dtype") or source.meta["val"].dtype
    if not (dtype.is_floating_point or dtype.is_complex) or source.meta["val"].ndim == 0:
        return None
    if dtype != source.meta["val"].dtype:
        source = edit.call(aten._to_copy.default, source, dtype=dtype)
    return edit.call(torch.ops.dcpc.cumprod.default, source, dim)
