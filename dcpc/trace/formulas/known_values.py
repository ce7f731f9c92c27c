"""Values of tensors that forward makes of numbers alone, which a trace can know.

    grid = torch.tensor([[1, 4, 4]] * 2);  grid.prod(-1).tolist()   ->  [16, 16]
    index[index != -100], unique, repeat_interleave of such         ->  a constant

They are computed again, from the calls that `chosen_rows.py` notes, where forward asks for them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from dcpc.trace.formulas.chosen_rows import made_by

NUMBERS = {Tensor.item, Tensor.tolist, Tensor.__float__, Tensor.__int__, Tensor.__index__}
_OF_VALUES = {
    *(torch.repeat_interleave, torch.unique, torch.unique_consecutive, torch.masked_select),
    *(Tensor.repeat_interleave, Tensor.unique, Tensor.unique_consecutive, Tensor.masked_select),
    *(torch.nonzero, Tensor.nonzero, Tensor.__bool__, *NUMBERS),
}
_MAKE = {torch.tensor, torch.arange, torch.zeros, torch.ones, torch.full}
_DRAWS = ("rand", "empty", "bernoulli", "multinomial", "poisson", "binomial")
_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device, type(...))


def known(func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Returns the numbers, or the tensor, of a call whose size or result depends on values.

    NotImplemented: it does not, or the values depend on more than numbers.
    """
    if func not in _OF_VALUES and not (func is Tensor.__getitem__ and _has_mask(args[1])):
        return NotImplemented
    try:
        found = _run(func, args, kwargs, {})
    except (_NotKnownError, RuntimeError):  # torch says what is wrong
        return NotImplemented
    return tree_map_only(Tensor, _constant, found)


class _NotKnownError(Exception):
    """Some value depends on more than numbers."""


def _has_mask(index: Any) -> bool:
    return any(isinstance(x, Tensor) and x.dtype == torch.bool for x in tree_leaves(index))


def _constant(x: Tensor) -> Tensor:
    return torch.tensor(x.tolist(), dtype=x.dtype, device=x.device)


def _run(func: Any, args: Any, kwargs: Any, done: dict[int, Any]) -> Any:
    leaves, name = tree_leaves((args, kwargs)), getattr(func, "__name__", "rand")
    made = func in _MAKE or any(isinstance(x, Tensor) for x in leaves)
    plain = all(isinstance(x, Tensor) or _plain(x) for x in leaves)
    if not made or not plain or any(part in name for part in _DRAWS):
        raise _NotKnownError
    args, kwargs = tree_map_only(Tensor, lambda x: _value(x, done), (args, kwargs))
    with _disable_current_modes():
        return func(*args, **kwargs)


def _plain(x: Any) -> bool:
    parts = (x.start, x.stop, x.step) if isinstance(x, slice) else (x,)
    return all(type(part) in _PLAIN for part in parts)


def _value(x: Tensor, done: dict[int, Any]) -> Any:
    if id(x) not in done:
        call = made_by(x)
        if call is None:
            raise _NotKnownError
        done[id(x)] = _run(*call, done)
    return done[id(x)]
