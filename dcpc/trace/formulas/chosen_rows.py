"""Rows that a mask chooses (`x[mask]`), without a size that depends on values.

    x[mask], masked_select, nonzero   ->  a row for each place of the mask, chosen or not
    x[mask] = v, masked_scatter       ->  where(mask, v's row, x): a row's number is a cumsum's

What is done with such rows is in `row_calls.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from dcpc.errors import TraceError, running_line

_MASK = "_dcpc_chosen_by"  # attribute of rows: the mask that they are chosen by
_RAW = "_dcpc_as_selected"  # of selected rows: the same, not filled
_DIM = "_dcpc_coordinate"  # of coordinates of chosen places: which dim they are along
_MADE = "_dcpc_made"  # of bools and integers: the call that made them
FILL = 0.5  # of floats that are not chosen: usual functions and their derivatives are finite there


def refused(got: str, advice: str) -> TraceError:
    """Returns an error for the running line of forward's."""
    return TraceError(
        f"the model cannot be captured: got {got}{running_line()}; expected a size that does not "
        f"depend on values, in calls that compute each row alone; {advice}"
    )


def note_made(value: Any, func: Any, args: Any, kwargs: Any) -> None:
    """Notes of which call a tensor of bools or integers is the result, or one of several."""
    for i, each in enumerate(value if isinstance(value, list | tuple) else ()):
        note_made(each, _part(func, i), args, kwargs)
    if isinstance(value, Tensor) and not value.is_floating_point():
        given, tree = tree_flatten((args, kwargs))
        if any(value is x for x in given):
            return  # written in place, or returned as it is
        versions = [x._version for x in given if isinstance(x, Tensor)]
        setattr(value, _MADE, (value._version, func, given, versions, tree))


@cache
def _part(func: Any, index: int) -> Callable[..., Any]:
    """Returns the function of one of a call's results."""

    @wraps(func)
    def part(*args: Any, **kwargs: Any) -> Any:
        return func(*args, **kwargs)[index]

    return part


def made_by(x: Tensor) -> tuple[Any, Any, Any] | None:
    """Returns the call that made bools or integers, None where any of them was written since."""
    made: Any = getattr(x, _MADE, (-1, None, (), [], None))
    version, func, given, versions, tree = made
    now = [each._version for each in given if isinstance(each, Tensor)]
    if version != x._version or now != versions:
        return None
    return func, *tree_unflatten(given, tree)


def alike(a: Any, b: Any) -> bool:
    """Whether two values are one, or results of equal calls, so that two masks are the same."""
    if a is b or not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return a is b or (type(a) is type(b) and bool(a == b))
    made = [getattr(x, _MADE) for x in (a, b) if hasattr(x, _MADE)]
    if [m[0] for m in made] != [a._version, b._version]:
        return False
    (_, func, given, versions, _), (_, other, others, theirs, _) = made
    same = func is other and versions == theirs and len(given) == len(others)
    now = [x._version for x in given if isinstance(x, Tensor)]
    return same and now == versions and all(map(alike, given, others))


def is_chosen(x: Any) -> bool:
    """Whether a value is rows that a mask chose."""
    return isinstance(x, Tensor) and hasattr(x, _MASK)  # a proxy of fx has any attribute


def mask_of(values: Any) -> Tensor | None:
    """Returns the mask by which the rows among some values are chosen, None without such rows.

    Raises:
        TraceError: there are rows of two masks.
    """
    found = [getattr(x, _MASK) for x in tree_leaves(values) if is_chosen(x)]
    masks = [mask for mask, _ in found]
    same = all(alike(mask, masks[0]) for mask in masks)
    if not same or any(mask._version != version for mask, version in found):
        raise refused("rows that two masks chose", "choose all by one mask, kept in a variable")
    return masks[0] if masks else None


def marked(rows: Tensor, mask: Tensor) -> Tensor:
    """Returns rows, noted as chosen by a mask."""
    setattr(rows, _MASK, (mask, mask._version))
    return rows


