"""An allocator with a limit: on the CPU, where there is none, ops raise as if there were one."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class MemoryLimit(TorchDispatchMode):
    """Counts the bytes that live of what ops in its block make; raises where they are too many.

    Attributes:
        limit_bytes: how many may live.
        most_bytes: how many did.
        calls: ops so far.
        raised: how often it raised.
    """

    def __init__(
        self,
        limit_bytes: float = float("inf"),
        at: Callable[[int], bool] = lambda call: False,
        kind: Callable[[str], Exception] = torch.OutOfMemoryError,
    ) -> None:
        """Sets the limit.

        Args:
            limit_bytes: how many bytes may live.
            at: whether an op of this number fails whatever lives.
            kind: makes the error of its text.
        """
        super().__init__()
        self.limit_bytes, self.at, self.kind = limit_bytes, at, kind
        self.most_bytes = self.calls = self.raised = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs))
                 if isinstance(x, torch.Tensor)}  # fmt: skip
        found = func(*args, **(kwargs or {}))
        self.calls += 1
        new = 0
        for x in tree_leaves(found):
            if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in given:
                ref = StorageWeakRef(x.untyped_storage())
                self._live[ref.cdata] = ref, x.untyped_storage().nbytes()
                new += x.untyped_storage().nbytes()
        self._live = {k: v for k, v in self._live.items() if not v[0].expired()}
        live = sum(size for _, size in self._live.values())
        if live > self.limit_bytes or self.at(self.calls):
            self.raised += 1
            raise self.kind(f"injected limit: Tried to allocate {new} bytes")
        self.most_bytes = max(self.most_bytes, live)
        return found

    @contextmanager
    def around(self, what: Any, name: str) -> Iterator[None]:
        """Has the limit around each call of a function of an object or a module."""
        given = getattr(what, name)

        def limited(*args: Any, **kwargs: Any) -> Any:
            with self:
                return given(*args, **kwargs)

        setattr(what, name, limited)
        try:
            yield
        finally:
            setattr(what, name, given)
