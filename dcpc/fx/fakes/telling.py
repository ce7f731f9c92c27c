"""torch's mode of fake tensors, told the results of common calls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch._ops import OpOverload
from torch._subclasses import FakeTensor, FakeTensorMode

from dcpc.fx.fakes.dense import dense_result
from dcpc.fx.torch_api.tracing import DISPATCH, open_pools

_own = FakeTensorMode.dispatch


@contextmanager
def telling() -> Iterator[None]:
    """In its block all modes of fake tensors are told what `dense_result` knows; nests.

    torch asks them of every op of a model three times and more: when it is captured, when it is
    made functional, and for the ops that it is made of. It makes these modes itself, so they are
    told through their class.
    """
    with DISPATCH.put(_told), open_pools():
        yield


def _told(
    mode: FakeTensorMode,
    func: Any,
    types: Sequence[type],
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    if isinstance(func, OpOverload) and all(t is FakeTensor for t in types):
        known = dense_result(func, args, kwargs or {})
        if known is not None:
            return known
    return _own(mode, func, types, args, kwargs or {})
