"""Methods and attributes of a compiled model that one of its parts has.

`help(compiled)` shows them as the model's own, with the part's signatures and texts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from operator import attrgetter
from typing import Any, Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def handed(part: str, method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """Returns a method of a model that hands calls to a method of the part of this name."""
    of_part = attrgetter(f"{part}.{method.__name__}")

    @wraps(method)
    def call(model: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        found: T = of_part(model)(*args, **kwargs)
        return found

    return call


def shown(part: str, attribute: Callable[[Any], T]) -> T:
    """Returns a property, typed as its value, that reads a property of the part of this name."""
    read: Any = attribute
    found: Any = property(attrgetter(f"{part}.{read.fget.__name__}"), doc=read.__doc__)
    return found  # type: ignore[no-any-return]
