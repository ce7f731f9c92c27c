"""Calls of rows that a mask chose: of each row alone, of all chosen ones, or refused by line.

f(x[mask]), row by row       ->  f of all places' rows
x[mask].mean(), mse_loss     ->  a sum in which rows that are not chosen are 0, by the count
cross_entropy(x[mask], ...)  ->  of all places, whose label is ignored where none is chosen

That a call has each row alone is tried on small random rows, and on some of these alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from dcpc.trace.formulas.chosen_rows import (
    as_selected,
    is_chosen,
    keep_coordinates,
    kept,
    marked,
    mask_of,
    refused,
)
from dcpc.trace.formulas.under_autocast import in_float32

ROWS, SOME = 11, [4, 1, 3, 9, 7, 2, 6]  # rows of a trial, and those of its second half
_VIEWS = ("squeeze", "flatten", "view", "reshape")
# Parts of rows by number look whole in a trial of few; of isin all elements are there.
_NEVER = ("split", "chunk", "tensor_split", "split_with_sizes", "narrow", "roll", "isin")


def call_of_rows(func: Any, args: Sequence[Any], kwargs: Any, mask: Tensor) -> Any:
    """Returns the result of a call with rows that a mask chose.

    Raises:
        TraceError: it is not known to compute each row alone.
    """
    name = func.__name__.partition(".")[0]  # of an op: without its overload
    name = func.__self__.__name__ if name == "__get__" else name
    if (known := _OF_ALL.get(name)) is not None:
        found = known(mask, *args, **kwargs)
        if found is not NotImplemented:
            return found
    part = name in _NEVER or (name == "__getitem__" and not _of_each(args[1]))
    if part or not _each_alone(func, args, kwargs):
        raise refused(
            f"{name}() of rows that a mask chose",
            "compute all rows, and give the mask as a weight (torch.where, ignore_index)",
        )
    found = func(*args, **kwargs)
    found = tree_map(lambda x: marked(x, mask) if isinstance(x, Tensor) else x, found)
    if name in _VIEWS:
        keep_coordinates(found, args[0])
    return found


def _of_each(index: Any) -> bool:
    """Whether an index is of each row: `rows[:, 1]`, `rows[..., None]`."""
    first = index[0] if isinstance(index, tuple) else index
    return first is None or first is Ellipsis or (type(first) is slice and first == slice(None))


def _each_alone(func: Any, args: Sequence[Any], kwargs: Any) -> bool:
    """Whether a call has each row alone: so it is with random rows."""
    generator = torch.Generator().manual_seed(0)

    def drawn(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return int(x.node.hint) if isinstance(x, torch.SymInt) else x
        shape = [ROWS if is_chosen(x) and not d else drawn(n) for d, n in enumerate(x.shape)]
        if not x.is_floating_point():
            return torch.randint(2, shape, generator=generator).to(x.dtype)
        return torch.rand(shape, generator=generator, dtype=torch.float64).to(x.dtype)

    with _disable_current_modes(), torch.random.fork_rng(()):
        whole = tree_map(drawn, (list(args), kwargs))
        pairs = zip(tree_leaves((args, kwargs)), tree_leaves(whole), strict=True)
        rows = {id(x) for given, x in pairs if is_chosen(given)}
        some = tree_map(lambda x: x[SOME] if id(x) in rows else x, whole)
        try:
            all_of, some_of = (tree_leaves(func(*a, **k)) for a, k in (whole, some))
        except Exception:  # of any function
            return False
        return len(all_of) == len(some_of) and all(map(_is_part, some_of, all_of))


def _is_part(some: Any, whole: Any) -> bool:
    if not isinstance(whole, Tensor):
        return bool(some == whole)
    if not whole.ndim or len(whole) != ROWS or some.shape != (len(SOME), *whole.shape[1:]):
        return False
    near = 16 * torch.finfo(whole.dtype).eps if whole.is_floating_point() else 0.0
    return torch.allclose(some.double(), whole[SOME].double(), near, near, equal_nan=True)


def _shape(mask: Tensor, rows: Tensor, dim: int | None = None) -> Any:
    """Returns a size, of which the number of chosen rows is a tensor."""
    shape = (mask.sum(), *rows.shape[1:])
    return shape if dim is None else shape[dim]


def _numel(mask: Tensor, rows: Tensor) -> Tensor:
    return mask.sum() * math.prod(rows.shape[1:])


def _sum(mask: Tensor, rows: Tensor, dim: Any = None, **rest: Any) -> Any:
    dims = [*range(rows.ndim)] if dim is None else [dim] if isinstance(dim, int) else [*dim]
    along = 0 in {d % rows.ndim for d in dims}
    return kept(rows, mask).sum(dims, **rest) if along else NotImplemented


def _mean(mask: Tensor, rows: Tensor, dim: Any = None, **rest: Any) -> Any:
    if (total := _sum(mask, rows, dim, **rest)) is NotImplemented:
        return total
    dims = range(rows.ndim) if dim is None else [dim] if isinstance(dim, int) else dim
    return total / (mask.sum() * math.prod(rows.shape[d] for d in dims if d % rows.ndim))


def _product(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a product of rows with a weight, which may be too large for a trial."""

    def product(mask: Tensor, rows: Tensor, weight: Tensor, bias: Any = None) -> Any:
        alone = mask_of((weight, bias)) is None and weight.ndim == 2 <= rows.ndim
        rest = () if bias is None else (bias,)
        return marked(function(rows, weight, *rest), mask) if alone else NotImplemented

    return product


