"""Replaces names of torch for a while, each probed before its first use.

    first use ─► the probe: is the name there, does torch call it as dcpc expects?
                   yes ─► replaced as long as the block lasts
                   no  ─► one warning, and torch's own way; or an error where that would be wrong

A probe looks at the torch that is installed, never at its version number.
"""

from __future__ import annotations

import importlib
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest.mock import patch

import torch

from dcpc.errors import TraceError

Probe = Callable[["TorchName"], str]
ABSENT = object()


@dataclass(frozen=True)
class TorchName:
    """A name of torch that dcpc replaces.

    Attributes:
        module: module that has the name; imported at the first use.
        path: attributes within the module, the last of which is replaced.
        probe: function that returns how torch differs from the expected, "" if it does not.
        without: consequence of leaving the name as it is, as a clause.
        needed: whether results would be wrong without the replacement.
        added: whether torch may lack the name, as it calls it if it exists.
    """

    module: str
    path: str
    probe: Probe
    without: str
    needed: bool = False
    added: bool = False

    def __str__(self) -> str:
        return f"{self.module}.{self.path}"

    @property
    def owner(self) -> Any:
        """The object that has the name."""
        found: Any = importlib.import_module(self.module)
        for part in self.path.split(".")[:-1]:
            found = getattr(found, part)
        return found

    @property
    def name(self) -> str:
        """The attribute of `owner`."""
        return self.path.rpartition(".")[2]

    @property
    def own(self) -> Any:
        """Torch's value of the name, or `ABSENT`."""
        return getattr(self.owner, self.name, ABSENT)

    def usable(self) -> bool:
        """Whether the probe succeeds; warns once if it does not.

        Raises:
            TraceError: it does not, and results would be wrong without it.
        """
        fault = fault_of(self)
        if fault and self.needed:
            raise TraceError(
                f"torch {torch.__version__}: {self}: got {fault}; expected what docs/"
                f"torch-versions.md lists; without it {self.without}: install a release of torch "
                "that is listed there"
            )
        return not fault

    @contextmanager
    def replaced(self, make: Callable[[Any], Any]) -> Iterator[bool]:
        """Replaces the name by `make(torch's value)`, if usable; yields whether it did."""
        if not self.usable():
            yield False
            return
        with self.holding(make(self.own)):
            yield True

    def put(self, value: Any) -> AbstractContextManager[bool]:
        """Replaces the name by a value, if usable; yields whether it did."""
        return self.replaced(lambda _: value)

    @contextmanager
    def extended(self, entries: Mapping[Any, Any]) -> Iterator[None]:
        """Adds entries to a dict of torch, if usable, within its block."""
        if not self.usable():
            yield
            return
        with patch.dict(self.own, entries):
            yield

    @contextmanager
    def holding(self, value: Any) -> Iterator[None]:
        """Replaces the name by `value` within its block, whatever the probe says."""
        owner, name = self.owner, self.name
        inherited = isinstance(owner, type) and name not in vars(owner)
        before = ABSENT if inherited else vars(owner).get(name, self.own)
        setattr(owner, name, value)
        try:
            yield
        finally:
            if before is ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)


@cache
def fault_of(name: TorchName) -> str:
    """Returns how a name differs from the expected, "" if not; warns if torch's value is kept."""
    try:
        missing = name.own is ABSENT and not name.added
        fault = "no such name" if missing else name.probe(name)
    except Exception as error:  # whatever another release raises when it is asked
        fault = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    if fault and not name.needed:
        warnings.warn(
            f"torch {torch.__version__}: {name}: got {fault}; expected what docs/torch-versions.md "
            f"lists; torch's own way is taken: {name.without}",
            stacklevel=4,
        )
    return fault


def takes(*parameters: str) -> Probe:
    """Returns a probe of a function's parameters."""

    def probe(name: TorchName) -> str:
        found = tuple(inspect.signature(name.own).parameters)
        return "" if found == parameters else f"parameters {found} in the place of {parameters}"

    return probe


def has_owner(name: TorchName) -> str:
    """Returns "" if torch has the owner of the name; see `TorchName.added`."""
    return "" if name.owner is not None else "nothing to add it to"


def is_a(kind: type) -> Probe:
    """Returns a probe of a value's type."""

    def probe(name: TorchName) -> str:
        return "" if isinstance(name.own, kind) else f"a {type(name.own).__name__}"

    return probe


def calls(run: Callable[[], object], expected: Callable[..., bool]) -> Probe:
    """Returns a probe of a function that torch must call with expected arguments."""

    def probe(name: TorchName) -> str:
        own, seen = name.own, list[bool]()

        def noting(*args: Any, **kwargs: Any) -> Any:
            seen.append(expected(*args, **kwargs))
            return own(*args, **kwargs)

        with name.holding(noting):
            run()
        return "" if seen and all(seen) else "other arguments" if seen else "no call of it"

    return probe