def keep_coordinates(rows: Any, of: Any) -> None:
    """Notes that rows [places] are the coordinates [places, 1] of which they are a view."""
    dim = _coordinate(of)
    if dim is not None and isinstance(rows, Tensor) and rows.ndim == 1:
        setattr(rows, _DIM, (dim, rows._version))


def _coordinate(rows: Any) -> int | None:
    """Returns the dim that rows are the coordinates along, if nothing wrote to them."""
    dim, version = getattr(rows, _DIM, (None, None)) if isinstance(rows, Tensor) else (None, None)
    return dim if version is not None and version == rows._version else None


def as_selected(rows: Tensor) -> Tensor:
    """Returns selected rows as they were, rows that are not chosen included."""
    raw, *versions = getattr(rows, _RAW, (rows, rows._version, rows._version))
    found: Tensor = raw if versions == [rows._version, raw._version] else rows
    return found


def kept(rows: Tensor, mask: Tensor, other: float = 0.0) -> Tensor:
    """Returns rows with a number in those that are not chosen."""
    return torch.where(_wide(mask.flatten(), rows.ndim), rows, other)


def _wide(mask: Tensor, ndim: int) -> Tensor:
    return mask.reshape([*mask.shape, *[1] * (ndim - mask.ndim)])


def _covers(mask: Any, x: Tensor) -> bool:
    """Whether a value is a mask of x's first dims."""
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or not 0 < mask.ndim <= x.ndim:
        return False
    pairs = zip(mask.shape, x.shape, strict=False)
    return not is_chosen(mask) and all(a == b for a, b in pairs)  # as torch itself asks


def _selected(x: Tensor, mask: Tensor) -> Tensor:
    raw = x.flatten(0, mask.ndim - 1)
    rows: Tensor = marked(kept(raw, mask, FILL if x.is_floating_point() else 0), mask)
    setattr(rows, _RAW, (raw, rows._version, raw._version))
    return rows


def _mask_in(x: Tensor, index: Any) -> Tensor | None:
    """Returns the mask of x's first dims that an index is, or that it has all coordinates of."""
    parts = [*index] if isinstance(index, tuple) else [index]
    while len(parts) > 1 and (parts[-1] is Ellipsis or isinstance(parts[-1], slice)):
        if parts.pop() not in (Ellipsis, slice(None)):
            return None
    along = [_coordinate(p) if getattr(p, "ndim", 0) == 1 else None for p in parts]
    mask = mask_of(parts) if None not in along else parts[0]
    whole = along == [*range(getattr(mask, "ndim", 0))] if None not in along else len(parts) == 1
    return mask if whole and _covers(mask, x) else None


def _get(x: Tensor, index: Any) -> Any:
    mask = None if is_chosen(x) else _mask_in(x, index)
    if mask is not None:
        return _selected(x, mask)
    parts = index if isinstance(index, tuple) else (index,)
    by = mask_of(parts)
    known = (isinstance(p, int | slice) or (is_chosen(p) and p.ndim == 1) for p in parts)
    if by is None or is_chosen(x) or not is_chosen(parts[0]) or not all(known):
        return NotImplemented
    return marked(x[index], by)


def _masked_select(x: Tensor, mask: Any) -> Any:
    whole = _covers(mask, x) and mask.ndim == x.ndim and not is_chosen(x)
    return _selected(x, mask) if whole else NotImplemented


def _index_select(x: Tensor, dim: int, index: Any) -> Any:
    return NotImplemented if dim else _get(x, index)


