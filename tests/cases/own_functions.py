"""Autograd functions as models have them: what they compute, and gradients of their own."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable


class Rounded(Function):
    """Straight through: rounds, and passes gradients on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return g


class Reversed(Function):
    """Turns gradients round, by a number that is kept as an attribute."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float, name: str | None = None) -> Tensor:
        ctx.scale = scale
        return x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:  # type: ignore[override]
        return -ctx.scale * g, None, None


class Clipped(Function):
    """Clips each element of its gradient: pieces do, sums of parts do not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return g.clamp(-1e-3, 1e-3)


class Normed(Function):
    """Gives its gradient the norm 1: neither pieces nor sums of parts do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return g / g.norm()


class Centered(Function):
    """Leaves the mean over positions out of its gradient, but not out of its result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sin()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return g - g.mean(1, keepdim=True)


class Gelu(Function):
    """As Bloom's: saves its operand; `setup_context`, and a backward that torch does not see."""

    @staticmethod
    def forward(x: Tensor, cube: float) -> Tensor:  # type: ignore[override]
        return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + cube * x * x)))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.cube = inputs[1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        t = torch.tanh(0.79788456 * x * (1 + ctx.cube * x * x))
        inner = 0.79788456 + 0.1070322243 * x * x
        return (0.5 * x * ((1 - t * t) * inner) + 0.5 * (1 + t)) * g, None


class Several(Function):
    """Several results, one without a gradient; saves a result; gradients may be absent."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, half: bool) -> Any:
        ctx.set_materialize_grads(False)
        y, largest = torch.exp(-x * x), x.argmax(-1)
        mask = (x > 0).to(x.dtype)
        ctx.mark_non_differentiable(mask)
        ctx.save_for_backward(y, x, weight)
        ctx.half = half
        return y, x * weight, mask, largest, None

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, h: Tensor | None, *_: Any) -> Any:  # type: ignore
        y, x, weight = ctx.saved_tensors
        found = torch.zeros_like(x)
        if g is not None:
            found = found + g * y * -2 * x
        if h is not None:
            found = found + h * weight * (0.5 if ctx.half else 1)
        own = (h * x).sum((0, 1)) if h is not None and ctx.needs_input_grad[1] else None
        return found, own, None


class Product(Function):
    """A linear layer whose weight's gradient is halved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return g @ weight, 0.5 * g.flatten(0, -2).T @ x.flatten(0, -2)


class Outer(Function):
    """Applies another function, and differentiates within its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, power: int) -> Tensor:
        ctx.save_for_backward(x)
        ctx.power = power
        return Rounded.apply(x) + x.sin() ** power

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:  # type: ignore[override]
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = Clipped.apply(x) + x.sin() ** ctx.power
        return torch.autograd.grad(y, x, g)[0], None


class LinearCrossEntropy(Function):
    """As Liger's: logits in chunks of classes, and gradients made in forward."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, ignored: int) -> Tensor:
        keep = labels != ignored
        chosen, share = labels.where(keep, 0), (keep / keep.sum()).to(hidden.dtype)[..., None]
        chunks = weight.chunk(2)
        sums = torch.stack([(hidden @ w.T).logsumexp(-1) for w in chunks]).logsumexp(0)
        loss = ((sums - (hidden * weight[chosen]).sum(-1)) * share[..., 0]).sum()
        given, own = -weight[chosen] * share, torch.zeros_like(weight)
        own.index_add_(0, chosen.flatten(), -(hidden * share).flatten(0, -2))
        for i, w in enumerate(chunks):
            d = (hidden @ w.T - sums[..., None]).exp() * share
            given += d @ w
            own[3 * i : 3 * i + 3] += d.flatten(0, -2).T @ hidden.flatten(0, -2)
        ctx.save_for_backward(given, own)
        return loss

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:  # type: ignore[override]
        hidden, weight = ctx.saved_tensors
        return hidden * g, weight * g, None, None


class Whole(Function):
    """A mean over all: no piece of it says what the whole does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.n, ctx.shape = x.numel(), x.shape
        return (x * x).mean()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return (g * torch.tensor(1 / 3) / ctx.n).expand(ctx.shape).clamp(-1e-4, 1e-4)


class Model(nn.Module):
    """A function between two linears."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()
        self.scale = nn.Parameter(torch.rand(4, dtype=torch.float64))
        self.table = nn.Parameter(torch.rand(6, 4, dtype=torch.float64))
        self.function = function

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        y = self.function(self, self.a(x), ids)
        return self.b(y).square().mean() + 0.1 * (self.scale.sum() + self.table.sum())


def _several(m: Model, x: Tensor, ids: Tensor) -> Tensor:
    y, z, mask, largest, _ = Several.apply(x, m.scale, True)  # type: ignore[no-untyped-call]
    return y + z * mask + largest[..., None] + Several.apply(x, m.scale, False)[1]


def _in_a_loop(m: Model, x: Tensor, ids: Tensor) -> Tensor:
    for i in range(3):
        x = Reversed.apply(Gelu.apply(x, 0.044715), 0.5 + i)  # type: ignore[no-untyped-call]
    return x


FUNCTIONS = {
    "straight through": lambda m, x, ids: Rounded.apply(3 * x),
    "reversed": lambda m, x, ids: Reversed.apply(x, 0.7, None),
    "clipped": lambda m, x, ids: Clipped.apply(x),
    "normed": lambda m, x, ids: Normed.apply(x),
    "centered": lambda m, x, ids: Centered.apply(x),
    "gelu": lambda m, x, ids: Gelu.apply(x, 0.044715),
    "several": _several,
    "product": lambda m, x, ids: Product.apply(x, m.a.weight),
    "nested": lambda m, x, ids: Outer.apply(x, 2),
    "losses": lambda m, x, ids: x * LinearCrossEntropy.apply(x, m.table, ids, 0),
    "whole": lambda m, x, ids: x * Whole.apply(x),
    "loop": _in_a_loop,
    "sizes": lambda m, x, ids: Reversed.apply(x, 1.0 / x.shape[1]),
}
