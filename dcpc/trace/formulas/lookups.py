"""Look-ups in tables with `sparse=True`: graphs have no sparse gradients, so theirs are dense."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch.nn.functional as F


def _dense(lookup: Callable[..., Any]) -> Callable[..., Any]:
    names = list(inspect.signature(lookup).parameters)

    def dense(*args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        return lookup(**{**given, "sparse": False}) if given.get("sparse") else NotImplemented

    return dense


LOOKUPS: Mapping[Any, Callable[..., Any]] = {
    F.embedding: _dense(F.embedding),
    F.embedding_bag: _dense(F.embedding_bag),
}
