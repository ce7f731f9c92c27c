"""Embedding look-ups that refuse ids of a floating dtype and ignore `sparse=True`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F


def _dense(lookup: Callable[..., Any]) -> Callable[..., Any]:
    names = list(inspect.signature(lookup).parameters)

    def dense(*args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        kind = getattr(given.get("input"), "dtype", torch.int64)
        if kind not in (torch.int32, torch.int64):  # torch 2.11 captures it, and fails when it runs
            raise RuntimeError(
                "Expected tensor for argument #1 'indices' to have one of the following scalar "
                f"types: Long, Int; but got {kind} instead"
            )
        return lookup(**{**given, "sparse": False}) if given.get("sparse") else NotImplemented

    return dense


LOOKUPS: Mapping[Any, Callable[..., Any]] = {
    F.embedding: _dense(F.embedding),
    F.embedding_bag: _dense(F.embedding_bag),
}