def _classes(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a loss of labels of all places, ignored where none is chosen."""

    def loss(mask: Tensor, scores: Tensor, labels: Tensor, *rest: Any, **more: Any) -> Any:
        ignored = more.pop("ignore_index", -100)
        hard = not labels.is_floating_point() and labels.ndim == scores.ndim - 1
        if not hard or not is_chosen(scores) or not is_chosen(labels) or len(rest) > 1:
            return NotImplemented
        given = as_selected(scores), kept(as_selected(labels), mask, ignored), *rest
        found = _cast(function, *given, ignore_index=ignored, **more)
        return marked(found, mask) if more.get("reduction") == "none" else found

    return loss


def _elements(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a loss of elements, reduced over the chosen rows."""

    def loss(mask: Tensor, *given: Any, reduction: Any = "mean", **more: Any) -> Any:
        args = [*given]
        if len(args) == 3 and args[2] in (0, 1, 2):  # of an op
            reduction = ("none", "mean", "sum")[args.pop()]
        more = {n: x for n, x in more.items() if x is not None}
        if not _each_alone(function, args, {**more, "reduction": "none"}):
            return NotImplemented
        each = _cast(function, *args, reduction="none", **more)
        if reduction == "batchmean":
            return kept(each, mask).sum() / mask.sum()
        reduced = {"mean": _mean, "sum": _sum}.get(reduction)
        return reduced(mask, each) if reduced else marked(each, mask)

    return loss


def _cast(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    found = in_float32(function)(*args, **kwargs)
    return function(*args, **kwargs) if found is NotImplemented else found


_OF_ALL: Mapping[str, Callable[..., Any]] = {
    **dict.fromkeys(("shape", "size"), _shape),
    **dict.fromkeys(("numel", "nelement"), _numel),
    **{f.__name__: _elements(f) for f in (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss)},
    **{f.__name__: _elements(f) for f in (F.binary_cross_entropy, F.kl_div)},
    "binary_cross_entropy_with_logits": _elements(F.binary_cross_entropy_with_logits),
    **{f.__name__: _classes(f) for f in (F.cross_entropy, F.nll_loss)},
    "sum": _sum,
    "mean": _mean,
    "linear": _product(F.linear),
    "matmul": _product(torch.matmul),
}
