"""Names of torch's that dcpc replaces for a while, each tried out before it is used.

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
    """A name of torch's that dcpc puts something in the place of.

    Attributes:
        module: where it is; imported at the first use.
        path: attributes of the module, the last of which is replaced.
        probe: returns what is not as expected, "" if nothing is.
        without: what happens where it is left as it is, as a clause.
        needed: whether nothing right remains then.
        added: whether torch need not have the name: it calls what is there.
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
        """What has the name."""
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
        """What torch has there; `ABSENT`: nothing."""
        return getattr(self.owner, self.name, ABSENT)

    def usable(self) -> bool:
        """Whether torch is as expected; warns once where it is not.

        Raises:
            TraceError: it is not, and nothing right remains.
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
        """Puts `make(torch's own)` in its place, if that is usable; yields whether it did."""
        if not self.usable():
            yield False
            return
        with self.holding(make(self.own)):
            yield True

    def put(self, value: Any) -> AbstractContextManager[bool]:
        """Puts a value in its place, if that is usable; yields whether it did."""
        return self.replaced(lambda _: value)

    @contextmanager
    def extended(self, entries: Mapping[Any, Any]) -> Iterator[None]:
        """Adds entries to a dict of torch's, if that is usable."""
        if not self.usable():
            yield
            return
        with patch.dict(self.own, entries):
            yield

    @contextmanager
    def holding(self, value: Any) -> Iterator[None]:
        """In its block the name is `value`, whatever the probe says."""
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
    """Returns what is off about a name, "" if nothing; warns where torch's own way is left."""
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
    """Returns "" where torch has what the name would be of; see `TorchName.added`."""
    return "" if name.owner is not None else "nothing to add it to"


def is_a(kind: type) -> Probe:
    """Returns a probe of a value's type."""

    def probe(name: TorchName) -> str:
        return "" if isinstance(name.own, kind) else f"a {type(name.own).__name__}"

    return probe


def calls(run: Callable[[], object], expected: Callable[..., bool]) -> Probe:
    """Returns a probe of a function that torch must call, with such arguments.

    Args:
        run: what must call it.
        expected: whether arguments are as dcpc takes them.
    """

    def probe(name: TorchName) -> str:
        own, seen = name.own, list[bool]()

        def noting(*args: Any, **kwargs: Any) -> Any:
            seen.append(expected(*args, **kwargs))
            return own(*args, **kwargs)

        with name.holding(noting):
            run()
        return "" if seen and all(seen) else "other arguments" if seen else "no call of it"

    return probe
