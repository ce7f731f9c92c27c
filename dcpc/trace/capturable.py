"""Functions that torch cannot capture as they are, by the same formulas.

    gaussian_nll_loss                 ->  without its check that no variance is below 0
    margin_ranking_loss (none, sum)   ->  plain ops: torch's decomposition takes no such reduction
    hinge_embedding_loss (none, sum)  ->  the same
    take_along_dim                    ->  expand, gather: its C++ reads sizes as integers
    max_pool1d                        ->  max_pool1d_with_indices: it fixes the length
    std_mean of a dim                 ->  std, var_mean: torch's decomposition has other arguments
    pad(x, mode="circular")           ->  cat of the ends and x: torch's writes to an empty tensor

Calls of other kinds are torch's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


def _reduced(each: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return each
    return each.mean() if reduction == "mean" else each.sum()


def _gaussian_nll(
    input: Tensor,
    target: Tensor,
    var: Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Any:
    """Returns the loss; of a variance below 0, which torch refuses, that of `eps`."""
    if isinstance(var, float) or reduction not in ("none", "mean", "sum"):
        return NotImplemented
    if var.ndim == input.ndim - 1:
        var = var.unsqueeze(-1)
    # The gradient passes by the clamp, as torch's in-place one is not differentiated.
    held = var.detach().clamp(min=eps) + (var - var.detach())
    each = 0.5 * (torch.log(held) + (input - target) ** 2 / held)
    return _reduced(each + 0.5 * math.log(2 * math.pi) if full else each, reduction)


def _margin_ranking(
    input1: Tensor,
    input2: Tensor,
    target: Tensor,
    margin: float = 0.0,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Any:
    old = size_average is not None or reduce is not None
    if old or reduction not in ("none", "sum") or not input1.ndim == input2.ndim == target.ndim:
        return NotImplemented
    return _reduced((-target * (input1 - input2) + margin).clamp_min(0), reduction)


def _hinge_embedding(
    input: Tensor,
    target: Tensor,
    margin: float = 1.0,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Any:
    if size_average is not None or reduce is not None or reduction not in ("none", "sum"):
        return NotImplemented
    far = torch.where(target != 1, (margin - input).clamp_min(0), 0)
    return _reduced(far + torch.where(target != -1, input, 0), reduction)


def _take_along(input: Tensor, indices: Tensor, dim: int | None = None) -> Any:
    if dim is None or input.ndim != indices.ndim:
        return NotImplemented
    along = dim % input.ndim

    def expanded(x: Tensor, other: Tensor) -> Tensor:
        ones = [d != along and isinstance(n, int) and n == 1 for d, n in enumerate(x.shape)]
        pairs = zip(ones, x.shape, other.shape, strict=True)
        return x.expand([theirs if one else own for one, own, theirs in pairs])

    return expanded(input, indices).gather(along, expanded(indices, input))


def _std_mean(*args: Any, **kwargs: Any) -> Any:
    return torch.std(*args, **kwargs), torch.var_mean(*args, **kwargs)[1]


def _max_pool(*args: Any, return_indices: bool = False, **kwargs: Any) -> Any:
    if kwargs.get("stride", 0) is None:
        del kwargs["stride"]
    both = torch.max_pool1d_with_indices(*args, **kwargs)
    return both if return_indices else both[0]


def _pad(x: Tensor, pad: list[int], mode: str = "constant", value: float | None = None) -> Any:
    """Returns the padded tensor; circular padding of the last dims, the very last one first."""
    given = [n for n in pad if isinstance(n, int) and n >= 0]
    if mode != "circular" or len(given) < len(pad):
        return NotImplemented
    for i, (before, after) in enumerate(zip(pad[::2], pad[1::2], strict=True)):
        dim = x.ndim - 1 - i
        size = x.shape[dim]
        parts = [x.narrow(dim, size - before, before)] * bool(before) + [x]
        parts += [x.narrow(dim, 0, after)] * bool(after)
        x = torch.cat(parts, dim) if len(parts) > 1 else x
    return x


_INSTEAD: Mapping[Any, Callable[..., Any]] = {
    F.gaussian_nll_loss: _gaussian_nll,
    F.margin_ranking_loss: _margin_ranking,
    F.hinge_embedding_loss: _hinge_embedding,
    torch.take_along_dim: _take_along,
    Tensor.take_along_dim: _take_along,
    F.max_pool1d: _max_pool,
    F.pad: _pad,
    torch.max_pool1d: _max_pool,
    torch.std_mean: _std_mean,
}


class Capturable(TorchFunctionMode):
    """Calls these formulas while a model is captured."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Returns what the call makes."""
        kwargs = kwargs or {}
        if func in _INSTEAD:
            found = _INSTEAD[func](*args, **kwargs)
            if found is not NotImplemented:
                return found
        return func(*args, **kwargs)
