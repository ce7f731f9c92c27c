"""Custom ops such as a user's library has, with autograd, none of which has a sharding rule."""

from typing import Any

import torch
from torch import Tensor


def _fake(x: Tensor, *rest: object) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("dcpctest::rowwise", mutates_args=())
def rowwise(x: Tensor, scale: Tensor) -> Tensor:
    """Each row over its own largest element, times a scale a column."""
    return x / (1 + x.abs().amax(-1, keepdim=True)) * scale


@torch.library.custom_op("dcpctest::scan", mutates_args=())
def scan(x: Tensor, decay: float) -> Tensor:
    """y[t] = decay * y[t - 1] + x[t] along dim 1."""
    y = torch.zeros_like(x)
    state = torch.zeros_like(x.select(1, 0)) if x.shape[1] else None
    for t in range(x.shape[1]):
        state = decay * state + x.select(1, t)
        y.select(1, t).copy_(state)
    return y


@torch.library.custom_op("dcpctest::contract", mutates_args=())
def contract(x: Tensor, w: Tensor) -> Tensor:
    """`b s i, o i -> b s o`."""
    return torch.einsum("bsi,oi->bso", x, w)


@torch.library.custom_op("dcpctest::mix", mutates_args=())
def mix(x: Tensor) -> Tensor:
    """Every element by the largest of all."""
    return x / (1 + x.abs().amax()) if x.numel() else x.clone()


@torch.library.custom_op("dcpctest::rarely", mutates_args=())
def rarely(x: Tensor) -> Tensor:
    """Elementwise, unless some element is large."""
    return x * 2 if x.numel() and bool(x.amax() > 100) else x + 0


@torch.library.custom_op("dcpctest::noisy", mutates_args=())
def noisy(x: Tensor) -> Tensor:
    """Random, which no tag says."""
    return x + torch.rand_like(x)


@torch.library.custom_op("dcpctest::halves", mutates_args=())
def halves(x: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """The first columns, as many as a length says, added up; and the sign of each element."""
    return x[..., :length].sum(-1), torch.sign(x)


for op in (rowwise, scan, contract, mix, rarely, noisy):
    op.register_fake(_fake)


@contract.register_fake
def _contract_fake(x: Tensor, w: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], w.shape[0]))


@halves.register_fake
def _halves_fake(x: Tensor, length: int) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape[:-1]), torch.empty_like(x)


def _over_largest(g: Tensor, x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Gradient of x / (1 + the largest |x| over some dims)."""
    largest = x.abs().amax(dims, keepdim=True)
    at = x.sign() * (x.abs() == largest)
    return g / (1 + largest) - at * (g * x).sum(dims, keepdim=True) / (1 + largest) ** 2


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*(x for x in inputs if isinstance(x, Tensor)))
    ctx.numbers = [x for x in inputs if not isinstance(x, Tensor)]


def _rowwise_backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
    x, scale = ctx.saved_tensors
    rows = x / (1 + x.abs().amax(-1, keepdim=True))
    return _over_largest(g * scale, x, (-1,)), (g * rows).flatten(0, -2).sum(0)


def _scan_backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
    return torch.ops.dcpctest.scan(g.flip(1), ctx.numbers[0]).flip(1), None


def _contract_backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
    x, w = ctx.saved_tensors
    return torch.einsum("bso,oi->bsi", g, w), torch.einsum("bso,bsi->oi", g, x)


def _mix_backward(ctx: Any, g: Tensor) -> Tensor:
    return _over_largest(g, ctx.saved_tensors[0], (0, 1, 2))


rowwise.register_autograd(_rowwise_backward, setup_context=_keep)
scan.register_autograd(_scan_backward, setup_context=_keep)
contract.register_autograd(_contract_backward, setup_context=_keep)
mix.register_autograd(_mix_backward, setup_context=_keep)
