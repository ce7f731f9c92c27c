"""Keys for arguments, over a closed list of kinds of values, for code that caches by arguments.

A result of one call is reused for another where their arguments are equal. But Python treats 1, 1.0
and True as equal, and 0.0 and -0.0, and prints large tensors and objects in ways that tell little.
So the keys of arguments are made here, and nowhere else. A value of an unlisted kind is an error,
as equality is not defined for it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeAlias

import sympy
import torch

from dcpc.errors import CodegenError

Symbolic: TypeAlias = torch.SymInt | torch.SymFloat | torch.SymBool

# Types whose values are equal exactly if their texts are: a float's text has all its digits, the
# sign of zero and nan.
_BY_TEXT = (
    *(bool, float, complex, str, type(None), torch.dtype, torch.device, torch.layout),
    torch.memory_format,
)


def is_symbolic(leaf: Any) -> bool:
    """Whether a value is an expression of sizes: an integer, a float or a bool."""
    return isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool)


def size_key(size: Any) -> Any:
    """Returns the expression of a symbolic size; a number as it is."""
    if isinstance(size, torch.SymInt):
        return size.node.expr
    if type(size) is int:
        return size
    raise unknown(size, "a size")


def leaf_key(leaf: Any) -> Hashable:
    """Returns the key of a value that is no tensor, equal for equal values.

    The key of a symbolic value contains its expression; that of a size is `size_key`.

    Raises:
        CodegenError: the value is of an unknown kind.
    """
    kind = type(leaf)
    if kind in (int, torch.SymInt):
        key: Hashable = size_key(leaf)
        return key
    if kind in (torch.SymFloat, torch.SymBool):
        return kind.__name__, leaf.node.expr
    if kind in _BY_TEXT:
        return kind.__name__, repr(leaf)
    raise unknown(leaf, "an argument")


def tree_key(value: Any, of_leaf: Callable[[Any], Hashable] = leaf_key) -> Hashable:
    """Returns the key of nested arguments, equal for equal ones.

    Args:
        value: lists, tuples, slices and dicts of leaves.
        of_leaf: function that returns the key of a leaf; default: `leaf_key`.
    """
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return (kind, *(tree_key(v, of_leaf) for v in value))
    if isinstance(value, Mapping):
        return ("dict", *((k, tree_key(v, of_leaf)) for k, v in sorted(value.items())))
    if isinstance(value, slice):
        parts = (value.start, value.stop, value.step)
        return ("slice", *(tree_key(v, of_leaf) for v in parts))
    return of_leaf(value)


def renamed_key(key: Hashable, name: Callable[[sympy.Basic], sympy.Basic]) -> Hashable:
    """Returns a key with its expressions replaced."""
    if isinstance(key, tuple):
        return tuple(renamed_key(part, name) for part in key)
    if isinstance(key, sympy.Basic):
        other: Hashable = name(key)
        return other
    return key


def unknown(leaf: Any, what: str) -> CodegenError:
    """Returns the error for a value of a kind that is not listed."""
    return CodegenError(
        f"{what} is {type(leaf).__name__}, of which dcpc does not know when two are equal; "
        "expected a tensor, a number, a str, None or what names a dtype, device or layout; "
        "report the model's op that takes it"
    )
