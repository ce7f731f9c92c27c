"""How a fault is planted: an edit of a function's code while it lasts, never of a file."""

from __future__ import annotations
import __future__

import inspect
import pkgutil
import textwrap
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any
from unittest import mock

from dcpc.ops.ring_route import route

PHASES = (
    "trace", "masks", "rules", "placement", "lowering", "derivatives", "schedule", "attention",
    "caches", "runtime",
)  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """A planted fault.

    Attributes:
        name: what is wrong, in a few words.
        phase: one of `PHASES`.
        setting: the model of `mutants_models.SETTINGS` on which it matters.
        plant: makes the context in which dcpc has the fault.
        quick: whether `--quick` runs it.
    """

    name: str
    phase: str
    setting: str
    plant: Callable[[], AbstractContextManager[Any]]
    quick: bool = False


class MisplantedError(Exception):
    """The code that a fault is an edit of reads otherwise now."""


def edited(place: str, old: str, new: str) -> Callable[[], AbstractContextManager[Any]]:
    """Returns what plants a fault: a function whose source has `new` where it has `old`.

    The code of the function itself is exchanged, so whoever holds it runs the other one.

    Args:
        place: module of dcpc and function in it, without a closure: `trace.losses:_added`.
        old: part of its source; it has to be there once.
        new: what stands there instead.
    """
    return lambda: _exchanged(place, old, new)


@contextmanager
def _exchanged(place: str, old: str, new: str) -> Iterator[None]:
    try:
        function: FunctionType = inspect.unwrap(pkgutil.resolve_name(f"dcpc.{place}"))
    except (AttributeError, ImportError) as error:
        raise MisplantedError(f"there is no {place}: {error}") from error
    source = textwrap.dedent(inspect.getsource(function))
    if source.count(old) != 1:
        raise MisplantedError(f"{place} has {old!r} {source.count(old)} times; expected once")
    before, faulty = function.__code__, _code(function, source.replace(old, new))
    function.__code__ = faulty
    try:
        with _fresh():
            yield
    finally:
        function.__code__ = before


def _code(function: FunctionType, source: str) -> CodeType:
    flags = __future__.annotations.compiler_flag
    scope: dict[str, Any] = {}
    exec(compile(source, f"<{function.__qualname__}>", "exec", flags), function.__globals__, scope)
    made = scope[function.__name__]
    made = made.fget if isinstance(made, property) else inspect.unwrap(made)
    return made.__code__  # type: ignore[no-any-return]


def returned(
    owner: Any, name: str, edit: Callable[[Any], Any]
) -> Callable[[], AbstractContextManager[Any]]:
    """Returns what plants a fault: a function whose result is edited.

    Args:
        owner: module or class that callers look the function up in.
        name: of the function there.
        edit: result -> what is returned instead.
    """

    @contextmanager
    def plant() -> Iterator[None]:
        original = getattr(owner, name)

        def faulty(*args: Any, **kwargs: Any) -> Any:
            return edit(original(*args, **kwargs))

        with mock.patch.object(owner, name, faulty), _fresh():
            yield

    return plant


@contextmanager
def _fresh() -> Iterator[None]:
    """Nothing that was kept before is used with a fault, nor what was made with it afterwards."""
    route.cache_clear()
    try:
        yield
    finally:
        route.cache_clear()
