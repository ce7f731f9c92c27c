"""Splits composite calls whose inner ops autocast casts, though it has no rule for the whole call.

torch.export keeps such a call as one op, which would compute in the dtypes that it is given.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves, tree_map

aten = torch.ops.aten


def under_autocast(values: Any) -> bool:
    """Returns whether autocast is on for the device of the first tensor among some values."""
    found = [t for t in tree_leaves(values) if isinstance(t, Tensor)]
    return bool(found) and torch.is_autocast_enabled(found[0].device.type)


def apart(op: OpOverload) -> Callable[..., Any]:
    """Returns a function that, under autocast, runs a composite op as the ops it consists of."""

    def parts(*args: Any, **kwargs: Any) -> Any:
        return op.decompose(*args, **kwargs) if under_autocast((args, kwargs)) else NotImplemented

    return parts


def cast_to(value: Any, dtype: torch.dtype) -> Any:
    """Returns a floating tensor of at most 32 bits cast to a dtype; any other value as it is."""
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.dtype.itemsize > 4:
        return value
    if value.dtype == dtype:
        return value
    return aten._to_copy.default(value, dtype=dtype)


def einsum(equation: Any, *operands: Any) -> Any:
    """Computes an einsum under autocast as products of two operands each; else NotImplemented."""
    given = operands[0] if isinstance(operands[0], list | tuple) else operands
    text = str(equation).replace(" ", "")
    inputs, arrow, output = text.partition("->")
    left, right, *rest = [*inputs.split(","), ""][: max(len(given), 2)]
    if not arrow or not under_autocast(given) or len(given) < 2 or (rest and "." in text):
        return NotImplemented
    if rest:
        needed = {*output, *"".join(rest)}
        kept = "".join(dict.fromkeys(n for n in left + right if n in needed))
        pair, both = f"{left},{right}->{kept}", given[:2]
        found = einsum(pair, *both)
        first = torch.einsum(pair, *both) if found is NotImplemented else found
        then = f"{','.join([kept, *rest])}->{output}", first, *given[2:]
        found = einsum(*then)
        return torch.einsum(*then) if found is NotImplemented else found
    one, two, out = map(set, (left, right, output))
    if one - two - out or two - one - out or not (one & two) - out:
        return NotImplemented
    return torch.einsum(text, *(_lowered(t) for t in given))


def _lowered(value: Any) -> Any:
    """Returns a tensor in the dtype in which autocast multiplies matrices."""
    return cast_to(value, torch.get_autocast_dtype(value.device.type))


def product(product: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a tensor product (`inner`, `tensordot`) whose operands are cast as under autocast."""

    def cast(a: Any, b: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = isinstance(a, Tensor) and isinstance(b, Tensor) and min(a.ndim, b.ndim) > 0
        if not tensors or not under_autocast((a, b)):
            return NotImplemented
        return product(_lowered(a), _lowered(b), *args, **kwargs)

    return cast


def in_float32(
    function: Callable[..., Any], formula: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """Returns a function whose floating arguments are cast to float32 under autocast.

    Args:
        function: torch's function.
        formula: replacement that is tried first; it returns NotImplemented for arguments it does
            not take.
    """

    def cast(*args: Any, **kwargs: Any) -> Any:
        under = under_autocast((args, kwargs))
        if under:
            args, kwargs = tree_map(lambda x: cast_to(x, torch.float32), (args, kwargs))
        found = formula(*args, **kwargs) if formula else NotImplemented
        return function(*args, **kwargs) if under and found is NotImplemented else found

    return cast