def _nonzero(mask: Any, *, as_tuple: bool = False) -> Any:
    if not isinstance(mask, Tensor) or not mask.ndim or is_chosen(mask):
        return NotImplemented
    mask = mask if mask.dtype == torch.bool else mask != 0
    places = []
    for dim, size in enumerate(mask.shape):
        shape = [-1 if d == dim else 1 for d in range(mask.ndim)]
        along = torch.arange(size, device=mask.device).reshape(shape)
        places.append(marked(along.expand(mask.shape).flatten(), mask))
        setattr(places[-1], _DIM, (dim, places[-1]._version))
    if as_tuple:
        return tuple(places)
    found = marked(torch.stack(places, -1), mask)
    if len(places) == 1:
        setattr(found, _DIM, (0, found._version))
    return found


def _where(condition: Any, *rest: Any, **more: Any) -> Any:
    return NotImplemented if rest or more else _nonzero(condition, as_tuple=True)


def _put(x: Tensor, index: Any, value: Any, accumulate: bool = False) -> Any:
    """Returns x with other values at chosen places; NotImplemented where that is torch's."""
    mask = None if accumulate or is_chosen(x) else _mask_in(x, index)
    if mask is None:
        return NotImplemented
    wide, by = _wide(mask, x.ndim), mask_of(value)
    value = torch.as_tensor(value, dtype=x.dtype, device=x.device)
    if by is not None:
        if not alike(by, mask):
            raise refused("rows that another mask chose", "keep the mask in a variable")
        value = value.reshape([*mask.shape, *value.shape[1:]])
    elif value.ndim == x.ndim - mask.ndim + 1:
        inner = zip(value.shape[1:], x.shape[mask.ndim :], strict=True)
        if not statically_known_true(value.shape[0] == 1):
            whole = all(statically_known_true(a == b) for a, b in inner)
            return _masked_scatter(x, wide.expand(x.shape), value) if whole else NotImplemented
        value = value[0]
    return torch.where(wide, value, x)


def _index_put(x: Tensor, indices: Any, values: Any, accumulate: bool = False) -> Any:
    return _put(x, tuple(indices), values, accumulate)


def _masked_scatter(x: Tensor, mask: Any, source: Any) -> Any:
    if (by := mask_of(source)) is not None:
        return _put(x, by, source) if alike(mask, by) else NotImplemented
    if mask.dtype != torch.bool or mask.ndim > x.ndim or x.dtype != source.dtype:
        return NotImplemented  # torch says what is wrong
    mask, row = mask.expand(x.shape), list[int]()
    while len(row) < x.ndim - 1 and mask.stride()[-1] == 0 and isinstance(mask.shape[-1], int):
        row.insert(0, mask.shape[-1])
        mask = mask.select(-1, 0)
    if not statically_known_true(source.numel() % math.prod(row) == 0):
        return NotImplemented
    rows = source.reshape([-1, *row])
    if statically_known_true(rows.shape[0] == 0):
        return x.clone()
    place = (mask.flatten().cumsum(0) - 1).clamp(min=0).reshape(mask.shape)
    return torch.where(_wide(mask, x.ndim), rows[place], x)


def _written(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that writes its result to its first argument."""

    def write(x: Tensor, *rest: Any, **more: Any) -> Any:
        found = function(x, *rest, **more)
        return NotImplemented if found is NotImplemented else x.copy_(found)

    return write


CHOSEN: Mapping[Any, Callable[..., Any]] = {
    **dict.fromkeys((torch.masked_select, Tensor.masked_select), _masked_select),
    **dict.fromkeys((torch.nonzero, Tensor.nonzero, torch.argwhere, Tensor.argwhere), _nonzero),
    **dict.fromkeys((torch.index_select, Tensor.index_select), _index_select),
    **dict.fromkeys((torch.masked_scatter, Tensor.masked_scatter), _masked_scatter),
    **dict.fromkeys((torch.index_put, Tensor.index_put), _index_put),
    Tensor.__getitem__: _get,
    Tensor.__setitem__: _written(_put),
    Tensor.masked_scatter_: _written(_masked_scatter),
    Tensor.index_put_: _written(_index_put),
    torch.where: _where,
}
